"""Local files as a list of documents that can be read in any order, with only offsets in memory."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ltconvert.distill.data.documents import Document, record_document, text_document
from ltconvert.distill.data.unpack import SUPPORTED, kind_of, plain_file
from ltconvert.errors import UserError, first_line
from ltconvert.recipes.data import DataSettings

# A text file is cut into documents of about this size, at the next blank line; a shorter file is
# one document. So one large file has documents to shuffle and to hold out.
_TEXT_DOCUMENT_BYTES = 16_384
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True)
class Shard:
    """One file: where each of its D documents begins, and the end, [D + 1] bytes."""

    path: Path  # as the user named it, for messages
    plain: Path  # the file that is read
    kind: str
    bounds: np.ndarray


class FilesSource:
    """All documents of a file or folder.

    Raises:
        UserError: no such file, no supported file in the folder, or nothing in them.
    """

    def __init__(self, root: Path, settings: DataSettings) -> None:
        self.name = str(root)
        self._settings = settings
        self._shards = [_index(path, settings) for path in find_files(root)]
        counts = [len(shard.bounds) - 1 for shard in self._shards]
        self._firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.fingerprint = _fingerprint(root, self._shards)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def size_bytes(self) -> int:
        """Of all files, unpacked."""
        return sum(int(shard.bounds[-1]) for shard in self._shards)

    def __getitem__(self, index: int) -> Document | None:
        """Document `index`; None for a blank one. UserError names the file and line at fault."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        shard, line = self._shards[number], index - int(self._firsts[number])
        with shard.plain.open("rb") as file:
            file.seek(int(shard.bounds[line]))
            raw = file.read(int(shard.bounds[line + 1] - shard.bounds[line]))
        if shard.kind == "text":
            return text_document(_decode(raw, shard, line), self._settings.heldout_share)
        if not raw.strip():
            return None
        unit = "row" if kind_of(shard.path) == "parquet" else "line"
        place = f"{shard.path}, {unit} {line + 1}"
        line_text = _decode(raw, shard, line)
        try:
            record = json.loads(line_text)
        except (ValueError, RecursionError) as error:  # numbers too long, lists too deep as well
            raise UserError(
                f"{place}: not a JSON object ({_problem(error)}); "
                "jsonl has one whole object a line: mend or delete this line"
            ) from None
        if not isinstance(record, dict):
            raise UserError(f"{place}: a JSON {type(record).__name__}, expected an object")
        return record_document(record, self._settings, place)


def find_files(root: Path) -> list[Path]:
    """The file itself, or all supported files under a folder in the order of their paths."""
    if root.is_file():
        if kind_of(root) is None:
            raise UserError(f"{root}: this kind of file is not supported (supported: {SUPPORTED})")
        return [root]
    files = (path for path in root.rglob("*") if path.is_file() and kind_of(path))
    visible = [p for p in files if not any(s.startswith(".") for s in p.relative_to(root).parts)]
    if not visible:
        raise UserError(f"{root}: no supported file in this folder (supported: {SUPPORTED})")
    return sorted(visible, key=lambda path: path.relative_to(root).as_posix())


def _index(path: Path, settings: DataSettings) -> Shard:
    kind = kind_of(path)
    assert kind is not None
    try:
        plain = plain_file(path, settings)
        size = plain.stat().st_size
        bounds = np.zeros(1, np.int64)
        if size:
            with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                bounds = _text_bounds(data) if kind == "text" else _line_bounds(data)
    except PermissionError as error:
        raise UserError(f"{path}: may not be read ({error.strerror})") from error
    return Shard(path, plain, "text" if kind == "text" else "jsonl", bounds)


def _line_bounds(data: mmap.mmap, block: int = 1 << 24) -> np.ndarray:
    ends = [
        start + 1 + np.flatnonzero(np.frombuffer(data[start : start + block], np.uint8) == 10)
        for start in range(0, len(data), block)
    ]
    bounds = np.concatenate([[0], *ends]).astype(np.int64)
    return bounds if bounds[-1] == len(data) else np.append(bounds, np.int64(len(data)))


def _text_bounds(data: mmap.mmap) -> np.ndarray:
    bounds = [0]
    while (gap := _BLANK_LINE.search(data, bounds[-1] + _TEXT_DOCUMENT_BYTES)) is not None:
        if gap.end() == len(data):
            break
        bounds.append(gap.end())
    return np.array([*bounds, len(data)], np.int64)


def _decode(raw: bytes, shard: Shard, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 0 else "utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {shard.bounds[line] + error.start}"
        if shard.kind != "text":
            where = f"line {line + 1}"
        raise UserError(
            f"{shard.path}, {where}: not UTF-8; convert it, for example with iconv"
        ) from None


def _problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return first_line(error)


def _fingerprint(root: Path, shards: list[Shard]) -> str:
    """Names, sizes and document counts: enough to see that a corpus is another one."""
    digest = hashlib.blake2b(digest_size=8)
    for shard in shards:
        name = shard.path.name if shard.path == root else shard.path.relative_to(root).as_posix()
        digest.update(f"{name}\0{shard.bounds[-1]}\0{len(shard.bounds)}\0".encode(errors="replace"))
    return digest.hexdigest()
