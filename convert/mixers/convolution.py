"""The short convolution in front of a recurrence, and its history in a cache.

B rows, T tokens, H heads, D head width, M channels of q, k and v together, W taps, P = W - 1 tokens
of history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.kernels.short_conv import short_conv


class ShortConv(nn.Module):
    """Depthwise causal convolution over q, k and v together; starts as the identity."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The current token alone: weight 1 on the last tap."""
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[:, -1])


def convolve(
    conv: ShortConv,
    qkv: Sequence[Tensor],
    context: SequenceContext,
    cache_layer: LinearAttentionCacheLayerMixin | None,
) -> list[Tensor]:
    """q, k and v, [B, T, H, D] each, convolved; the cache's history goes before them and on."""
    x_BTM = torch.cat([y.flatten(2) for y in qkv], dim=-1)
    history = None
    if cache_layer is not None and cache_layer.has_previous_state[0]:
        history = cache_layer.conv_states[0]
    y_BTM, new_history = short_conv(
        x_BTM,
        conv.weight,
        history_BDH=history,
        segment_ids_BT=context.segment_ids_BT,
        keep_BT=context.keep_BT,
        activation=None,
    )
    if cache_layer is not None:
        _store(cache_layer, new_history)
    return [y.unflatten(-1, qkv[0].shape[-2:]) for y in y_BTM.chunk(3, dim=-1)]


def convolve_step(
    conv: ShortConv, qkv_BM: Tensor, cache_layer: LinearAttentionCacheLayerMixin
) -> Tensor:
    """One decoded token, q, k and v side by side; the history changes in place."""
    history_BMP = cache_layer.conv_states[0]
    y_B1M, history_BMP = short_conv(qkv_BM[:, None], conv.weight, history_BDH=history_BMP)
    _store(cache_layer, history_BMP)
    return y_B1M[:, 0]


def _store(cache_layer: LinearAttentionCacheLayerMixin, history_BDH: Tensor) -> None:
    """Put the convolution's history where transformers' cache layers keep it."""
    if not cache_layer.is_conv_states_initialized[0]:
        cache_layer.lazy_initialization(conv_states=history_BDH)
    stored = cache_layer.conv_states[0]
    assert stored is not None
    stored.copy_(history_BDH)
    cache_layer.has_previous_state[0] = True
