"""A model without some of its layers: the plainest way to make one smaller."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def count_dropped(wanted: int | float | Collection[int], num_layers: int) -> int:
    """How many layers a share (rounded, halves up), a count or a list leaves out.

    Raises:
        UserError: a share that is less than half a layer.
    """
    if isinstance(wanted, Collection):
        return len(wanted)
    count = math.floor(wanted * num_layers + 0.5) if isinstance(wanted, float) else wanted
    if wanted and not count:
        raise UserError(
            f"student.drop_layers {wanted} of {num_layers} layers is none; "
            f"give {0.5 / num_layers:.3g} or more, or a count"
        )
    return count


def shortened_spec(spec: TeacherSpec, layers: Collection[int]) -> TeacherSpec:
    """The architecture without these physical layers, in all loops.

    Raises:
        UserError: the teacher has no such layer, or nothing is left to loop.
    """
    if wrong := sorted(set(layers) - set(range(spec.num_layers))):
        raise UserError(
            f"student.drop_layers names layer {wrong[0]}, the teacher has {spec.num_layers}"
            f" (0 to {spec.num_layers - 1})"
        )
    kept = [layer for layer in range(spec.num_layers) if layer not in layers]
    end = spec.num_layers - spec.coda_layers
    prelude = sum(layer < spec.prelude_layers for layer in kept)
    coda = sum(layer >= end for layer in kept)
    if prelude + coda == len(kept):
        raise UserError(
            f"student.drop_layers drops {len(layers)} of {spec.num_layers} layers, which leaves no"
            " layer of the core; drop fewer"
        )
    return replace(
        spec,
        num_layers=len(kept),
        prelude_layers=prelude,
        coda_layers=coda,
        layer_windows=tuple(spec.layer_windows[i] for i in kept),
        layer_rope=tuple(spec.layer_rope[i] for i in kept),
    )


def drop_layers(teacher: LT2ForCausalLM, layers: Collection[int]) -> LT2ForCausalLM:
    """The teacher without these physical layers, its tensors the same memory as the teacher's.

    Raises:
        UserError: see ``shortened_spec``.
    """
    spec = shortened_spec(teacher.config.spec(), layers)
    kept = [layer for layer in range(len(teacher.model.layers)) if layer not in layers]
    places = {str(layer): place for place, layer in enumerate(kept)}
    own = {}
    for name, value in teacher.named_parameters():  # a tied head appears once, as the embedding
        found = _LAYER.match(name)
        if found is None:
            own[name] = value.detach()
        elif found[1] in places:
            own[f"model.layers.{places[found[1]]}.{name[found.end() :]}"] = value.detach()
    with torch.device("meta"):
        gates = {name: getattr(teacher.config, name) for name in ("sdpa_gate", "loop_residual")}
        model = LT2ForCausalLM(LT2Config.from_spec(spec, **gates))
    missing, unexpected = model.load_state_dict(own, strict=False, assign=True)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.generation_config = teacher.generation_config
    return model.requires_grad_(False).train(teacher.training)


class Skipped(nn.Module):
    """Stands in for a layer that is left out: the residual stream passes by."""

    def forward(self, h_BTC: torch.Tensor, *_: object) -> torch.Tensor:
        """h itself."""
        return h_BTC
