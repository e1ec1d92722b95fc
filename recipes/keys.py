"""Dotted keys of a recipe: which exist, and which hold lists."""

from __future__ import annotations

import typing
from typing import Literal

from pydantic import BaseModel

from ltconvert.recipes.schema import Recipe

Lists = Literal["always", "sometimes", "never"]


def sections() -> dict[str, type[BaseModel]]:
    """Sections of a recipe (`align`, `logits`...) with their models, in order."""
    found = {}
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = field.annotation
    return found


def dotted_keys() -> list[str]:
    """Every key that can be set, such as `seed` and `logits.temperature`."""
    models = sections()
    plain = [name for name in Recipe.model_fields if name not in models]
    return plain + [f"{name}.{key}" for name, model in models.items() for key in model.model_fields]


def lists(path: list[str]) -> Lists:
    """Whether the field at `path` holds a list: always, sometimes (a union) or never."""
    model: type[BaseModel] = Recipe
    for part in path[:-1]:
        model = sections()[part]
    annotation = model.model_fields[path[-1]].annotation
    if typing.get_origin(annotation) is list:
        return "always"
    members = typing.get_args(annotation)
    return "sometimes" if any(typing.get_origin(member) is list for member in members) else "never"
