"""Reading a GGUF file: metadata in milliseconds, tensors dequantised to fp32 one at a time.

The layout is llama.cpp's (ggml/docs/gguf.md); the block formats are decoded by the ``gguf``
package. Its own reader takes seconds over a large vocabulary, hence this one.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltconvert.errors import UserError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: shape as PyTorch names it, block format, byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    start: int


class _Cursor:
    """Reads little-endian values off a buffer, one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.position = buffer, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.buffer):
            raise struct.error("string runs past the end")
        return self.buffer[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            codes = f"<{count}{_SCALARS[inner]}"
            values = struct.unpack_from(codes, self.buffer, self.position)
            self.position += struct.calcsize(codes)
            return list(values)
        return [self.value(inner) for _ in range(count)]


class GGUFFile:
    """The metadata and the tensors of one GGUF file.

    Attributes:
        metadata: key -> value.
        tensors: name -> TensorInfo.
        header_digest: sha256 of all that precedes the tensor data (tokenizer included).

    Raises:
        UserError: the file is no GGUF, is of an unknown version, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file (its first bytes are not 'GGUF')")
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except (struct.error, KeyError, MemoryError, OverflowError) as error:
            raise UserError(f"{path} is broken or incomplete (its header): get it again") from error

    def read(self, name: str) -> Tensor:
        """A tensor as fp32, dequantised.

        Raises:
            UserError: the block format is not one that the gguf package decodes.
        """
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.ggml_type)
            block, size = GGML_QUANT_SIZES[kind]
            row_bytes = info.shape[-1] // block * size
            raw = np.frombuffer(
                self._buffer, np.uint8, self._rows(info) * row_bytes, offset=info.start
            )
            values = dequantize(raw.reshape(*info.shape[:-1], row_bytes), kind)
        except NotImplementedError as error:
            raise UserError(f"{self.path}: cannot decode block format {kind.name}") from error
        except ValueError as error:
            raise UserError(f"{self.path} is broken or incomplete (tensor {name})") from error
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(info.shape)

    def formats(self) -> str:
        """The block formats in it, e.g. ``"F32, Q4_1, Q8_0"``."""
        from gguf import GGMLQuantizationType

        kinds = {info.ggml_type for info in self.tensors.values()}
        return ", ".join(sorted(GGMLQuantizationType(kind).name for kind in kinds))

    @staticmethod
    def _rows(info: TensorInfo) -> int:
        rows = 1
        for length in info.shape[:-1]:
            rows *= length
        return rows

    def _parse(self) -> None:
        cursor = _Cursor(self._buffer)
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise UserError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name, rank = cursor.string(), cursor.scalar("I")
            shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
            infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        align = self.metadata.get("general.alignment", 32)
        data_start = -(-cursor.position // align) * align
        self.tensors = {n: TensorInfo(n, s, kind, data_start + at) for n, s, kind, at in infos}
        self.header_digest = hashlib.sha256(self._buffer[: cursor.position]).hexdigest()
