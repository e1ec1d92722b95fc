"""Block sizes, warps and precision of the chunkwise kernels, by shape class.

Chosen by measurement on one H200; a table instead of a search, so that the first result comes at
once and every run does the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ltconvert.kernels.limits import CHUNK_TOKENS


@dataclass(frozen=True)
class Shape:
    """A problem's sizes, filled up to whole blocks, and the launch options that follow."""

    batch: int
    length: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    delta: bool
    per_channel: bool

    @property
    def chunks(self) -> int:
        """Chunks a row, the last one filled up."""
        return triton.cdiv(self.length, CHUNK_TOKENS)

    @property
    def cells(self) -> int:
        """Chunks of all rows and heads."""
        return self.batch * self.heads * self.chunks

    @property
    def sizes(self) -> tuple[int, ...]:
        """T, H, K, V and N of every kernel."""
        return self.length, self.heads, self.key_width, self.value_width, self.chunks

    @property
    def key_padded(self) -> int:
        """Key width up to whole blocks."""
        return padded(self.key_width)

    @property
    def value_padded(self) -> int:
        """Value width up to whole blocks."""
        return padded(self.value_width)

    @property
    def blocks(self) -> dict[str, int]:
        """Constants that the kernels over single chunks share."""
        widest = 64 if self.dtype == torch.float32 or self.per_channel else 128
        return {
            "C": CHUNK_TOKENS,
            "KP": self.key_padded,
            "VP": self.value_padded,
            "BK": min(widest, self.key_padded),
            "BV": min(64 if self.key_padded <= 128 else 32, self.value_padded),
            "LEVELS": CHUNK_TOKENS.bit_length() - 1,
        }

    @property
    def scan_blocks(self) -> dict[str, int]:
        """Constants of the kernels that walk from chunk to chunk."""
        block = 16 if self._narrow else 64
        return {"C": CHUNK_TOKENS, "KP": self.key_padded, "VP": self.value_padded, "BV": block}

    @property
    def scan_programs(self) -> int:
        """A program for each row, head and block of columns."""
        return self.batch * self.heads * (self.value_padded // self.scan_blocks["BV"])

    @property
    def scan_launch(self) -> dict[str, int]:
        """Warps, and chunks loaded ahead, of the scan."""
        return {"num_warps": 4, "num_stages": self._stages(4 if self._narrow else 3)}

    @property
    def reverse_launch(self) -> dict[str, int]:
        """The same of the reverse scan."""
        if self._narrow or not self.delta:
            return {"num_warps": 4, "num_stages": self._stages(3 if self._narrow else 2)}
        return {"num_warps": 8, "num_stages": self._stages(3)}

    @property
    def _narrow(self) -> bool:
        """Whether 64 columns a program would leave processors idle or take too many registers.

        Nothing in between: at keys of 256, scans over 32 columns gave wrong results on an H200
        under Triton 3.6.
        """
        programs = self.batch * self.heads * (self.value_padded // 64)
        return programs < 100 or self.key_padded > 128 or self.dtype == torch.float32

    def _stages(self, most: int) -> int:
        if self.dtype == torch.float32:
            return 1
        # Running sums of every channel fill the shared memory that more chunks would need.
        wide = (self.key_padded > 128) + self.per_channel
        return (most, 2, 1)[wide]

    @property
    def value_block(self) -> int:
        """Value columns of one program of the output kernel."""
        return min(128 if self.dtype != torch.float32 else 64, self.value_padded)

    @property
    def write_launch(self) -> dict[str, int]:
        """Blocks and warps of `write_gradient`."""
        if not self.delta:
            return self.blocks | {"num_warps": 8}
        return self.blocks | {"BK": 64, "num_warps": 8 if self.per_channel else 4}

    @property
    def precision(self) -> dict[str, str]:
        """How fp32 operands go through matrix units."""
        exact = "ieee" if torch.version.hip else "tf32x3"
        return {"PRECISION": exact if self.dtype == torch.float32 else "tf32"}


def padded(width: int) -> int:
    """The width that a key or value is filled up to: 64, 128 or 256.

    Not less: 16 and 24 filled up to 16 and 32 gave wrong results on an H200 under Triton 3.6.
    """
    return max(64, 1 << (width - 1).bit_length())
