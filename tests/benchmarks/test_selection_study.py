"""The study of selection methods at toy size: its cases, its resumes, its tables."""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_model, tiny_spec
from lock_case import changed, holder
from pipeline_case import WORDS

from ltconvert.benchmarks import selection_cases, selection_study
from ltconvert.benchmarks.selection_cases import first_of
from ltconvert.benchmarks.selection_study import main
from ltconvert.benchmarks.selection_table import jaccard, read_studies, show
from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.teachers.load import load_teacher
from ltconvert.distill import pipeline
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.result import Selection
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

NUM_LAYERS, LARGE, SMALL = 6, 0.5, 0.2  # three layers and one
METHODS = ("uniform", "kl", "kl-fast:both", "kl-gates", "recall-greedy")  # every kind of order
SIZES = {
    "student.window_tokens": 16,
    "data.heldout_share": 0.2,
    "align.seq_len_tokens": 32,
    "align.batch_tokens": 64,
    "select.seq_len_tokens": 400,  # four numbers and the question in single letters
    "select.eval_tokens": 800,
    "select.train_tokens": 800,
    "select.recall_examples": 4,
    "logits.seq_len_tokens": 32,
    "logits.batch_tokens": 64,
    "logits.checkpoint_minutes": 10,
    "eval.heldout_tokens": 256,
    "eval.heldout_seq_len_tokens": 64,
    "eval.recall_lengths_tokens": "[320]",
    "eval.recall_examples": 5,
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A teacher of six layers and a text."""
    folder = tmp_path_factory.mktemp("case")
    layers = {"layer_rope": ("default",) * NUM_LAYERS, "layer_windows": (None,) * NUM_LAYERS}
    model = tiny_model(tiny_spec("llama", num_layers=NUM_LAYERS, **layers))
    save_student(model, tiny_tokenizer, folder / "teacher", {})
    draw = random.Random(0)
    documents = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) for _ in range(80))
    lines = (json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def study(case: Path, out: Path, *more: str) -> int:
    """All on the CPU in fp32; ``more`` options come last."""
    text = ["--teacher", str(case / "teacher"), "--data", str(case / "text.jsonl")]
    where = ["--out", str(out), "--device", "cpu", "--precision", "fp32"]
    budget = ["--align-tokens", "256", "--logits-tokens", "256", "--shares", str(SMALL), str(LARGE)]
    sizes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    return main([*text, *where, *budget, *sizes, *more])


@pytest.fixture(scope="module")
def done(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole study."""
    out = tmp_path_factory.mktemp("study") / "out"
    assert study(case, out, "--methods", *METHODS) == 0
    return out


def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "study.json").read_text())


def cases(out: Path) -> dict[tuple[str, float], dict[str, Any]]:
    return {(case["method"], case["share"]): case for case in document(out)["cases"]}


def figures(out: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """All that does not depend on the machine's speed."""
    found = copy.deepcopy(cases(out))
    for case in found.values():
        del case["cost"]["seconds"]
    return found


def test_every_method_has_a_case_at_every_share(done: Path) -> None:
    found = cases(done)
    assert set(found) == {(m, s) for m in METHODS for s in (SMALL, LARGE)}
    for (method, share), case in found.items():
        assert len(case["layers"]) == {SMALL: 1, LARGE: 3}[share]
        assert case["chosen_for"] == (share if method in ("uniform", "kl-gates") else LARGE)
        for scores in case["after"].values():
            assert scores["kl"] > 0 and set(scores["recall"]) == {"320"}
        read = case["cost"]["forward_tokens"] + case["cost"]["trained_tokens"]
        assert (read == 0) == (method == "uniform")
    assert found["uniform", LARGE]["layers"] == [0, 2, 4]


@pytest.mark.parametrize("method", METHODS)
def test_a_case_is_a_run_of_its_own(done: Path, case: Path, tmp_path: Path, method: str) -> None:
    """From the start on in a new folder, at the smaller share: the same set, the same scores."""
    settings = document(done)["settings"]["recipe"]
    assert settings["data"].pop("content")
    settings["student"]["full_layers"] = SMALL
    settings["select"]["method"], _, direction = method.partition(":")
    settings["select"]["direction"] = direction or "remove"
    teacher, recipe = load_teacher(str(case / "teacher")), Recipe.model_validate(settings)
    result = pipeline.run(recipe, teacher, tmp_path, RunLog(tmp_path), precision="fp32")
    found = cases(done)[method, SMALL]
    assert found["layers"] == result.selection
    kl = {row["stage"]: row["kl"] for row in result.rows}
    assert {stage: scores["kl"] for stage, scores in found["after"].items()} == {
        stage: kl[stage] for stage in ("select", "logits")
    }
    assert document(done)["after"]["align"]["kl"] == kl["align"]


def test_weights_stay_only_where_cases_begin(done: Path) -> None:
    held = {path.relative_to(done).parent.as_posix() for path in done.rglob("*.safetensors")}
    assert held == {"aligned/student", "aligned/stages/align/student"}


def test_the_same_command_only_shows_the_table(
    done: Path, case: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = document(done)
    monkeypatch.setattr(LogitsObjective, "train_step", None)
    monkeypatch.setattr(selection_cases, "recall_scores", None)
    assert study(case, done, "--methods", "kl", "recall-greedy") == 0
    assert document(done) == before
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| kl | ")]
    assert "first of 50.0%" in rows[0] and rows[0].startswith("| kl | 20.0% (1) | ")
    assert rows[1].startswith("| kl | 50.0% (3) | ")
    assert len(rows) == 4  # two results, two rows of overlap


def test_a_killed_study_goes_on_where_it_stopped(
    done: Path, case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = LogitsObjective.train_step, [0]

    def train_step(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:  # of four steps a case
            signal.raise_signal(signal.SIGTERM)
        return real(self, *arguments)

    out, methods = tmp_path / "out", ("--methods", "recall-greedy")
    monkeypatch.setattr(LogitsObjective, "train_step", train_step)
    assert study(case, out, *methods) == 130
    assert set(cases(out)) == {("recall-greedy", LARGE)} and calls[0] == 7
    assert study(case, out, *methods) == 0
    assert calls[0] == 2 * 4
    whole = figures(done)
    assert figures(out) == {key: whole[key] for key in figures(out)} and len(figures(out)) == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--set logits.lr=1", "recipe.logits.lr = 2e-05"),
        ("--seed 1", "seed = 0"),
        ("--shares 0.95", "that is every layer"),
        ("--set logits.lrr=1", "logits.lrr"),
    ],
)
def test_what_does_not_fit_is_refused(
    done: Path, case: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    before = document(done)
    assert study(case, done, *option.split()) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert document(done) == before


def test_a_changed_text_and_a_second_call_are_refused(
    done: Path, case: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = document(done)
    with changed(case / "text.jsonl"):
        assert study(case, done, "--methods", "uniform") == 2
    assert "content of data.source" in capsys.readouterr().err
    with holder(done):
        assert study(case, done, "--methods", "uniform") == 2
    assert "at work in it" in capsys.readouterr().err
    assert document(done) == before


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(SystemExit):
        main(["--shares", "2"])
    with pytest.raises(argparse.ArgumentTypeError, match="no share"):
        selection_study._share("0")


@pytest.mark.parametrize("method", ["recall-greedy", "kl-fast-both", "kl"])
def test_an_order_that_depends_on_the_number_kept_is_not_cut(done: Path, method: str) -> None:
    path = done / "cases" / f"{method}-{LARGE:g}" / "stages" / "select" / "selection.json"
    selection = Selection.load(path)
    assert first_of(selection, 1) == selection.ranking[:1]
    swapped = [*selection.ranking[1::-1], *selection.ranking[2:]]
    with pytest.raises(AssertionError):
        first_of(replace(selection, ranking=swapped), 1)


def made_up(seed: int, kl: float, layers: list[int]) -> dict[str, Any]:
    """A study of two methods at one share; ``uniform`` is the same in all."""

    def one(method: str, kl: float, layers: list[int]) -> dict[str, Any]:
        scores = {"kl": kl, "recall": {"1024": {"accuracy": kl / 2}}}
        cost = {"forward_tokens": 1000 * seed, "trained_tokens": 0, "seconds": 2.0}
        after = {"select": scores, "logits": scores}
        where = {"share": 0.25, "chosen_for": 0.25, "layers": layers}
        return {"method": method, "after": after, "cost": cost} | where

    return {
        "settings": {"teacher": {"name": "t"}, "precision": "fp32", "recipe": {"seed": seed}},
        "teacher": {"recall": {"1024": {"accuracy": 1.0}}},
        "after": {"start": {"kl": 2.0}, "align": {"kl": 1.0}},
        "cases": [one("recall", kl, layers), one("uniform", 0.5, [0, 4])],
    }


def test_combined_are_means_with_standard_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = [made_up(1, 0.1, [0, 1]), made_up(2, 0.2, [1, 4]), made_up(3, 0.6, [1, 2])]
    for number, each in enumerate(studies):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "study.json").write_text(json.dumps(each))
    assert main(["--combine", *(str(tmp_path / x) for x in "012")]) == 0
    shown = capsys.readouterr().out
    # 0.1, 0.2, 0.6: mean 0.3, variance (0.04 + 0.01 + 0.09) / 2, its root over that of 3.
    kl, accuracy = "0.3000 ± 0.1528", "0.15 ± 0.08"
    recall = f"| recall | 25.0% (2) | {kl} | {kl} | {accuracy} | {accuracy} | 2,000 ± 577 |"
    assert f"{recall} 0 ± 0 | 2.0 ± 0.0 | in all: 1 |" in shown
    # Between seeds every pair shares one of three layers; with 0 and 4: 1/3, 1/3, 0.
    assert "| recall | 0.33 | 0.22 |\n| uniform | 0.22 | 1.00 |" in shown
    assert "in all: 0, 4 |" in shown and "first of" not in shown


def test_only_studies_that_differ_by_their_seed_are_combined(tmp_path: Path) -> None:
    one, two = made_up(0, 0.1, [0]), made_up(1, 0.1, [0])
    two["settings"]["precision"] = "bf16"
    for number, each in enumerate((one, two)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "study.json").write_text(json.dumps(each))
    with pytest.raises(UserError, match=r"precision is fp32 in .*0 and bf16 in .*1; only the seed"):
        read_studies([tmp_path / "0", tmp_path / "1"])
    for number, each in enumerate((one, two)):
        each["settings"]["precision"] = "fp32"
        each["settings"]["recipe"]["data"] = {"source": "a.txt", "content": f"0{number}"}
        (tmp_path / str(number) / "study.json").write_text(json.dumps(each))
    with pytest.raises(UserError, match=r"recipe\.data\.content is 00 in"):
        read_studies([tmp_path / "0", tmp_path / "1"])
    del two["settings"]["recipe"]["data"]["content"]  # of an earlier version
    (tmp_path / "1" / "study.json").write_text(json.dumps(two))
    assert len(read_studies([tmp_path / "0", tmp_path / "1"])) == 2
    with pytest.raises(UserError, match="no case has run in all studies"):
        show([one, made_up(1, 0.1, [0]) | {"cases": []}])
    with pytest.raises(UserError, match="name each seed once"):
        read_studies([tmp_path / "0", tmp_path / "0"])
    with pytest.raises(UserError, match=r"no study\.json in it"):
        read_studies([tmp_path])


def test_jaccard() -> None:
    assert jaccard([0, 1, 2], [2, 3]) == 0.25
    assert jaccard([4], [4]) == 1.0


def test_a_single_study_has_no_errors() -> None:
    lines = show([made_up(1, 0.1, [0, 1])])
    assert not any("±" in line for line in lines)
    assert "| recall |  | 0.33 |" in lines and any(line.endswith("| 0, 1 |") for line in lines)
