"""docs/recipes.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from ltconvert import recipes
from ltconvert.recipes import docs, keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def test_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs.render(), "run `make docs`"


def test_page_has_every_key_recipe_and_budget() -> None:
    page = docs.render()
    for name in [*recipes.names(), *recipes.budgets()]:
        assert f"### {name}\n" in page
    for key in keys.dotted_keys():
        assert f"| `{key.rpartition('.')[2]}` |" in page


def test_every_setting_says_what_it_means() -> None:
    for name, model in keys.sections().items():
        for key in model.model_fields:
            assert docs.meaning(model, key), f"{name}.{key} has no description"
