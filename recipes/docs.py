"""docs/recipes.md, written from the schema and the shipped YAML files.

`python -m ltconvert.recipes.docs docs/recipes.md` writes it; a test fails when it is stale.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ltconvert import recipes
from ltconvert.recipes.keys import sections
from ltconvert.recipes.schema import Recipe

_INTRO = """# Recipes

A recipe is one YAML file that holds a whole conversion: what the student is, where text comes from,
the stages and what is measured. A file says only what differs from the defaults below.

Precedence, lowest first: defaults, the YAML, `--budget`, `--set section.key=value` (repeatable).
Weights of losses that a YAML names stay as they are under every budget. The resolved recipe is
written to the run folder; a run folder accepts no other one.

    ltconvert recipes list
    ltconvert recipes show hybrid25 --budget demo --set logits.temperature=2
    ltconvert recipes check my_recipe.yaml

This page is generated from the settings in `recipes/` by `make docs`.
"""
_SIGNS = {Gt: "> {0.gt}", Ge: ">= {0.ge}", Lt: "< {0.lt}", Le: "<= {0.le}"}


def render() -> str:
    """The whole page as Markdown."""
    parts = [_INTRO, "## Shipped recipes\n"]
    parts += [_shipped(name) for name in recipes.names()]
    parts.append("## Budgets\n")
    parts += [_budget(name) for name in recipes.budgets()]
    parts.append("## All settings\n")
    plain = [name for name in Recipe.model_fields if name not in sections()]
    parts.append(_table(Recipe, plain))
    for name, model in sections().items():
        summary = (model.__doc__ or "").strip()
        parts.append(f"### {name}\n\n{summary}\n")
        parts.append(_table(model, list(model.model_fields)))
    return "\n".join(parts)


def _shipped(name: str) -> str:
    """Heading, description and the YAML itself of one recipe."""
    loaded = recipes.load(name)
    description = loaded.pop("description", "").strip()
    loaded.pop("name", None)
    return f"### {name}\n\n{description}\n\n{_block(loaded)}"


def _budget(name: str) -> str:
    """What one budget lays over a recipe."""
    mapping = recipes.budget_settings(name)
    body = _block(mapping) if mapping else "The recipe as it stands.\n"
    return f"### {name}\n\n{body}"


def _block(mapping: dict[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(mapping, sort_keys=False)}```\n"


def _table(model: type[BaseModel], names: list[str]) -> str:
    """One row a setting: name, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        field = model.model_fields[name]
        cells = (f"`{name}`", _type(field), _default(field), meaning(model, name))
        rows.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _type(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    bounds = [
        sign.format(bound)
        for bound in field.metadata
        for kind, sign in _SIGNS.items()
        if isinstance(bound, kind)
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    """`int`, `list of int`, `a, b or c` for choices, members of a union joined by `or`."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{member}`" for member in members)
    if origin is typing.Annotated:
        return _type_name(members[0])
    if origin is list:
        return f"list of {_type_name(members[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(member) for member in members)
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if isinstance(default, int) and not isinstance(default, bool) and default >= 10_000:
        return f"{default:_}"
    return yaml.safe_dump(default, default_flow_style=True).removesuffix("\n...\n").strip() or "''"


def meaning(model: type[BaseModel], name: str) -> str:
    """What a setting means: its description, or that of the nearest base class that has one."""
    for base in model.__mro__:
        fields = getattr(base, "model_fields", {})
        if name in fields and fields[name].description:
            return fields[name].description
    return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
