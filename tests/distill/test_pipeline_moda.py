"""Mixture-of-depths students through the stages, alone and beside linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from pipeline_case import convert

from ltconvert import recipes
from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.teachers.load import Teacher
from ltconvert.convert.transfer import build_student
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.errors import UserError
from ltconvert.recipes.stages import LogitsSettings
from ltconvert.recipes.student import StudentSettings

FAMILY = "ouro"  # of the case


def test_it_starts_at_the_teacher_and_ends_as_published(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    result = convert(teacher, case, tmp_path, student={"mixer": "moda", "full_layers": 0})
    assert [row["stage"] for row in result.rows] == ["start", "logits", "longctx"]
    assert result.rows[0]["kl"] < 1e-7
    merged, ids = load_student(result.student_dir), tokens(1, 9)
    assert merged.config.mixers == ["moda"] * 3 and merged.model.depth_schedule == 1
    with torch.no_grad():
        assert torch.equal(result.student(ids).logits, merged(ids).logits)
        started = build_student(teacher.model, merged.config.mixers)
        for layer, first in zip(merged.model.layers, started.model.layers, strict=True):
            for kind in ("attention", "ffn"):
                moved = layer.depth_proj[kind].k_proj.weight - first.depth_proj[kind].k_proj.weight
                assert moved.abs().max() > 1e-4


def test_chosen_full_layers_can_read_depth(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    student = {"mixer": "gdn", "full_layers": 2, "full_mixer": "moda", "depth_linear_writes": True}
    result = convert(teacher, case, tmp_path, student=student, longctx={"enabled": False})
    loaded = load_student(result.student_dir)
    assert sorted(loaded.config.mixers) == ["gdn", "moda", "moda"]
    assert loaded.model.depth_schedule == 1 and len(result.selection) == 2
    kl = {row["stage"]: row["kl"] for row in result.rows}
    assert kl["logits"] < kl["select"]


def test_the_schedule_rises_with_the_steps_and_projections_learn_at_the_mixers_rate() -> None:
    teacher = tiny_model(tiny_spec()).requires_grad_(False)
    student = build_student(teacher, ["moda"] * 3, {"depth_bias": -1.0})
    settings = LogitsSettings(depth_warmup_share=0.4, ce_weight=0.5)
    objective = LogitsObjective(teacher, student, settings)
    ids = tokens(1, 8)
    batch = Batch(ids, torch.zeros_like(ids), ids.roll(-1, 1), torch.ones_like(ids).bool())
    for progress, wanted in ((0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (0.9, 1.0)):
        objective.train_step(batch, lambda loss: loss.backward(), progress)
        assert student.model.depth_schedule.item() == pytest.approx(wanted)
    groups = {group["name"]: group["params"] for group in objective.parameter_groups()}
    assert len(groups["mixers"]) == 2 * 4 + 3  # two layers' projections, three layers' biases
    unread = student.model.layers[0].mixer.depth_bias
    learning = [p for p in groups["mixers"] if p is not unread]
    assert all(p.grad is not None and p.grad.any() for p in learning)


def test_the_control_differs_in_nothing_but_the_student() -> None:
    for budget in recipes.budgets():
        moda, control = (
            recipes.resolve(name, budget=budget).model_dump() for name in ("moda", "finetune")
        )
        for stage in ("logits", "longctx"):
            moda[stage].pop("mixer_lr"), control[stage].pop("mixer_lr")  # it has no new tensors
        differing = {name for name in moda if moda[name] != control[name]}
        assert differing == {"name", "description", "student"}


def test_a_teacher_has_no_depth_attention(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    student = build_student(teacher.model, ["moda"] * 3)
    given = Teacher(**{**vars(teacher), "model": student})
    with pytest.raises(UserError, match="is a student with moda layers"):
        convert(given, case, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixer": "moda"}, "set it to 0, or list the layers"),
        ({"depth_slots": "first:3"}, "depth_slots"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudentSettings(**given)
