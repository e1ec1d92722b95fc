"""Which teachers a recipe takes, and what its student takes over beside their architecture."""

from __future__ import annotations

from typing import Any

from ltconvert.convert.students.dreamer.taken_over import taken_over
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe


def inherited(recipe: Recipe, name: str, config: LT2Config) -> dict[str, Any]:
    """Keywords of ``LT2Config.from_spec`` that say what the teacher and its student have alike.

    Nothing of a plain teacher. A student with other layers than full ones is a teacher of Dreamers
    alone.

    Args:
        name: of the teacher, for people.
        config: its config.

    Raises:
        UserError: the recipe does not take this teacher.
    """
    if config.dreamer is not None:
        raise UserError(
            f"teacher {name} is a Dreamer; a teacher has layers: give the model that it was made "
            "from"
        )
    if recipe.student.kind == "dreamer":
        return taken_over(config)
    converted = sorted(set(config.mixers) - {"full"})
    if converted:
        raise UserError(
            f"teacher {name} is a student with {' and '.join(converted)} layers; a teacher has "
            "full attention everywhere, unless student.kind is dreamer: give the model that it "
            "was made from"
        )
    for option in ("loop_residual", "sdpa_gate"):
        if getattr(config, option) and not getattr(recipe.student, option):
            raise UserError(
                f"teacher {name} was made with student.{option}=true, which its student would "
                f"lose; give --set student.{option}=true"
            )
    return {}
