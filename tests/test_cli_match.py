"""`inspect --match` on the toy teacher."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pipeline_case import make_case

from ltconvert.cli import app
from ltconvert.cli_session import run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> str:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer, "qwen3")
    return str(folder / "teacher")


HELD = ["--hold", "width", "--hold", "heads", "--hold", "top_experts", "--context", "64"]


def test_a_matched_dreamer_is_shown(teacher: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", teacher, "--match", *HELD, "--hold", "depths=4"]
    assert run(app, [*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shapes"]["matched"]["depths"] == 4
    assert found["shapes"]["matched"]["width"] == found["shapes"]["unmatched"]["width"] == 32
    assert set(found["footprints"]) == {"model", "unmatched", "matched"}
    assert run(app, arguments) == 0
    assert "matched / model" in capsys.readouterr().out


@pytest.mark.parametrize("hold", ["size", "depths=x", "depths=0"])
def test_wrong_numbers_are_refused(
    teacher: str, hold: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["inspect", teacher, "--match", "--hold", hold]) == 2
    assert f"--hold {hold}" in capsys.readouterr().err


def test_depths_are_those_of_a_dreamer(teacher: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["generate", teacher, "--prompt", "the cat", "--depths", "2"]) == 2
    assert "of a Dreamer alone" in capsys.readouterr().err
