"""A teacher and its student of random weights: the time of a step does not depend on values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import origin_spec, student_options
from ltconvert.distill.planning.models import shortened
from ltconvert.distill.selection.ranking import count_full_layers, listed_layers
from ltconvert.distill.selection.simple import uniform_layers
from ltconvert.errors import UserError
from ltconvert.recipes.student import StudentSettings


def student_config(
    spec: TeacherSpec, settings: StudentSettings, mixers: Sequence[str] = ()
) -> LT2Config:
    """The config that a recipe's student has, full layers evenly spaced unless they are listed.

    Args:
        mixers: in place of the recipe's: one for all layers that are not full, or one a layer.

    Raises:
        UserError: an unknown mixer, another number of them than layers, or full layers that the
            teacher does not have.
    """
    if unknown := sorted(set(mixers) - set(MIXERS)):
        raise UserError(f"unknown mixer {unknown[0]!r}; known: {', '.join(MIXERS)}")
    spec = shortened(origin_spec(spec, settings.model_dump()), settings.drop_layers)
    if len(mixers) <= 1:
        of_recipe = settings.mixers(_full_layers(spec.num_layers, settings), spec.num_layers)
        mixers = [x if x == "full" else [*mixers, x][0] for x in of_recipe]
    if len(mixers) != spec.num_layers:
        raise UserError(
            f"{len(mixers)} mixers for {spec.num_layers} layers; give one for all, or one a layer"
        )
    try:
        options = student_options(spec, settings.model_dump())
        return LT2Config.from_spec(spec, list(mixers), **options)
    except ValueError as error:
        raise UserError(str(error)) from None


def _full_layers(num_layers: int, settings: StudentSettings) -> list[int]:
    full = settings.full(num_layers)
    if isinstance(full, list):
        return listed_layers(full, num_layers)
    return uniform_layers(count_full_layers(full, num_layers), num_layers)


def random_model(
    config: LT2Config, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LT2ForCausalLM:
    """A model of new weights, frozen and in eval mode; the routing of a Dreamer is released."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # never twice the size for a moment
    try:
        with torch.device(device):
            model: Any = LT2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if model.model.dreamer is not None:
        model.model.dreamer.set_release(1.0)
    return model.to(dtype).requires_grad_(False).eval()
