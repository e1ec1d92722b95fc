"""Which tiles of keys a tile of queries has anything to see in, as lists that kernels walk.

Known from the sets of chosen blocks and the stretches alone, on the device, without anything
waiting for it. B rows, J choices, T queries, S keys, Q tiles of queries, K tiles of keys, W words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.sparse_attention.bits import WORD_BITS, union, unpack


class Lists(NamedTuple):
    """For every tile of one kind how many of the other it meets [..., N], and which, those first
    [..., N, the others], int32."""

    counts: Tensor
    order: Tensor


class Sizes(NamedTuple):
    """Queries and keys, and how many of each a tile has; keys a multiple of 32."""

    length: int
    keys: int
    tile_queries: int
    tile_keys: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of queries and of keys."""
        return -(-self.length // self.tile_queries), -(-self.keys // self.tile_keys)


def met(
    sizes: Sizes,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    causal: bool,
    device: torch.device,
) -> Tensor:
    """Whether a query of a tile may see a key of another, [B or 1, J or 1, Q, K]."""
    tiles_Q, tiles_K = (torch.arange(count, device=device) for count in sizes.tiles)
    offset = sizes.keys - sizes.length
    ends_Q = (offset + (tiles_Q + 1) * sizes.tile_queries - 1).clamp(max=sizes.keys - 1)
    begins_K = tiles_K * sizes.tile_keys
    causal_QK = (begins_K <= ends_Q[:, None]) | (not causal)
    seen = torch.zeros(1, 1, *sizes.tiles, dtype=torch.bool, device=device)
    if first_BT is not None:
        least_BQ = _tiled(first_BT, sizes.tile_queries, sizes.keys).amin(-1)
        seen = (begins_K + sizes.tile_keys > least_BQ[:, None, :, None]) | seen
    if bits_BJTW is not None:
        seen = seen | _chosen(sizes, bits_BJTW, block_BS)
    if first_BT is None and bits_BJTW is None:
        seen = ~seen
    return seen & causal_QK


def _tiled(x: Tensor, size: int, value: int) -> Tensor:
    """The last axis in tiles, filled up with ``value``."""
    return F.pad(x, (0, -x.shape[-1] % size), value=value).unflatten(-1, (-1, size))


def _chosen(sizes: Sizes, bits_BJTW: Tensor, block_BS: Tensor | None) -> Tensor:
    """Whether a block with a key in a tile was chosen by a query of another, [B, J, Q, K]."""
    behind = -bits_BJTW.shape[2] % sizes.tile_queries
    filled = F.pad(bits_BJTW, (0, 0, 0, behind)).unflatten(2, (-1, sizes.tile_queries))
    bits_BJQW = union(filled, 3)
    if block_BS is None:
        words = sizes.tile_keys // WORD_BITS
        some_BJQW = F.pad(bits_BJQW != 0, (0, -bits_BJQW.shape[-1] % words))
        return some_BJQW.unflatten(-1, (-1, words)).any(-1)[..., : sizes.tiles[1]]
    most = bits_BJQW.shape[-1] * WORD_BITS
    # How many were chosen before each block: a difference counts those of a range.
    before = F.pad(unpack(bits_BJQW, most).cumsum(-1, dtype=torch.int32), (1, 0))
    none_BS = block_BS < 0
    low_BK = _tiled(block_BS.masked_fill(none_BS, most), sizes.tile_keys, most).amin(-1)
    high_BK = _tiled(block_BS, sizes.tile_keys, -1).amax(-1)
    shape = (*before.shape[:3], low_BK.shape[-1])
    low, high = (x.long()[:, None, None].expand(shape) for x in (low_BK, high_BK + 1))
    return before.gather(3, high) > before.gather(3, low)


def lists(met_BJQK: Tensor) -> tuple[Lists, Lists]:
    """Tiles of keys for each of queries, and the other way round."""
    return listed(met_BJQK), listed(met_BJQK.mT)


def listed(shown: Tensor) -> Lists:
    """Which of the last axis are shown."""
    order = shown.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return Lists(shown.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous())
