"""The quality that is lost by early exit and shared keys: against the oracle, and end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tokens
from loop_case import NEW, PROMPT, looped, naive
from pipeline_case import make_case

from ltconvert.cli import app
from ltconvert.cli_session import run
from ltconvert.convert.checkpoint import save_student
from ltconvert.distill.evaluation import parts
from ltconvert.distill.evaluation.loop_decoding import Way, loop_decoding, ways
from ltconvert.errors import UserError
from ltconvert.kernels import dispatch


def test_every_combination_that_is_asked_for() -> None:
    assert ways("own", []) == []
    assert ways("last", []) == [Way("last")]
    assert ways("own", [0.5, 0.8]) == [Way("own", 0.5), Way("own", 0.8)]
    assert ways("last", [0.5]) == [Way("own", 0.5), Way("last"), Way("last", 0.5)]


@torch.no_grad()
def test_scores_are_those_of_the_oracle() -> None:
    """Row by row, as mixers that run uncached give them."""
    model, texts = looped("hybrid"), tokens(3, PROMPT + NEW)
    asked = [Way("last"), Way("own", 0.4), Way("last", 0.4)]
    found = loop_decoding(model, texts, PROMPT, asked)
    for way, scores in zip(asked, found, strict=True):
        threshold = 2.0 if way.exit_threshold is None else way.exit_threshold
        kls, same, nlls, loops = [], [], [], []
        for text in texts.split(1):
            p = model(text).logits[0, PROMPT:-1].log_softmax(-1)
            logits, depth = naive(model, text, threshold, last_of_full=way.loop_cache == "last")
            q = logits[0, PROMPT:-1].log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum(-1))
            same.append((p.argmax(-1) == q.argmax(-1)).double())
            nlls.append(-q.gather(-1, text[0, PROMPT + 1 :, None])[:, 0])
            loops += depth[PROMPT:-1]
        assert scores["tokens"] == 3 * (NEW - 1)
        assert scores["kl"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
        assert scores["agreement"] == pytest.approx(float(torch.cat(same).mean()))
        assert scores["ppl"] == pytest.approx(float(torch.cat(nlls).mean().exp()), rel=1e-4)
        assert scores["loops"] == pytest.approx(sum(loops) / len(loops))
    assert found[0]["loops"] == 4 > found[1]["loops"]
    assert found[0]["cache_bytes"] < found[0]["plain_cache_bytes"] == found[1]["cache_bytes"]


def test_the_ordinary_way_loses_nothing() -> None:
    (scores,) = loop_decoding(looped("hybrid"), tokens(2, PROMPT + NEW), PROMPT, [Way()])
    assert (scores["kl"], scores["agreement"]) == (0.0, 1.0)
    assert scores["ppl"] == scores["plain_ppl"]


@pytest.fixture
def student(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a call that evaluates a looped teacher on a text."""
    make_case(tmp_path, tiny_tokenizer, "ouro")
    monkeypatch.setattr(parts, "PROMPT_TOKENS", 8)
    sizes = {
        "data.heldout_share": 0.2,
        "eval.heldout_tokens": 256,
        "eval.heldout_seq_len_tokens": 64,
        "eval.recall_lengths_tokens": "[256]",
        "eval.recall_examples": 2,
        "eval.generation_prompts": 2,
        "eval.generation_tokens": 6,
        "eval.decode_contexts_tokens": "[16]",
        "eval.tasks": "[]",
    }
    words = ["eval", "--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "report")]
    words += ["--data", str(tmp_path / "text.jsonl"), "--device", "cpu", "--precision", "fp32"]
    yield words + [w for name, value in sizes.items() for w in ("--set", f"{name}={value}")]
    dispatch.set_default("auto")


def test_eval_shows_it_when_asked(
    student: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report" / "report.md"
    assert run(app, student) == 0
    assert "Decoding with less" not in capsys.readouterr().out
    assert "Decoding with less" not in report.read_text()
    asked = ["--loop-cache", "last", "--exit-threshold", "0.3", "--exit-threshold", "0.9"]
    assert run(app, [*student, *asked]) == 0
    captured = capsys.readouterr()
    assert "heldout measured before, kept" in captured.out + captured.err
    for shown in (captured.out, report.read_text()):
        assert "Decoding with less of the loops" in shown
        assert sum("teacher" in line and "last" in line for line in shown.splitlines()) == 3
    rows = json.loads((tmp_path / "report" / "evaluation.json").read_text())["parts"]["loops"]
    assert len(rows["teacher"]) == 5
    assert all(row["kl"] >= 0 and 1 <= row["loops"] <= 2 for row in rows["teacher"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--exit-threshold", "1.5"], "exit_thresholds"),
        (["--loop-cache", "first"], "loop_cache"),
        (
            ["--loop-cache", "last", "--set", "eval.generation_tokens=500"],
            "lower eval.gen",
        ),
    ],
)
def test_mistakes_are_one_line(
    student: list[str], asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [*student, *asked]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_cannot_is_told_before_anything_runs(
    tmp_path: Path, tiny_tokenizer: Any, student: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    save_student(looped("gdn", loops=2).float(), tiny_tokenizer, tmp_path / "linear", {})
    student[2] = str(tmp_path / "linear")
    assert run(app, [*student, "--loop-cache", "last"]) == 2
    assert "loops no layer with full attention" in capsys.readouterr().err
    assert not (tmp_path / "report" / "evaluation.json").exists()
    with pytest.raises(UserError, match="has one loop"):
        Way("last").check(looped("full", loops=1))


def test_a_dense_teacher_does_not_keep_its_looped_student_from_it(
    tmp_path: Path, tiny_tokenizer: Any, student: list[str]
) -> None:
    models = {"teacher": looped("full", loops=1), "student": looped("full", loops=2)}
    for name, model in models.items():
        save_student(model.float(), tiny_tokenizer, tmp_path / name, {})
    student[1:3] = [word for name in models for word in (f"--{name}", str(tmp_path / name))]
    assert run(app, [*student, "--loop-cache", "last"]) == 0
    rows = json.loads((tmp_path / "report" / "evaluation.json").read_text())["parts"]["loops"]
    assert [len(rows[who]) for who in rows] == [1] and list(rows) == ["student"]
