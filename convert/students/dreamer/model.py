"""What LT2Model asks of a Dreamer: its layer, a pass, a visit.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ltconvert.convert.students.dreamer.layer import DreamerLayer, DreamerPass

if TYPE_CHECKING:
    from ltconvert.convert.mixers import SequenceContext
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.students.loop import LoopState, Step
    from ltconvert.convert.students.lt2_config import LT2Config
    from ltconvert.convert.students.lt2_model import LT2Model


def make_dreamer(config: LT2Config) -> DreamerLayer | None:
    """The one layer of a Dreamer; None where layers follow each other."""
    pools, schedule = config.dreamer_config(), config.made_schedule()
    if pools is None:
        return None
    windows = [config.window(step.layer, step.loop) for step in schedule]
    return DreamerLayer(config.spec(), pools, schedule, windows)


def dreamer_pass(model: LT2Model) -> DreamerPass | None:
    """A new pass through a Dreamer; None in other models."""
    return None if model.dreamer is None else DreamerPass.of(model.dreamer)


def visit_dreamer(
    model: LT2Model,
    step: Step,
    state: LoopState,
    context: SequenceContext,
    cache: LoopCache | None,
) -> LoopState:
    """The layer at one depth."""
    assert state.dreamer is not None
    cache_layer = None if cache is None else cache.layers[step.slot]
    visit = state.dreamer.visit(step)
    h_BTC, left = model.call(model.dreamer, state.h_BTC, visit, context, cache_layer)
    state.dreamer.take(left)
    return state.with_stream(h_BTC)
