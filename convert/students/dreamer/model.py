"""What LT2Model asks of a Dreamer: its layer, a pass, a visit.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ltconvert.convert.students.dreamer.layer import DreamerLayer, DreamerPass
from ltconvert.convert.students.dreamer.taken_over import RECURRENT, mixer_kind

if TYPE_CHECKING:
    from ltconvert.convert.mixers import SequenceContext
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.students.loop import LoopState, Step
    from ltconvert.convert.students.lt2_config import LT2Config
    from ltconvert.convert.students.lt2_model import LT2Model


def make_dreamer(config: LT2Config, make_mixer: Callable[[str, int], Any]) -> DreamerLayer | None:
    """The one layer of a Dreamer; None where layers follow each other.

    Args:
        make_mixer: a mixer of a kind for a layer of the teacher.

    Raises:
        UserError: no Dreamer has such mixers.
    """
    pools, schedule = config.dreamer_config(), config.made_schedule()
    if pools is None:
        return None
    windows = [config.window(step.layer, step.loop) for step in schedule]
    kind, mixers = mixer_kind(config.mixers), []
    if kind in RECURRENT:
        mixers = [make_mixer(kind, layer) for layer in range(config.num_layers)]
    return DreamerLayer(config.spec(), pools, schedule, windows, mixers)


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
    visit = state.dreamer.visit(step, context, cache_layer)
    h_BTC, left = model.call(model.dreamer, state.h_BTC, visit)
    state.dreamer.take(left)
    return state.with_stream(h_BTC)
