"""Beside keys and values one key and one value for every block of tokens.

B rows, G key/value heads, M blocks that are returned, n new ones, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class BlockKeys(CacheLayerMixin):
    """What a layer of blocks keeps; rows may differ in how many blocks they have.

    The last slot is nobody's: what is not to be kept goes there. A block that is cropped away is
    written again when its tokens come again.
    """

    block_keys: Tensor | None = None
    block_values: Tensor | None = None

    def update_blocks(
        self, k_BGnD: Tensor, v_BGnD: Tensor, number_Bn: Tensor, valid_Bn: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Take in blocks of those numbers where they are valid; all so far, [B, G, count, D]."""
        found = []
        for name, new_BGnD in (("block_keys", k_BGnD), ("block_values", v_BGnD)):
            kept = self._room(name, new_BGnD.detach(), count)
            at_Bn = number_Bn.where(valid_Bn, kept.shape[2] - 1)
            kept.scatter_(2, at_Bn[:, None, :, None].expand_as(new_BGnD), new_BGnD.detach())
            found.append(kept[:, :, :count])
        return found[0], found[1]

    def _room(self, name: str, new_BGnD: Tensor, count: int) -> Tensor:
        """The kept ones, with room for ``count`` blocks and one more."""
        kept = getattr(self, name)
        held = 0 if kept is None else kept.shape[2]
        if held <= count:
            batch, groups, _, width = new_BGnD.shape
            more = new_BGnD.new_zeros(batch, groups, count + 1 - held, width)
            kept = more if kept is None else torch.cat([kept, more], dim=2)
            setattr(self, name, kept)
        return kept

    def _change_blocks(self, change: Any) -> None:
        if self.block_keys is not None and self.block_values is not None:
            self.block_keys, self.block_values = change(self.block_keys), change(self.block_values)


class DynamicBlockLayer(BlockKeys, DynamicLayer):  # type: ignore[misc]
    """A cache layer that grows."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.block_keys = self.block_values = None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Rows in another order."""
        super().reorder_cache(beam_idx)
        self._change_blocks(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        super().batch_repeat_interleave(repeats)
        self._change_blocks(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the rows."""
        super().batch_select_indices(indices)
        self._change_blocks(lambda x: x[indices])

    def offload(self) -> None:
        """To the CPU."""
        super().offload()
        self._change_blocks(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back to the device."""
        super().prefetch()
        self._change_blocks(lambda x: x.to(self.device, non_blocking=True))
