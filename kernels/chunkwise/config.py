"""Block sizes, warps and precision of the chunkwise kernels, by shape class.

Chosen by measurement on one H200; a table instead of a search, so that the first result comes at
once and every run does the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

CHUNK_TOKENS = 64
LARGEST_WIDTH = 256


@dataclass(frozen=True)
class Shape:
    """A problem's sizes, filled up to whole blocks, and the launch options that follow."""

    batch: int
    length: int
    heads: int
    key_width: int
    value_width: int
    chunk: int
    dtype: torch.dtype

    @property
    def chunks(self) -> int:
        """Chunks a row, the last one filled up."""
        return triton.cdiv(self.length, self.chunk)

    @property
    def key_padded(self) -> int:
        """Key width up to whole blocks."""
        return _padded(self.key_width)

    @property
    def value_padded(self) -> int:
        """Value width up to whole blocks."""
        return _padded(self.value_width)

    @property
    def blocks(self) -> dict[str, int]:
        """Constants that the kernels over single chunks share."""
        widest = 64 if self.dtype == torch.float32 else 128
        return {
            "C": self.chunk,
            "KP": self.key_padded,
            "VP": self.value_padded,
            "BK": min(widest, self.key_padded),
            "BV": min(64, self.value_padded),
            "LEVELS": self.chunk.bit_length() - 1,
        }

    @property
    def scan_blocks(self) -> dict[str, int]:
        """Constants of the kernels that walk from chunk to chunk."""
        room = 64 * 128 if self.dtype != torch.float32 else 32 * 64
        rows = self.batch * self.heads
        block = max(16, min(64, room // self.key_padded, self.value_padded))
        # Few rows: narrower blocks of columns put more of the processors to work.
        while block > 16 and rows * (self.value_padded // block) < 100:
            block //= 2
        return {
            "C": self.chunk, "KP": self.key_padded, "VP": self.value_padded, "BV": block,
        }  # fmt: skip

    @property
    def value_block(self) -> int:
        """Value columns of one program of the output kernel."""
        return min(128 if self.dtype != torch.float32 else 64, self.value_padded)

    @property
    def stages(self) -> int:
        """Chunks that the scans load ahead."""
        return 1 if self.dtype == torch.float32 or self.key_padded > 128 else 2

    @property
    def gradient_warps(self) -> int:
        """Of the gradient kernel."""
        return 8

    @property
    def precision(self) -> dict[str, str]:
        """How fp32 operands go through matrix units."""
        exact = "ieee" if torch.version.hip else "tf32x3"
        return {"PRECISION": exact if self.dtype == torch.float32 else "tf32"}

    @property
    def inverse_precision(self) -> str:
        """Of the products that invert I + A, always in fp32."""
        return self.precision["PRECISION"]


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
