"""Dotted keys of a recipe: which exist, which is nearest to a wrong one, errors in one line."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ltconvert.errors import UserError
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


def check_known(mapping: Mapping[str, Any], *, where: str) -> None:
    """Raise a UserError that names the nearest key if `mapping` holds one that does not exist."""
    models = sections()
    for key, value in mapping.items():
        if key not in Recipe.model_fields:
            inner = f".{next(iter(value))}" if isinstance(value, Mapping) and value else ""
            raise UserError(f"{where}: unknown key {key}{_did_you_mean(f'{key}{inner}')}")
        if key not in models:
            continue
        if not isinstance(value, Mapping):
            if value is None:
                example = f"{key}.{next(iter(models[key].model_fields))}"
                raise UserError(f"{where}: {key} is a section; set one of its keys: {example}=...")
            raise UserError(f"{where}: {key} is a section and needs keys, got {value!r}")
        for inner in value:
            if inner not in models[key].model_fields:
                wrong = f"{key}.{inner}"
                raise UserError(f"{where}: unknown key {wrong}{_did_you_mean(wrong)}")


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest of `known`, or nothing when none is near."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def one_line(error: ValidationError) -> str:
    """The first mistake of a pydantic error: key, what is wrong, what was given."""
    # Of a union's members the one that got furthest into what was given.
    found = error.errors()
    first = max(found, key=lambda row: (row["loc"][:2] == found[0]["loc"][:2], len(row["loc"])))
    # A union reports one row a member, with the member's type at the end of the location.
    known = set(dotted_keys())
    key = ".".join(str(part) for part in first["loc"])
    while key and key not in known and "." in key:
        key = key.rpartition(".")[0]
    message = first["msg"].removeprefix("Value error, ")
    said = isinstance(first["input"], dict) or " got " in message
    given = "" if said else f" (got {first['input']!r})"
    prefix = f"{key}: " if key else ""
    return f"{prefix}{message[:1].lower()}{message[1:]}{given}"


def _did_you_mean(wrong: str) -> str:
    """The nearest dotted key: the same leaf in another section, or the most alike name."""
    known = dotted_keys()
    leaf = wrong.rpartition(".")[2]
    matches = [key for key in known if key.rpartition(".")[2] == leaf]
    if "." in wrong:  # of several sections that have it the one that was nearly named
        matches = difflib.get_close_matches(wrong, matches, n=1, cutoff=0.0)
    if not matches:
        candidates = known if "." in wrong else [key.rpartition(".")[2] for key in known]
        alike = difflib.get_close_matches(wrong, [*candidates, *sections()], n=1)
        matches = [key for key in known if alike and alike[0] in (key, key.rpartition(".")[2])]
        matches = matches or alike
    if not matches:
        return "; `ltconvert recipes show` lists all keys"
    return f"; did you mean {' or '.join(matches)}?"
