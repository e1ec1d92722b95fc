"""What is wrong with settings, all of it, a line a mistake; names are suggested where they fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ltconvert.recipes.keys import dotted_keys, sections
from ltconvert.recipes.schema import Recipe

_CLOSE, _CLOSER = 0.6, 0.75  # of `difflib`: among few names that are apart, among many alike
_FEW = 12  # names that fit into a line


def key_mistakes(mapping: Mapping[str, Any]) -> list[str]:
    """Keys that do not exist, in their order; values where keys belong, or the other way round."""
    found: list[str] = []
    models = sections()
    for key, value in mapping.items():
        if key not in Recipe.model_fields:
            found.append(f"unknown key {key}{_instead_of(str(key), value)}")
        elif key not in models:
            found += _holds_no_keys(key, value)
        elif value is None:
            example = f"{key}.{next(iter(models[key].model_fields))}"
            found.append(f"{key} is a section; set one of its keys: {example}=...")
        elif not isinstance(value, Mapping):
            found.append(f"{key} is a section and needs keys, got {value!r}")
        else:
            for name, inner in value.items():
                if name in models[key].model_fields:
                    found += _holds_no_keys(f"{key}.{name}", inner)
                else:
                    found.append(f"unknown key {key}.{name}{_instead_in(key, str(name))}")
    return found


def without_key_mistakes(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of a mapping, whose values can then be looked at."""
    models, left = sections(), {}
    for key, value in mapping.items():
        if key in models and isinstance(value, Mapping):
            fields = models[key].model_fields
            inner = {name: value[name] for name in value if name in fields}
            left[key] = {n: v for n, v in inner.items() if not isinstance(v, Mapping)}
        elif key in Recipe.model_fields and key not in models and not isinstance(value, Mapping):
            left[key] = value
    return left


def value_mistakes(error: ValidationError, *, of_single_keys: bool = False) -> list[str]:
    """Of each key of a pydantic error what is wrong, and what was given.

    Args:
        of_single_keys: leave out what is wrong with several settings together.
    """
    known = set(dotted_keys())
    furthest: dict[tuple[Any, ...], Any] = {}
    for row in error.errors():
        # A union reports one row a member: the one that got furthest into what was given is told.
        place = row["loc"][:2]
        if place not in furthest or len(row["loc"]) > len(furthest[place]["loc"]):
            furthest[place] = row
    found = []
    for row in furthest.values():
        # ... with the member's type at the end of the location.
        key = ".".join(str(part) for part in row["loc"])
        while key and key not in known and "." in key:
            key = key.rpartition(".")[0]
        if key in known or not of_single_keys:
            found.append(_told(key, row["msg"], row["input"]))
    return found


def _told(key: str, message: str, given: Any) -> str:
    message = message.removeprefix("Value error, ")
    said = isinstance(given, dict) or " got " in message
    prefix = f"{key}: " if key and not message.startswith(f"{key}.") else ""
    return f"{prefix}{message[:1].lower()}{message[1:]}" + ("" if said else f" (got {given!r})")


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest of `known`, or nothing when none is near."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {found[0]}?" if found else ""


def _holds_no_keys(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield f"{key} takes a value, and has no keys such as {next(iter(value), '')!r}"


def _instead_of(wrong: str, value: Any) -> str:
    """What a key that is no section may have been meant for: a section, or a key of one."""
    models = sections()
    if not isinstance(value, Mapping):
        plain = [key for key in Recipe.model_fields if key not in models]
        leaves = {name for model in models.values() for name in model.model_fields}
        alike = _alike(wrong, [*plain, *sorted(leaves)])
        keys = dotted_keys()
        return _meant([key for key in keys if alike and key.rpartition(".")[2] == alike[0]])
    section = difflib.get_close_matches(wrong, models, n=1, cutoff=_CLOSE)
    if not section:
        return f"; sections are {', '.join(models)}"
    inner = [f"{section[0]}.{name}" for name in value if name in models[section[0]].model_fields]
    return _meant(inner if len(value) == 1 and inner else section)


def _instead_in(section: str, wrong: str) -> str:
    """What a key of a section may have been meant for: another of it; else where there is one."""
    models = sections()
    names = list(models[section].model_fields)
    words = set(wrong.split("_"))
    alike = [name for name in names if words <= set(name.split("_"))] or _alike(wrong, names)
    if alike:
        return _meant([f"{section}.{name}" for name in alike])
    others = [other for other, model in models.items() if wrong in model.model_fields]
    if others:
        return f"; {wrong} is a setting of {', '.join(others)}"
    return f"; {section} has {', '.join(names)}" if len(names) <= _FEW else _meant([])


def _alike(wrong: str, names: list[str]) -> list[str]:
    """The name most like a wrong one, or that of one other letter; at most one."""
    found = difflib.get_close_matches(wrong, names, n=1, cutoff=_CLOSER)
    same_length = [name for name in names if len(name) == len(wrong)]
    one_off = [n for n in same_length if sum(a != b for a, b in zip(n, wrong, strict=True)) == 1]
    return found or one_off[:1]


def _meant(keys: list[str]) -> str:
    return (
        f"; did you mean {' or '.join(keys)}?"
        if keys
        else "; `ltconvert recipes show` lists all keys"
    )
