"""Two commands: a linear student of a teacher, then the Dreamer of that student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_case import make_case

from ltconvert.cli import app
from ltconvert.cli_session import run
from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.mixers.linear import LinearMixer

SMALL = {
    "seq_len_tokens": 32,
    "batch_tokens": 64,
    "budget_tokens": 128,
}
EVAL = {
    "heldout_tokens": 256,
    "heldout_seq_len_tokens": 64,
    "recall_lengths_tokens": [],
    "generation_prompts": 0,
    "decode_contexts_tokens": [],
    "tasks": [],
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer, "qwen3")
    return folder


def words(case: Path, verb: str, teacher: Path, recipe: str, *more: str) -> list[str]:
    """A call of `verb` at toy size, CPU, fp32."""
    sections = dict.fromkeys(("align", "logits", "longctx"), SMALL) | {"eval": EVAL}
    settings = [
        f"{section}.{name}={json.dumps(value)}"
        for section, values in sections.items()
        for name, value in values.items()
    ]
    settings += ["longctx.seq_len_tokens=64", "data.heldout_share=0.2", *more]
    call = [verb, "--teacher", str(teacher), "--recipe", recipe, "--device", "cpu"]
    call += ["--precision", "fp32", "--data", str(case / "text.jsonl")]
    return [*call, *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture(scope="module")
def linear(case: Path) -> Path:
    """The student of the recipe linear-gdn."""
    out = case / "linear"
    assert (
        run(app, [*words(case, "distill", case / "teacher", "linear-gdn"), "--out", str(out)]) == 0
    )
    return out / "student"


def test_a_dreamer_takes_the_layers_of_a_linear_student_over(
    case: Path, linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, call = case / "dreamer", words(case, "distill", linear, "dreamer")
    capsys.readouterr()
    assert run(app, [*call, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [row["stage"] for row in document["stages"]] == ["start", "logits", "longctx"]
    assert document["stages"][0]["kl"] < 1e-7  # to the linear student
    assert "Dreamer, one layer with gdn mixers at 3 depths" in captured.err
    student = load_student(out / "student")
    assert student.config.mixers == ["gdn"] * 3
    assert student.model.dreamer.released() == 1.0
    assert all(isinstance(core, LinearMixer) for core in student.model.dreamer.attention.cores)
    assert "One layer with gdn mixers for all depths" in (out / "report.md").read_text()
    assert run(app, ["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "0 to 2" in shown and "gdn" in shown


def test_other_recipes_and_counts_refuse_it(
    case: Path, linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, words(case, "plan", linear, "linear-kda")) == 2
    assert "is a student with gdn layers" in capsys.readouterr().err
    assert run(app, ["inspect", str(linear), "--match"]) == 2
    assert "has gdn layers; --match counts Dreamers with full" in capsys.readouterr().err
