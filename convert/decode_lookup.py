"""What a step of decoding needs of its rows' lengths: looked up in tables of every length.

Computed anew it would be a launch for each remainder, sum, angle, sine and cosine, of a microsecond
or two each, one behind the other, ahead of the first layer of every token.

B rows, L lengths, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ltconvert.convert.mixers.rope import Rope


class Found(NamedTuple):
    """What belongs to the lengths of B rows.

    Attributes:
        rope: by name, cos and sin of the next token's position, fp32 [B, D] each.
        slots: by number of slots, where the next token goes, int32 [B].
        used: by number of slots, how many are filled then, int32 [B].
    """

    rope: dict[str, tuple[Tensor, Tensor]]
    slots: dict[int, Tensor]
    used: dict[int, Tensor]


class Lookup:
    """Tables for lengths below ``max_length``, of 8 D bytes a length and set of positions.

    Args:
        ropes: by name.
        sizes: numbers of slots that caches have, each once.
    """

    def __init__(
        self,
        ropes: Mapping[str, Rope],
        sizes: Sequence[int],
        max_length: int,
        device: torch.device,
    ) -> None:
        self.names, self.sizes = list(ropes), list(sizes)
        with torch.inference_mode(False):
            length_L = torch.arange(max_length, dtype=torch.int32, device=device)
            counts = [length_L % size for size in sizes]
            counts += [(length_L + 1).clamp(max=size) for size in sizes]
            angles = [table[0] for rope in ropes.values() for table in rope(length_L[None])]
            # Lengths last but for D: what is found for all rows then lies side by side.
            self.counts_NL = torch.stack(counts) if counts else None
            self.angles_NLD = torch.stack(angles) if angles else None

    def __call__(self, lengths_B: Tensor) -> Found:
        """In one launch a table; a length has to be below ``max_length``."""
        counts, angles = (
            () if table is None else table.index_select(1, lengths_B).unbind(0)
            for table in (self.counts_NL, self.angles_NLD)
        )
        pairs = zip(angles[::2], angles[1::2], strict=True)
        return Found(
            dict(zip(self.names, pairs, strict=True)),
            dict(zip(self.sizes, counts[: len(self.sizes)], strict=True)),
            dict(zip(self.sizes, counts[len(self.sizes) :], strict=True)),
        )
