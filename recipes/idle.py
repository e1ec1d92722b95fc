"""Settings that were given and do nothing with the student or the teacher of a recipe.

A setting counts as given where it is neither what a budget says nor the default, unless somebody
spelt that out: whoever writes `student.full_layers=0.25` expects something of it. A section with
all settings, as `recipes show` prints them, spells out nothing.
"""

from __future__ import annotations

import json
from typing import Any

from ltconvert import recipes
from ltconvert.recipes.idle_rules import Rule, rules
from ltconvert.recipes.keys import sections
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import STAGES


def idle_settings(recipe: Recipe, teacher_loops: int | None = None) -> list[str]:
    """A line for all given settings that do nothing for one reason.

    Settings of a stage that is disabled are left out: it was disabled on purpose.

    Args:
        teacher_loops: where known, settings of looped models are looked at, too.
    """
    lines: list[str] = []
    told: set[str] = set()
    budgets = [recipes.budget_settings(name) for name in recipes.budgets()]
    for rule in rules():
        if rule.acts(recipe, teacher_loops):
            continue
        idle = [key for key in rule.keys if key not in told and _given(recipe, key, budgets)]
        told |= set(idle)
        if idle:
            does = "does nothing here: it needs" if len(idle) == 1 else "do nothing here: they need"
            lines.append(f"{_listed(recipe, idle)} {does} {_needs(recipe, rule)}")
    return lines


def _needs(recipe: Recipe, rule: Rule) -> str:
    """What would make it work; a Dreamer's mixers are its teacher's, whatever is asked for."""
    layers = "student.kind" not in rule.needs and ("mixer" in rule.needs or "full_" in rule.needs)
    of_layers = recipe.student.kind == "dreamer" and layers
    return f"student.kind=lt2 and {rule.needs}" if of_layers else rule.needs


def _listed(recipe: Recipe, keys: list[str]) -> str:
    named = [f"{key} {json.dumps(_value(recipe, key))}" for key in keys]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _given(recipe: Recipe, key: str, budgets: list[dict[str, Any]]) -> bool:
    section, _, name = key.partition(".")
    if section in STAGES and not getattr(recipe, section).enabled:
        return False
    fields, spelt_out = sections()[section].model_fields, getattr(recipe, section).model_fields_set
    all_there = spelt_out == set(fields)
    asked_by_none = [fields[name].get_default()] if all_there or name not in spelt_out else []
    said = (budget.get(section, {}) for budget in budgets)
    asked_by_none += [settings[name] for settings in said if name in settings]
    return _value(recipe, key) not in asked_by_none
