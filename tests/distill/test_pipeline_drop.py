"""A toy teacher loses a layer and learns its logits back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_case import convert
from pydantic import ValidationError

from ltconvert.convert.checkpoint import load_student, read_provenance
from ltconvert.convert.teachers.load import Teacher
from ltconvert.distill.damage import least_damage
from ltconvert.distill.pipeline import PipelineResult
from ltconvert.distill.planning.models import models_of
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

DROP: dict[str, Any] = {"mixer": "full", "full_layers": 1.0, "drop_calibration_tokens": 256}


FAMILY = "qwen3"  # of the case


def test_layers_are_chosen_once_and_noted(
    case: Path,
    teacher: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def counting(*given: Any) -> list[int]:
        calls.append(1)
        return least_damage(*given)

    monkeypatch.setattr("ltconvert.distill.lineage.least_damage", counting)
    settings = DROP | {"drop_layers": 1}
    first: PipelineResult = convert(teacher, case, tmp_path / "out", student=settings)
    again = convert(teacher, case, tmp_path / "out", student=settings)
    assert len(calls) == 1
    kl = {row["stage"]: row["kl"] for row in again.rows}
    assert list(kl) == ["start", "logits", "longctx"] and kl["logits"] < kl["start"]
    assert load_student(first.student_dir).config.num_layers == 2
    noted = json.loads((first.student_dir / "provenance.json").read_text())["dropped_layers"]
    assert len(noted) == 1
    said = "".join(capsys.readouterr())
    assert said.count(f"layers of the teacher that are left out: {noted[0]}\n") == 1
    start = json.loads((tmp_path / "out/stages/start/stage.json").read_text())
    assert start["facts"]["dropped"] == noted


def test_processes_leave_out_the_layers_that_the_first_one_chose(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltconvert.distill.lineage.all_values", lambda mine: [[2], mine])
    monkeypatch.setattr("ltconvert.distill.lineage.least_damage", lambda *_: [1])
    off = {"enabled": False}
    result = convert(
        teacher, case, tmp_path, student=DROP | {"drop_layers": 1}, logits=off, longctx=off
    )
    assert read_provenance(result.student_dir)["dropped_layers"] == [2]


def test_the_plan_counts_what_is_left(teacher: Teacher) -> None:
    recipe = Recipe(name="drop", student=DROP | {"drop_layers": [0]})
    models = models_of(recipe, teacher.spec)
    layer = models.teacher.layers[0].parameters
    assert models.hybrid.parameters == models.teacher.parameters - layer


def test_mistakes_are_refused_before_any_work(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names layer 7"):
        convert(teacher, case, tmp_path / "out", student=DROP | {"drop_layers": [7]})
    with pytest.raises(ValidationError, match=r"set student\.mixer to full"):
        Recipe(name="drop", student={"drop_layers": 1})
    with pytest.raises(ValidationError, match="expected a share"):
        Recipe(name="drop", student=DROP | {"drop_layers": 1.0})
