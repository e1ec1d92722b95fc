"""A pass through a model of any kind: the state it begins with, and one visit of a layer.

Layers follow each other, read a depth stream, or are one Dreamer layer. B rows, T tokens, C width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ltconvert.convert.students.depth import depth_stream, visit_in_depth
from ltconvert.convert.students.dreamer.model import dreamer_pass, visit_dreamer

if TYPE_CHECKING:
    from ltconvert.convert.mixers import SequenceContext
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.students.loop import LoopState, Step
    from ltconvert.convert.students.lt2_model import LT2Model


def first_state(model: LT2Model, h_BTC: Tensor, context: SequenceContext) -> LoopState:
    """The state before the first visit, with the depth stream or the Dreamer's pass."""
    stream = depth_stream(model, context.rope)
    return replace(model.start(h_BTC), depth=stream, dreamer=dreamer_pass(model))


def visit_layer(
    model: LT2Model,
    step: Step,
    state: LoopState,
    context: SequenceContext,
    cache: LoopCache | None,
) -> LoopState:
    """What the layer makes of the stream, by the model's kind; loops are not opened or closed."""
    if state.dreamer is not None:
        return visit_dreamer(model, step, state, context, cache)
    layer, context = model.layers[step.layer], model.context_of(step, context)
    if state.depth is not None and state.depth.plan.visits[step.slot].takes_part:
        h_BTC = visit_in_depth(model, step, state, context, cache)
    elif cache is not None:
        h_BTC = layer(state.h_BTC, context, cache.layers[step.slot])
    elif context.learns_choice and layer.mixer.chooses:
        h_BTC, loss = model.call(model.call_choosing_layer, layer, state.h_BTC, context)
        state = replace(state, choice_losses=(*state.choice_losses, loss))
    else:
        h_BTC = model.call(model.call_layer, layer, state.h_BTC, context)
    return state.with_stream(h_BTC)
