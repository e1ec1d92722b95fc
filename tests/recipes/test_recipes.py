"""Resolving recipes: precedence, values, hashes, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ltconvert import recipes
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("budget", [None, "demo", "small", "full"])
@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_resolves_with_every_budget(name: str, budget: str | None) -> None:
    recipe = recipes.resolve(name, budget=budget)
    assert recipe.name == name
    assert recipe.description


def test_shipped_names() -> None:
    assert {"hybrid25", "hybrid12", "window"} <= set(recipes.names())
    assert {f"linear-{kind}" for kind in ("gdn", "kda", "mamba2", "retnet")} <= set(recipes.names())
    assert recipes.budgets() == ["demo", "small", "full"]


@pytest.mark.parametrize("name", recipes.names())
def test_a_yaml_holds_only_what_differs_from_the_defaults(name: str) -> None:
    """... and what gives it its name, said aloud."""
    defaults = Recipe(name=name).model_dump()
    for section, values in recipes.load(name).items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in ("full_layers", "window_tokens", *recipes.LOSSES):
                assert value != defaults[section][key], f"{section}.{key}"


@pytest.mark.parametrize("name", recipes.names())
def test_budgets_change_no_student(name: str) -> None:
    """A budget says how long, never what."""
    full = recipes.resolve(name)
    for budget in recipes.budgets():
        assert recipes.resolve(name, budget=budget).student == full.student


@pytest.mark.parametrize("budget", recipes.budgets())
@pytest.mark.parametrize("name", ["moda", "finetune"])
def test_budgets_leave_recipes_about_cross_entropy_their_cross_entropy(
    name: str, budget: str
) -> None:
    recipe = recipes.resolve(name, budget=budget)
    for stage in (recipe.logits, recipe.longctx):
        assert (stage.kl_weight, stage.ce_weight) == (0.5, 0.5)


def test_what_a_recipe_says_of_its_losses_stands_under_every_budget(tmp_path: Path) -> None:
    path = write(tmp_path, "longctx: {ce_weight: 0.25}\n")
    resolved = recipes.resolve(path, budget="demo")
    assert resolved.longctx.ce_weight == 0.25
    assert resolved.longctx.kl_weight == 1.0  # which the recipe does not name
    asked = recipes.resolve(path, budget="demo", overrides=["longctx.ce_weight=0.75"])
    assert asked.longctx.ce_weight == 0.75


def test_budgets_grow() -> None:
    stages = ("align", "logits", "longctx")
    demo, small, full = (recipes.resolve("hybrid25", budget=b) for b in ("demo", "small", "full"))
    for stage in stages:
        tokens = [getattr(recipe, stage).budget_tokens for recipe in (demo, small, full)]
        assert tokens == sorted(set(tokens))


def test_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, "logits: {temperature: 3, lr: 5.0e-6, budget_tokens: 1000}\n")
    assert recipes.resolve(path).logits.temperature == 3  # YAML over default
    with_budget = recipes.resolve(path, budget="demo")
    assert with_budget.logits.budget_tokens != 1000  # budget over YAML
    assert with_budget.logits.temperature == 3  # and nothing else
    options = {"data": {"source": "a.txt"}}
    resolved = recipes.resolve(
        path, budget="demo", options=options, overrides=["logits.budget_tokens=4096"]
    )
    assert resolved.logits.budget_tokens == 4096  # --set over all
    assert resolved.data.source == "a.txt"
    over = recipes.resolve(path, options=options, overrides=["data.source=b.txt"])
    assert over.data.source == "b.txt"
    assert recipes.resolve(path, overrides=["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("logits.lr=1e-4", "logits", "lr", 1e-4),
        ("align.budget_tokens=1e6", "align", "budget_tokens", 1_000_000),
        ("align.budget_tokens=200_000", "align", "budget_tokens", 200_000),
        ("align.enabled=false", "align", "enabled", False),
        ("student.full_layers=0.5", "student", "full_layers", 0.5),
        ("student.full_layers=3", "student", "full_layers", 3),
        ("student.full_layers=[4, 0]", "student", "full_layers", [0, 4]),
        ("student.full_layers=0,4", "student", "full_layers", [0, 4]),
        ("student.loops=null", "student", "loops", None),
        ("eval.task_limit=none", "eval", "task_limit", None),
        ("eval.tasks=one", "eval", "tasks", ["one"]),
        ("eval.tasks=one,two", "eval", "tasks", ["one", "two"]),
        ("data.source=/data/a=b.txt", "data", "source", "/data/a=b.txt"),
    ],
)
def test_values_from_the_command_line(text: str, section: str, key: str, value: object) -> None:
    recipe = recipes.resolve("hybrid25", overrides=[text])
    found = getattr(getattr(recipe, section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("logits.temprature=2", "did you mean logits.temperature?"),
        (
            "temperature=2",
            "or logits.temperature or shrink.temperature or longctx.temperature?",
        ),
        ("logit.temperature=2", "did you mean logits.temperature?"),
        ("logits.temperature=-1", "logits.temperature: input should be greater than 0 (got -1)"),
        ("logits=3", "logits is a section"),
        ("logits.temperature", "expected section.key=value"),
        ("a.b.c=1", "unknown key a; sections are student, data, loop"),
        ("logits.temperature.x=2", "logits.temperature takes a value, and has no keys such as 'x'"),
        ("name.x=2", "name takes a value"),
        ("select.lr=2", "unknown key select.lr; lr is a setting of loop, align, logits, shrink"),
        ("student.window=2", "did you mean student.window_tokens?"),
        ("logits.budget=2", "did you mean logits.budget_tokens?"),
        ("logits.steps=9", "unknown key logits.steps; `ltconvert recipes show` lists all keys"),
        ("data.path=x", "unknown key data.path; data has source, text_field"),
        ("student.full_layers=1.5", "student.full_layers: expected a share in [0, 1]"),
        ("student.full_layers=0,0", "student.full_layers: a list of layers names each once"),
        (
            "student.mixer=gdm",
            "student.mixer: input should be 'gdn', 'gdn_window', 'kda', 'deltanet', 'mamba2', "
            "'retnet', 'dsa', 'nsa', 'window', 'moda' or 'full'",
        ),
        ("student.window_tokens=2048", "align.seq_len_tokens 2048 shows nothing outside"),
        ("align.batch_tokens=8", "align: batch_tokens 8 is less than one forward pass"),
        (
            "student.window_tokens=[0]",
            "student.window_tokens: input should be greater than 0 (got 0)",
        ),
        ("student.full_layers=foo:3", "or bookend:n (bookend:8), got 'foo:3'"),
        ("student.drop_layers=[1,1]", "student.drop_layers names each layer once, got [1, 1]"),
        ("select.method=list", "student.full_layers=[0,4,8]"),
        ("data.source=[", "is not a YAML value"),
        ("seed=-1", "seed: input should be greater than or equal to 0 (got -1)"),
        ("logits.lr=inf", "logits.lr: input should be a finite number"),
    ],
)
def test_mistakes_on_the_command_line(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        recipes.resolve("hybrid25", overrides=[override])
    assert expected in str(caught.value)
    assert str(caught.value).count("got ") <= 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logits: {temprature: 2}", "did you mean logits.temperature?"),
        ("logits: 2", "logits is a section and needs keys, got 2"),
        ("align:\n", "align is a section"),
        ("- a\n", "expected `key: value` lines, got list"),
        ("a: [", "'<stream end>' at line 1"),
        ("logits: {lr: 1.0e-4}\nseed: 1\nlogits: {}\n", "logits stands there more than once"),
        (
            "student: {full_layers: 0.5, mixer: gdn, full_layers: 1}",
            "full_layers stands there more",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        recipes.resolve(path)
    assert expected in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\x9b\x00name: x")
    with pytest.raises(UserError, match="not UTF-8, so no YAML file"):
        recipes.resolve(str(path))


def test_all_mistakes_in_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = """
        student: {mixer: gdm, full_layer: 0.5, window_tokens: 2048}
        logits: {lr: fast, temperature: {at: 2}}
        aling: {lr: 1}
        eval: 7
    """
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        recipes.resolve(path, budget="demo")
    told = [line.removeprefix(f"recipe {path}: ") for line in str(caught.value).splitlines()]
    assert told[:4] == [
        "unknown key student.full_layer; did you mean student.full_layers?",
        "logits.temperature takes a value, and has no keys such as 'at'",
        "unknown key aling; did you mean align.lr?",
        "eval is a section and needs keys, got 7",
    ]
    # Not that rows are no longer than the window, which may be the misspelt keys' doing.
    assert len(told) == 6 and told[4].startswith("student.mixer: input should be 'gdn'")
    assert told[5].startswith("logits.lr: input should be a valid number")


@pytest.mark.parametrize(
    ("reference", "budget", "expected"),
    [
        ("hybrid2", None, "did you mean hybrid25?"),
        ("budgets", None, "unknown recipe 'budgets'"),
        ("none/such.yaml", None, "no such file"),
        ("hybrid25", "dmo", "did you mean demo?"),
    ],
)
def test_wrong_names(reference: str, budget: str | None, expected: str) -> None:
    with pytest.raises(UserError, match=expected.replace("?", r"\?")):
        recipes.resolve(reference, budget=budget)


def test_dump_and_load_give_the_same_recipe(tmp_path: Path) -> None:
    recipe = recipes.resolve("hybrid12", budget="demo", overrides=["logits.lr=3e-5"])
    path = tmp_path / "recipe.resolved.yaml"
    path.write_text(recipes.dump(recipe), encoding="utf-8")
    assert recipes.resolve(str(path)) == recipe
    assert list(yaml.safe_load(path.read_text())) == list(Recipe.model_fields)


def test_digest_names_the_settings() -> None:
    plain = recipes.resolve("hybrid25")
    assert recipes.digest(plain) == recipes.digest(recipes.resolve("hybrid25", budget="full"))
    assert recipes.digest(plain) == recipes.digest(plain.model_copy(update={"name": "x"}))
    changed = {
        recipes.digest(recipes.resolve("hybrid25", overrides=[text]))
        for text in ("seed=1", "logits.temperature=2", "student.full_layers=0.5")
    }
    assert len(changed | {recipes.digest(plain)}) == 4


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        recipes.resolve("hybrid25").logits.temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "word"),
    [
        *(("compile", word) for word in ("auto", "off", "layers")),
        *(("cuda_graph", word) for word in ("auto", "off")),
    ],
)
def test_off_is_a_word_on_the_command_line_and_in_a_file(key: str, word: str) -> None:
    recipe = recipes.resolve("hybrid25", overrides=[f"runtime.{key}={word}"])
    assert getattr(recipe.runtime, key) == word
    assert yaml.safe_load(recipes.dump(recipe))["runtime"][key] == word


@pytest.mark.parametrize(
    ("pattern", "num_layers", "full"),
    [
        ("4:1", 11, [4, 9]),
        ("1:1", 5, [1, 3]),
        ("2:2", 7, [2, 3, 6]),
        ("0:1", 3, [0, 1, 2]),
        ("3:0", 3, []),
        ("bookend:3", 10, [0, 1, 9]),
        ("bookend:4", 10, [0, 1, 8, 9]),
        ("bookend:9", 4, [0, 1, 2, 3]),
        ("bookend:0", 4, []),
    ],
)
def test_patterns_of_full_layers(pattern: str, num_layers: int, full: list[int]) -> None:
    student = recipes.resolve("hybrid25", overrides=[f"student.full_layers={pattern}"]).student
    assert student.full(num_layers) == full
    mixers = student.mixers(full, num_layers)
    assert [i for i in range(num_layers) if mixers[i] == "full"] == full


def test_mixers_take_turns_where_no_layer_is_full() -> None:
    student = recipes.resolve("gdn-dsa", overrides=["student.mixer=gdn,window"]).student
    assert student.mixers([2], 5) == ["gdn", "window", "full", "window", "gdn"]
    assert student.full(5) == 0


@pytest.mark.parametrize("pattern", ["a:1", "bookend:x", "4:1:1", "0:0", "middle:2"])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"student.full_layers: (expected a:b|0:0 names)"):
        recipes.resolve("hybrid25", overrides=[f"student.full_layers={pattern}"])
