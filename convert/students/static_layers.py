"""What a layer keeps for decoding, allocated once: keys and values, recurrent states.

B rows, G key/value heads, S slots of a layer, T new tokens, D head width, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ltconvert.convert.students.block_cache import BlockKeys
from ltconvert.convert.students.lt2_config import BLOCKS_TYPE, INDEXED_TYPE, LT2Config
from ltconvert.convert.students.shared_cache import EarlierLoop


class StaticKeys(CacheLayerMixin):
    """Keys and values of one slot, [B, G, S, D]; a window's slots are a ring.

    A window's token stands at its column modulo S. Softmax attention does not ask for an order, and
    positions are in the keys, so decoding reads a ring as it is.

    Args:
        window: tokens that a query sees, itself counted; None for all.
        max_length: tokens of a row, padding included.
    """

    def __init__(
        self, shape_BGD: tuple[int, int, int], window: int | None, max_length: int, **made: Any
    ) -> None:
        super().__init__()
        rows, heads, width = shape_BGD
        self.window, self.max_length, self.num_tokens = window, max_length, 0
        self.slots = max_length if window is None else min(window, max_length)
        self.is_sliding = window is not None
        self.keys: Tensor = torch.zeros(rows, heads, self.slots, width, **made)
        self.values: Tensor = torch.zeros_like(self.keys)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: everything is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in [B, G, T, D]; keys and values that the new tokens may see, oldest first.

        Raises:
            ValueError: another number of rows, or more tokens than were allocated.
        """
        rows, count = key_states.shape[0], key_states.shape[2]
        first = self.num_tokens
        if rows != len(self.keys):
            raise ValueError(f"the static cache has {len(self.keys)} rows, got {rows}")
        if first + count > self.max_length:
            raise ValueError(
                f"the static cache holds {self.max_length} tokens a row, padding included, and "
                f"{first + count} are needed; make it with a larger max_length"
            )
        self.num_tokens += count
        new = key_states.detach(), value_states.detach()
        if self.window is None:
            for kept, states in zip((self.keys, self.values), new, strict=True):
                kept[:, :, first : first + count] = states
            return self.keys[:, :, : first + count], self.values[:, :, : first + count]
        before = self._ring(max(0, first - self.window + 1), first)
        found = [torch.cat([kept[:, :, before], states], dim=2)
                 for kept, states in zip((self.keys, self.values), new, strict=True)]  # fmt: skip
        last = min(count, self.slots)
        at = self._ring(first + count - last, first + count)
        for kept, states in zip((self.keys, self.values), new, strict=True):
            kept[:, :, at] = states[:, :, count - last :]
        return found[0], found[1]

    def settle(self, padding: Sequence[int]) -> None:
        """Move every row to the left by its padding: token p then stands in slot p modulo S."""
        used = min(self.num_tokens, self.slots)
        for row, empty in enumerate(padding):
            for kept in (self.keys, self.values):
                if empty:
                    kept[row, :, :used] = kept[row, :, :used].roll(-empty, dims=1)

    def reset(self) -> None:
        """Forget everything; what the slots hold is no longer read."""
        self.num_tokens = 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that so many new tokens will find, column of the first one)."""
        first = 0 if self.window is None else max(0, self.num_tokens - self.window + 1)
        return self.num_tokens - first + query_length, first

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, in place, as beam search wants."""
        for kept in (self.keys, self.values):
            kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))

    def _ring(self, first: int, stop: int) -> Tensor:
        """Slots of the columns from ``first`` to before ``stop``."""
        return torch.arange(first, stop, device=self.keys.device) % self.slots


class StaticKeysAndState(LinearAttentionLayer, StaticKeys):  # type: ignore[override]
    """A recurrent state and a convolution's history beside the keys and values of a window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        StaticKeys.__init__(self, *args, **kwargs)
        LinearAttentionLayer.__init__(self)

    def reset(self) -> None:
        """Both parts."""
        LinearAttentionLayer.reset(self)
        StaticKeys.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Both parts."""
        states: Any = LinearAttentionLayer
        states.reorder_cache(self, beam_idx)
        StaticKeys.reorder_cache(self, beam_idx)


class StaticIndexedKeys(StaticKeys):
    """Beside keys and values the keys of an indexer, [B, 1, S, D]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.indexer_keys: Tensor = torch.zeros_like(self.keys[:, :1])

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take in those [B, T, D] of the tokens that ``update`` took last; all until then."""
        first = self.num_tokens - indexer_key_states.shape[1]
        self.indexer_keys[:, 0, first : self.num_tokens] = indexer_key_states.detach()
        return self.indexer_keys[:, 0, : self.num_tokens]

    def settle(self, padding: Sequence[int]) -> None:
        """See ``StaticKeys``."""
        super().settle(padding)
        for row, empty in enumerate(padding):
            if empty:
                used = self.indexer_keys[row, 0, : self.num_tokens]
                used.copy_(used.roll(-empty, dims=0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, in place, as beam search wants."""
        super().reorder_cache(beam_idx)
        order = beam_idx.to(self.indexer_keys.device)
        self.indexer_keys.copy_(self.indexer_keys.index_select(0, order))


class StaticBlockKeys(BlockKeys, StaticKeys):  # type: ignore[misc]
    """Beside keys and values one key and one value a block, [B, G, M, D], numbered in each row."""

    def __init__(self, *args: Any, block: int, **kwargs: Any) -> None:
        StaticKeys.__init__(self, *args, **kwargs)
        batch, heads, slots, width = self.keys.shape
        self.block_keys = self.keys.new_zeros(batch, heads, slots // block + 1, width)
        self.block_values = torch.zeros_like(self.block_keys)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, in place, as beam search wants."""
        super().reorder_cache(beam_idx)
        for kept in (self.block_keys, self.block_values):
            assert kept is not None
            kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))


def static_layer(
    config: LT2Config,
    kind: str,
    window: int | None,
    batch: int,
    max_length: int,
    made: dict[str, Any],
) -> StaticKeys | LinearAttentionLayer:
    """The layer of one slot.

    Args:
        kind: transformers' name of it, ``LT2Config.layer_types``.
        window: tokens that a query sees, itself counted; None for all.
        made: dtype and device.
    """
    heads, width = config.num_attention_heads, config.head_dim
    shape = batch, config.num_key_value_heads, width
    if kind in ("full_attention", "sliding_attention"):
        return StaticKeys(shape, window, max_length, **made)
    if kind == INDEXED_TYPE:
        return StaticIndexedKeys(shape, None, max_length, **made)
    if kind == BLOCKS_TYPE:
        return StaticBlockKeys(shape, None, max_length, block=config.block_tokens, **made)
    layer: Any = LinearAttentionLayer()
    if kind == "hybrid_sliding":
        layer = StaticKeysAndState((batch, heads, width), window, max_length, **made)
    history = None
    if config.conv_size:
        history = torch.zeros(batch, 3 * heads * width, config.conv_size - 1, **made)
    work = torch.promote_types(made["dtype"], torch.float32)
    state = torch.zeros(batch, heads, width, width, dtype=work, device=made["device"])
    layer.lazy_initialization(conv_states=history, recurrent_states=state)
    layer.device = made["device"]
    return layer


def keys_of(layer: Any) -> list[Tensor]:
    """Keys and values of a cache's layer, those of an indexer or of blocks, too.

    None of a linear one, or of one that shows another's.
    """
    if not isinstance(layer, CacheLayerMixin) or isinstance(layer, EarlierLoop):
        return []
    names = ("keys", "values", "indexer_keys", "block_keys", "block_values")
    kept = (getattr(layer, name, None) for name in names)
    return [tensor for tensor in kept if tensor is not None]


def states_of(layer: Any) -> list[Tensor]:
    """State and convolution history of a cache's layer; none of plain attention."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    kept = (*layer.recurrent_states.values(), *layer.conv_states.values())
    return [tensor for tensor in kept if tensor is not None]


def tensors_of(layer: Any) -> list[Tensor]:
    """Everything that a cache's layer keeps."""
    return keys_of(layer) + states_of(layer)
