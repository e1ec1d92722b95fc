"""Recipes: one flat YAML each, resolved into one frozen `Recipe`.

Precedence, lowest first: defaults of `Recipe`, the YAML, the budget, `--set a.b=c`; weights of
losses that a YAML names stay as they are under every budget.
A YAML holds only what differs from the defaults. Every mistake is one line that names the key,
where it came from and, where one is close, the key that was meant.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ltconvert.errors import Mistakes, UserError
from ltconvert.recipes.keys import Lists, lists
from ltconvert.recipes.mistakes import (
    key_mistakes,
    nearest,
    value_mistakes,
    without_key_mistakes,
)
from ltconvert.recipes.schema import Recipe

BUDGETS_FILE = "budgets"
# What a recipe says of them is what it is about: no budget changes it.
LOSSES = ("kl_weight", "ce_weight")


def names() -> list[str]:
    """Names of the recipes that ship with ltconvert, sorted."""
    folder = resources.files("ltconvert.recipes")
    stems = (Path(entry.name) for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return sorted(path.stem for path in stems if path.stem != BUDGETS_FILE)


def budgets() -> list[str]:
    """Names of the budgets, smallest first."""
    return list(_read_shipped(BUDGETS_FILE))


def budget_settings(name: str) -> dict[str, Any]:
    """What the budget `name` lays over a recipe; empty for `full`."""
    table = _read_shipped(BUDGETS_FILE)
    if name not in table:
        raise UserError(f"unknown budget {name!r}{nearest(name, table)}; known: {', '.join(table)}")
    return table[name] or {}


def load(reference: str) -> dict[str, Any]:
    """Mapping in a recipe file: `reference` is a shipped name or a path of a YAML."""
    if reference in names():
        return _read_shipped(reference)
    path = Path(reference)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8, so no YAML file") from None
        return _parse(text, where=str(path))
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise UserError(
            f"recipe {reference}: no such file; `ltconvert recipes list` names those that ship"
        )
    hint = nearest(reference, names())
    known = ", ".join(names())
    raise UserError(
        f"unknown recipe {reference!r}{hint}; known: {known}, or the path of a YAML file"
    )


def resolve(
    reference: str,
    *,
    budget: str | None = None,
    options: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """The recipe `reference` with `budget`, `options`, `overrides` ("a.b=c") over it, in turn.

    Raises:
        UserError: all mistakes in the file, a line each, or else in what lies over it.
    """
    merged, where = {"name": Path(reference).stem} | load(reference), f"recipe {reference}"
    if key_mistakes(merged):
        validate(merged, where=where)
    return _laid_over(merged, budget, options, overrides, where=where)


def adjust(
    recipe: Recipe,
    *,
    budget: str | None = None,
    options: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """A resolved recipe with further settings laid over it, in the order of `resolve`."""
    where = f"recipe {recipe.name}"
    return _laid_over(recipe.model_dump(mode="json"), budget, options, overrides, where=where)


def validate(mapping: Mapping[str, Any], *, where: str) -> Recipe:
    """`mapping` as a Recipe.

    Raises:
        UserError: all mistakes in it, a line each.
    """
    found = key_mistakes(mapping)
    known = without_key_mistakes(mapping) if found else dict(mapping)
    try:
        recipe = Recipe.model_validate(known)
    except ValidationError as error:
        # Settings may only seem not to go together, while the name of one is misspelt.
        found += value_mistakes(error, of_single_keys=bool(found))
    if found:
        raise Mistakes([f"{where}: {mistake}" for mistake in found])
    return recipe


def dump(recipe: Recipe) -> str:
    """The whole recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def digest(recipe: Recipe) -> str:
    """SHA-256 (hex) of the resolved settings; name and description do not count."""
    settings = recipe.model_dump(mode="json", exclude={"name", "description"})
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested mapping; the value is read as YAML (`null`, `true`, `1e-4`, `[0, 4]`)."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"--set {text}: expected section.key=value, such as logits.temperature=2")
    nested: dict[str, Any] = {path[-1]: None}
    for part in reversed(path[:-1]):
        nested = {part: nested}
    if wrong := key_mistakes(nested):
        raise UserError(f"--set {text}: {wrong[0]}")
    leaf = nested
    for part in path[:-1]:
        leaf = leaf[part]
    leaf[path[-1]] = _parse_value(value, lists(path))
    return nested


def _laid_over(
    base: dict[str, Any],
    budget: str | None,
    options: Mapping[str, Any] | None,
    overrides: Iterable[str],
    *,
    where: str,
) -> Recipe:
    """`base` with the rest laid over it, as a Recipe."""
    merged = copy.deepcopy(base)
    if budget is not None:
        _merge(merged, _within(budget, base))
    _merge(merged, options or {})
    for override in overrides:
        _merge(merged, parse_override(override))
    return validate(merged, where=where)


def _within(budget: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """What a budget changes of a recipe: everything that it sets but LOSSES that `base` names."""
    return {
        section: {
            key: value
            for key, value in settings.items()
            if key not in LOSSES or key not in (base.get(section) or {})
        }
        for section, settings in budget_settings(budget).items()
    }


def _parse_value(text: str, field_lists: Lists) -> Any:
    """A command-line value: YAML, plus `a,b` for lists and `1e6`, which YAML 1.1 reads as text."""
    if field_lists != "never" and "," in text and not text.lstrip().startswith("["):
        return [_parse_value(part, "never") for part in text.split(",") if part.strip()]
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise UserError(f"--set: {text!r} is not a YAML value; quote it") from None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if value == "none":
        return None
    return [value] if field_lists == "always" and not isinstance(value, list) else value


def _read_shipped(stem: str) -> dict[str, Any]:
    """A YAML that ships with ltconvert."""
    text = resources.files("ltconvert.recipes").joinpath(f"{stem}.yaml").read_text(encoding="utf-8")
    return _parse(text, where=f"{stem}.yaml")


def _parse(text: str, *, where: str) -> dict[str, Any]:
    """YAML text that must hold a mapping."""
    try:
        mapping = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split()).replace(' in "<unicode string>",', " at")
        raise UserError(f"{where}: not valid YAML ({problem})") from None
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UserError(f"{where}: expected `key: value` lines, got {type(mapping).__name__}")
    return mapping


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay `over` on `base` in place, section by section; lists are replaced whole."""
    for key, value in over.items():
        if isinstance(value, Mapping):
            section = base.setdefault(key, {})
            if not isinstance(section, dict):
                section = base[key] = {}
            _merge(section, value)
        else:
            base[key] = value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without numbers to the base of 60, ``4:1`` is a word, not 241; keys stand once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML's, which would take the last of several values."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"{key} stands there more than once"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    value = loader.construct_scalar(node)
    return value if ":" in value else yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
