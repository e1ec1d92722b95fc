"""`generate --fast`: the same text as without it, on a tiny student of random weights."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dreamer_case import released
from helpers import VOCAB, tiny_model, tiny_spec

from ltconvert.cli import app
from ltconvert.cli_session import run
from ltconvert.convert.checkpoint import save_student


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> str:
    """A folder with a looped hybrid that ends at the tokenizer's end."""
    spec = tiny_spec("ouro", num_loops=2, vocab_size=VOCAB, eos_token_id=2, pad_token_id=2)
    folder: Path = tmp_path_factory.mktemp("student") / "student"
    save_student(tiny_model(spec, ["gdn", "full", "window"]), tiny_tokenizer, folder, {})
    return str(folder)


def text(capsys: pytest.CaptureFixture[str], student: str, *more: str) -> str:
    call = ["generate", student, "-p", "the cat", "--max-new-tokens", "12", "--device", "cpu"]
    assert run(app, [*call, "--precision", "fp32", *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--repetition-penalty", "1.5"], ["--chat"]], ids=str)
def test_fast_text_is_the_plain_one(
    options: list[str], student: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [text(capsys, student, *options, *fast) for fast in ([], ["--fast"])]
    assert found[0] == found[1]
    document = json.loads(text(capsys, student, *options, "--fast", "--json"))
    assert document["text"].strip() == found[0].strip()
    assert 0 < document["new_tokens"] <= 12


def test_fast_sampling_follows_its_seed(student: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--fast", "--temperature", "0.9", "--top-p", "0.9", "--top-k", "50", "--seed"]
    texts = [text(capsys, student, *options, seed) for seed in ("3", "3", "4")]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_is_text(
    student: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the shell, from stdin as it is in the C locale, and in any other."""
    for errors in ("surrogateescape", "strict"):
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe bad"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run(app, ["generate", student, "--device", "cpu"]) == 2
        assert "the prompt is not UTF-8" in capsys.readouterr().err
    for name, words in (
        ("prompt", ["-p", "abc\udcff"]),
        ("--system", ["-p", "a", "--system", "\udcff"]),
    ):
        assert run(app, ["generate", student, "--device", "cpu", *words]) == 2
        assert f"the {name} is not UTF-8" in capsys.readouterr().err


def test_too_many_tokens_for_the_memory(student: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", student, "--device", "cpu", "-p", "the cat", "--fast"]
    assert run(app, [*call, "--max-new-tokens", str(10**13)]) == 2
    assert "lower --max-new-tokens or shorten the prompt" in capsys.readouterr().err


def test_beams_are_refused(student: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["generate", student, "-p", "x", "--fast", "--beams", "2"]) == 2
    assert "leave out --fast or --beams" in capsys.readouterr().err


@pytest.mark.parametrize("fast", [[], ["--fast"]], ids=str)
def test_exit_thresholds(fast: list[str], student: str, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*more: str) -> dict[str, Any]:
        return json.loads(text(capsys, student, *fast, "--json", *more))

    plain, never = found(), found("--exit-threshold", "1")
    assert plain["text"] == never["text"]
    assert "loops" not in plain
    assert found("--exit-threshold", "0")["loops"] == 1
    assert run(app, ["generate", student, "-p", "x", *fast, "--exit-threshold", "1.5"]) == 2


@pytest.mark.parametrize("depths", [[], ["--depths", "2"]], ids=str)
def test_fast_text_of_a_dreamer_is_the_plain_one(
    depths: list[str], tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save_student(released(), tiny_tokenizer, tmp_path / "m", {})
    plain = text(capsys, str(tmp_path / "m"), *depths)
    assert text(capsys, str(tmp_path / "m"), *depths, "--fast") == plain


def test_a_model_without_a_gate_says_so(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save_student(
        tiny_model(tiny_spec("llama", vocab_size=VOCAB)), tiny_tokenizer, tmp_path / "m", {}
    )
    assert run(app, ["generate", str(tmp_path / "m"), "-p", "x", "--exit-threshold", "0.5"]) == 2
    assert "has no exit gate; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("fast", [[], ["--fast"]], ids=str)
def test_loops_can_share_the_last_ones_keys(
    fast: list[str], student: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = text(capsys, student, *fast, "--loop-cache", "last")
    assert shared == text(capsys, student, "--loop-cache", "last")
    assert shared != text(capsys, student, "--loop-cache", "own") == text(capsys, student)
    assert run(app, ["generate", student, "-p", "x", *fast, "--loop-cache", "first"]) == 2
    assert "choose one of own, last" in capsys.readouterr().err
