"""Mixture-of-depths students: the teacher at schedule 0, the published formula at schedule 1."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student

MODA = ["moda"] * 3


def student_of(teacher: LT2ForCausalLM, schedule: float, **options: object) -> LT2ForCausalLM:
    student = build_student(teacher, options.pop("mixers", MODA), options)  # type: ignore[arg-type]
    student.model.depth_schedule.fill_(schedule)
    return student


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_it_starts_as_its_teacher(family: str, loops: int) -> None:
    teacher = tiny_model(tiny_spec(family, num_loops=loops))
    student, ids = build_student(teacher, MODA), tokens(2, 17)
    assert student.model.depth_schedule == 0
    with torch.no_grad():
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)
        student.model.depth_schedule.fill_(1)
        assert (student(ids).logits - wanted).abs().max() > 1e-2
