"""The cache of a looped model: one of transformers' own cache layers a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ltconvert.convert.students.block_cache import DynamicBlockLayer
from ltconvert.convert.students.lt2_config import BLOCKS_TYPE, INDEXED_TYPE
from ltconvert.convert.students.shared_cache import share

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin
# What to call, for messages: transformers has a class of that name, too.
STATIC_CACHE = (
    "StaticCache.for_model(model, batch, max_length) of ltconvert.convert.students.static_cache"
)


class LoopCache(Cache):
    """Cache with a slot for every visit of a layer, ``slot = loop * N + layer`` in a plain loop.

    It counts its tokens itself, since a model whose layers are all linear has no layer that does.

    Attributes:
        steps, loops: tokens that were free to leave their loops early, and the loops that were
            computed for them.

    Args:
        layer_types: transformers' name of the cache of each slot.
        windows: window in tokens of each slot; read where the type is ``sliding_attention``.
        owner_of: the slot whose cache each slot uses, see ``shared_cache``; None: its own.
    """

    settled = False  # a static one may be, see there

    def __init__(
        self,
        layer_types: Sequence[str],
        windows: Sequence[int | None],
        owner_of: Sequence[int] | None = None,
    ) -> None:
        layers: list[Any] = [_layer(t, w) for t, w in zip(layer_types, windows, strict=True)]
        super().__init__(layers=share(layers, owner_of or range(len(layers))))
        self.num_tokens = 0
        self.steps = self.loops = 0

    @property
    def is_compileable(self) -> bool:
        """False: the key/value layers grow."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """False everywhere: generate() takes linear slots alone for a cache without length."""
        return [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far, padding included; the same for every slot."""
        return self.num_tokens

    def advance(self, num_tokens: int) -> None:
        """Count tokens that all slots have taken in."""
        self.num_tokens += num_tokens

    def count_loops(self, loops: int) -> None:
        """Count a token that was free to leave after any loop."""
        self.steps += 1
        self.loops += loops

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens, as assisted generation does with a rejected draft.

        Raises:
            RuntimeError: a slot is linear: its state cannot go back. Nothing is cropped then.
        """
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers):
            raise RuntimeError("a cache with recurrent states cannot take tokens back")
        super().crop(tokens_to_remove)
        # A depth without attention stays empty. transformers 5.17 counts in tensors that move on.
        self.num_tokens = max(
            int(layer.get_seq_length())
            for layer in self.layers
            if isinstance(layer, CacheLayerMixin)
        )

    def reset(self) -> None:
        """Forget everything, keep the objects."""
        super().reset()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):  # of which transformers 5.17 keeps the length
                layer.keys = layer.values = None
                layer.is_initialized = False
            if isinstance(layer, DynamicIndexedLayer):
                layer.indexer_keys, layer.is_indexer_initialized = None, False
        self.num_tokens = self.steps = self.loops = 0


def check_cache(cache: object, slots: int) -> None:
    """Refuse what a forward pass with that many visits of layers cannot fill; None is no cache.

    Raises:
        ValueError: a cache of another model, or one settled for one-token steps.
    """
    if cache is None:
        return
    if not (isinstance(cache, LoopCache) and len(cache) == slots):
        raise ValueError(
            f"got a {type(cache).__name__} as cache; this model needs one slot for each of its "
            f"{slots} layer visits: make it with model.new_cache(), or, to allocate it once, with "
            f"{STATIC_CACHE}"
        )
    if cache.settled:
        raise ValueError(
            "this cache was settled for one-token steps and takes no forward pass; reset() it"
        )


class _OwnTokenLayer(DynamicSlidingWindowLayer):
    """Cache of a window of one token: empty. Its parent's ``[-window + 1:]`` would keep all."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone; nothing is kept."""
        found = super().update(key_states, value_states, *args, **kwargs)
        if not getattr(self, "record_past", False):  # new in transformers 5.2x
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        return found


class LinearAndWindowLayer(LinearAttentionLayer, DynamicSlidingWindowLayer):  # type: ignore[misc,override]
    """A recurrent state and a convolution's history beside the keys and values of a window.

    transformers has such a layer since 5.2x; both parents' parts are apart but for these methods.
    """

    is_compileable = False

    def __init__(self, sliding_window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=sliding_window)
        LinearAttentionLayer.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come in order, states by name."""
        part = DynamicSlidingWindowLayer if args else LinearAttentionLayer
        part.lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        """Both parts."""
        self._of_both("offload")

    def prefetch(self) -> None:
        """Both parts."""
        self._of_both("prefetch")

    def reset(self) -> None:
        """Both parts."""
        self._of_both("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Both parts."""
        self._of_both("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused by the linear part."""
        self._of_both("crop", tokens_to_remove)

    def _of_both(self, method: str, *args: Any) -> None:
        for part in (LinearAttentionLayer, DynamicSlidingWindowLayer):
            getattr(part, method)(self, *args)


class LinearAndTokenLayer(LinearAndWindowLayer, _OwnTokenLayer):  # type: ignore[misc,override]
    """The same beside a window of one token."""


def _layer(layer_type: str, window: int | None) -> CacheLayer:
    if layer_type == "full_attention":
        return DynamicLayer()
    if layer_type == INDEXED_TYPE:
        return DynamicIndexedLayer()
    if layer_type == BLOCKS_TYPE:
        return DynamicBlockLayer()
    if layer_type == "linear_attention":
        return LinearAttentionLayer()
    if layer_type == "hybrid_sliding":
        assert window is not None
        return LinearAndTokenLayer(window) if window == 1 else LinearAndWindowLayer(window)
    if layer_type == "sliding_attention":
        assert window is not None
        kind = _OwnTokenLayer if window == 1 else DynamicSlidingWindowLayer
        return kind(sliding_window=window)
    raise ValueError(
        f"no cache layer for layer type {layer_type!r}; known: full_attention, linear_attention, "
        "indexed_attention, compressed_sparse_attention, sliding_attention, hybrid_sliding"
    )
