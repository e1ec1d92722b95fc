"""What a student keeps of a teacher that is a student itself."""

from __future__ import annotations

import pytest
from helpers import tiny_spec

from ltconvert import recipes
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.distill.inherited import inherited
from ltconvert.errors import UserError


@pytest.mark.parametrize("option", ["loop_residual", "sdpa_gate"])
def test_a_teacher_s_own_parts_are_not_lost(option: str) -> None:
    config = LT2Config.from_spec(tiny_spec("ouro"), **{option: True})
    with pytest.raises(UserError, match=f"--set student.{option}=true"):
        inherited(recipes.resolve("hybrid25"), "t", config)
    kept = recipes.resolve("hybrid25", overrides=[f"student.{option}=true"])
    assert inherited(kept, "t", config) == {}
