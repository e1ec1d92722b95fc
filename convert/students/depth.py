"""What a model needs for its depth stream, and a visit that takes part in it.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ltconvert.convert.mixers import MixtureOfDepths, SequenceContext
from ltconvert.convert.mixers.moda import SlotProjection
from ltconvert.convert.students.depth_plan import FFN
from ltconvert.convert.students.depth_stream import DepthStream

if TYPE_CHECKING:
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.students.loop import LoopState, Step
    from ltconvert.convert.students.lt2_model import LT2Model


def prepare_depth(model: LT2Model) -> list[tuple[int, str]]:
    """Make what the stream needs, as the model's mixers are; once more when they have changed.

    Returns:
        Layers and their sublayers that got a projection, whose weights are random.
    """
    plan = model.depth_plan = model.config.depth_plan()
    wanted: set[tuple[int, str]] = set()
    if plan is not None:
        if not hasattr(model, "depth_schedule"):
            model.register_buffer("depth_schedule", torch.zeros((), device=model.device))
        every = model.config.depth_writers == "projected"
        for step, visit in zip(model.schedule, plan.visits, strict=True):
            wanted |= {(step.layer, kind) for kind in visit.writes if every or kind == FFN}
    there = {(i, kind) for i, layer in enumerate(model.layers) for kind in layer.depth_proj}
    for layer, kind in there - wanted:
        del model.layers[layer].depth_proj[kind]
    new = sorted(wanted - there)
    for layer, kind in new:
        model.layers[layer].depth_proj[kind] = SlotProjection(model.spec)
    return new


def depth_ropes(model: LT2Model) -> list[str | None]:
    """Names of the positions at which layers read the stream, each once."""
    mixers = [layer.mixer for layer in model.layers]
    readers = [mixer for mixer in mixers if isinstance(mixer, MixtureOfDepths)]
    return list(dict.fromkeys(mixer.depth_rope_name for mixer in readers))


def depth_stream(model: LT2Model, rope: Mapping[str, tuple[Tensor, Tensor]]) -> DepthStream | None:
    """An empty stream for one pass; None where no layer reads one.

    Args:
        rope: of the pass, see ``SequenceContext``.
    """
    if model.depth_plan is None:
        return None
    return DepthStream(model.depth_plan, rope, depth_ropes(model), model.depth_schedule)


def visit_in_depth(
    model: LT2Model,
    step: Step,
    state: LoopState,
    context: SequenceContext,
    cache: LoopCache | None,
) -> Tensor:
    """One layer that reads the stream, writes to it, or both: the residual stream [B, T, C]."""
    assert state.depth is not None
    visit = state.depth.plan.visits[step.slot]
    context = replace(context, depth=state.depth.view(visit))
    cache_layer = None if cache is None else cache.layers[step.slot]
    layer = model.layers[step.layer]
    h_BTC, left = model.call(model.call_depth_layer, layer, state.h_BTC, context, cache_layer)
    state.depth.write(visit, left)
    found: Tensor = h_BTC
    return found
