"""One visit of a layer that reads the depth stream, writes to it, or both.

B rows, T tokens, C hidden width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.moda import Slot
from ltconvert.convert.students.blocks import DecoderLayer
from ltconvert.convert.students.depth_plan import ATTENTION, FFN

Slots = dict[str, Slot]  # by what left them; keys and values [B, T, G, D]


def run_writing_layer(
    layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext, cache_layer: Any = None
) -> tuple[Tensor, Slots]:
    """A visit that reads no slot: (the stream [B, T, C], what its sublayers leave)."""
    if ATTENTION in _writes(context):
        return run_reading_layer(layer, h_BTC, context, cache_layer)
    y_BTC = layer.mixer(layer.mixer_input(h_BTC, context.loop), context, cache_layer)
    return _after_mixer(layer, h_BTC, y_BTC, context, {})


def before_attention(
    layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext, cache_layer: Any = None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Slots]:
    """What the mixer reads, its queries, keys and values in place, and what it leaves."""
    mixer: Any = layer.mixer
    x_BTC = layer.mixer_input(h_BTC, context.loop)
    projected = mixer.project(x_BTC, context.loop)
    slots: Slots = {}
    if ATTENTION in _writes(context):
        own, leave = projected[1:], layer.depth_proj
        slots[ATTENTION] = leave[ATTENTION](x_BTC) if ATTENTION in leave else own
    return x_BTC, mixer.placed(projected, context, cache_layer), slots


def after_attention(
    layer: DecoderLayer,
    h_BTC: Tensor,
    x_BTC: Tensor,
    o_BHTD: Tensor,
    context: SequenceContext,
    slots: Slots,
) -> tuple[Tensor, Slots]:
    """The rest of the layer, from the outputs of the mixer's heads on."""
    mixer: Any = layer.mixer
    return _after_mixer(layer, h_BTC, mixer.output(x_BTC, o_BHTD, context), context, slots)


def run_reading_layer(
    layer: DecoderLayer,
    h_BTC: Tensor,
    context: SequenceContext,
    cache_layer: Any = None,
    before: Callable[..., Any] = before_attention,
    after: Callable[..., Any] = after_attention,
) -> tuple[Tensor, Slots]:
    """A visit of a layer with mixture-of-depths attention, from parts that may be compiled ones."""
    mixer: Any = layer.mixer
    x_BTC, (q_BHTD, k_BGSD, v_BGSD), slots = before(layer, h_BTC, context, cache_layer)
    o_BHTD = mixer.attend(q_BHTD, k_BGSD, v_BGSD, context)
    found: tuple[Tensor, Slots] = after(layer, h_BTC, x_BTC, o_BHTD, context, slots)
    return found


class DepthCall:
    """Runs such visits; ``wrapped`` with what compiles the functions of a layer.

    How many slots a visit reads differs from visit to visit, and compiled attention would differ
    as much: it stays outside, and the rest of the layer is two compiled parts.
    """

    def __init__(self, wrap: Callable[[Any], Any] = lambda function: function) -> None:
        self._before, self._after = wrap(before_attention), wrap(after_attention)
        self._whole = wrap(run_writing_layer)

    def __call__(
        self,
        layer: DecoderLayer,
        h_BTC: Tensor,
        context: SequenceContext,
        cache_layer: Any = None,
    ) -> tuple[Tensor, Slots]:
        """(the stream [B, T, C], what the visit's sublayers leave)."""
        assert context.depth is not None
        if not context.depth.count:
            return self._whole(layer, h_BTC, context, cache_layer)  # type: ignore[no-any-return]
        return run_reading_layer(layer, h_BTC, context, cache_layer, self._before, self._after)


def _writes(context: SequenceContext) -> tuple[str, ...]:
    assert context.depth is not None
    return context.depth.writes


def _after_mixer(
    layer: DecoderLayer, h_BTC: Tensor, y_BTC: Tensor, context: SequenceContext, slots: Slots
) -> tuple[Tensor, Slots]:
    h_BTC = layer.with_mixer(h_BTC, y_BTC, context.loop)
    x_BTC = layer.mlp_input(h_BTC, context.loop)
    if FFN in _writes(context):
        slots = {**slots, FFN: layer.depth_proj[FFN](x_BTC)}
    y_BTC = layer.mlp_contribution(x_BTC, context.loop)
    return layer.with_mlp(h_BTC, y_BTC, context.loop), slots
