"""Dreamer students: the teacher while routing is forced, experts by definition once it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student


def dreamer_of(teacher: LT2ForCausalLM, **options: Any) -> LT2ForCausalLM:
    """A Dreamer at its start; ``options`` are those of a DreamerConfig."""
    slices = options.setdefault("slices", 1)
    options.setdefault("top_experts", 2 * slices)
    layers = teacher.config.num_layers
    settings = {"entries": layers, "experts": layers * slices, "shared_size": 16, **options}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_student(teacher, ["full"] * layers, {"dreamer": settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slices", [1, 4])
def test_it_starts_as_its_teacher(family: str, slices: int) -> None:
    teacher, ids = tiny_model(tiny_spec(family)), tokens(2, 17)
    student = dreamer_of(teacher, slices=slices)
    with torch.no_grad():
        found = student(ids)
        torch.testing.assert_close(found.logits, teacher(ids).logits, atol=1e-4, rtol=0)
        assert found.routes == ()
        student.model.dreamer.set_release(1.0)
        assert (student(ids).logits - found.logits).abs().max() > 1e-2
