"""A dense toy teacher is looped, healed and then converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_case import convert, make_case, make_recipe

from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.distill import select
from ltconvert.distill.pipeline import PipelineResult, inputs_of
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError

# Three layers: a prelude and one physical layer that runs twice.
LOOPED: dict[str, Any] = {
    "loops": 2,
    "prelude_layers": 1,
    "loop_start": "average",
    "loop_rank": 2,
    "loop_calibration_tokens": 0,
}
OFF = {"enabled": False}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer, "qwen2")
    return folder


@pytest.fixture(scope="module")
def teacher(case: Path) -> Teacher:
    return load_teacher(str(case / "teacher"))


@pytest.fixture(scope="module")
def finished(
    case: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> PipelineResult:
    return convert(
        teacher, case, tmp_path_factory.mktemp("run") / "out", student=LOOPED | {"full_layers": 1}
    )


def test_stages_run_in_order_and_each_brings_the_student_closer(finished: PipelineResult) -> None:
    kl = {row["stage"]: row["kl"] for row in finished.rows}
    assert list(kl) == ["start", "loop", "align", "select", "logits", "longctx"]
    assert kl["loop"] < kl["start"] and kl["logits"] < kl["select"]


def test_the_student_is_looped_and_a_physical_layer_stays_full_in_all_loops(
    finished: PipelineResult,
) -> None:
    config = finished.student.config
    assert (config.num_layers, config.num_loops, config.prelude_layers) == (2, 2, 1)
    assert sorted(config.mixers) == ["full", "gdn"] and len(finished.selection) == 1
    assert len(config.layer_types) == 3  # the teacher's layers
    again = load_student(finished.student_dir)
    assert again.config.tied_rank == 2
    for name, value in finished.student.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_the_healed_looped_model_is_kept_and_gave_the_full_layer(finished: PipelineResult) -> None:
    looped = load_student(finished.student_dir.parent / "stages/loop/student")
    assert looped.config.mixers == ["full", "full"]
    aligned = load_student(finished.student_dir.parent / "stages/align/student")
    assert torch.equal(
        aligned.model.layers[1].mlp.up_proj.lora_b, looped.model.layers[1].mlp.up_proj.lora_b
    )


def test_the_teacher_is_left_as_it_was(
    case: Path, finished: PipelineResult, teacher: Teacher
) -> None:
    fresh = load_teacher(str(case / "teacher")).model.state_dict()
    assert all(torch.equal(value, fresh[n]) for n, value in teacher.model.state_dict().items())


def test_calibration_brings_the_start_closer(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    off = {"loop": OFF, "logits": OFF, "longctx": OFF}
    kl = {}
    for tokens in (0, 1024):
        student = LOOPED | {"loop_rank": 8, "mixer": "full", "loop_calibration_tokens": tokens}
        kl[tokens] = convert(teacher, case, tmp_path / str(tokens), student=student, **off).rows[0]
    assert kl[1024]["kl"] < kl[0]["kl"]


def test_rows_of_another_length_are_calibrated_on_only_before_the_start(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    """Without the stage loop nothing holds its settings, and the looped model is made anew."""

    def start(folder: str, length: int) -> dict[str, torch.Tensor]:
        student = LOOPED | {"loop_calibration_tokens": 256}
        loop = OFF | {"seq_len_tokens": length, "batch_tokens": length}
        recipe = make_recipe(case, student=student, loop=loop)
        log = RunLog(tmp_path / folder)
        inputs = inputs_of("align", recipe, teacher, tmp_path / folder, log, precision="fp32")
        return inputs.teacher.model.state_dict()

    first, again, other = start("one", 32), start("one", 64), start("other", 64)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_at_full_rank_the_start_is_the_teacher(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    student = LOOPED | {"loop_rank": 1000, "mixer": "full"}
    result = convert(teacher, case, tmp_path, student=student, loop=OFF, logits=OFF, longctx=OFF)
    assert [row["stage"] for row in result.rows] == ["start"] and result.rows[0]["kl"] < 1e-9


def test_loops_that_do_not_fit_leave_nothing_behind(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"leave 2, which student\.loops 3 does not divide"):
        convert(teacher, case, tmp_path / "run", student=LOOPED | {"loops": 3})
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_looped_student_with_full_attention_is_a_teacher(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    """What the recipe loop leaves, converted in a run of its own: the same shape of student."""
    student = LOOPED | {"mixer": "full"}
    few = {"budget_tokens": 128}
    looped = convert(
        teacher, case, tmp_path / "a", student=student, loop=few, logits=OFF, longctx=OFF
    )
    assert [row["stage"] for row in looped.rows] == ["start", "loop"]
    again = load_teacher(str(looped.student_dir))
    off = {"align": few, "select": OFF, "logits": OFF, "longctx": OFF}
    result = convert(again, case, tmp_path / "b", student={"full_layers": [0]}, **off)
    config = result.student.config
    assert config.mixers == ["full", "gdn"] and config.tied_rank == 2 and config.prelude_layers == 1
    with pytest.raises(UserError, match="runs 2 loops already"):
        convert(again, case, tmp_path / "c", student=LOOPED)
    with pytest.raises(ValueError, match=r"student\.loops is 1, and the loops of this teacher"):
        convert(again, case, tmp_path / "d", student={"loops": 1, "full_layers": [0]}, **off)


def test_every_visit_of_the_looped_form_can_be_scored(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    """The verb's study and gates: both compare with the looped model, not with the dense one."""
    recipe = make_recipe(case, student=LOOPED | {"full_layers": 1})
    log = RunLog(tmp_path)
    inputs = inputs_of("select", recipe, teacher, tmp_path, log, precision="fp32")
    assert inputs.teacher.spec.num_layers == 2
    assert inputs.student.config.mixers == ["gdn", "gdn"]
    scores = select.per_loop(inputs, tmp_path)
    assert [(v["layer"], v["loop"]) for v in scores.visits] == [(0, 0), (1, 0), (1, 1)]
    chosen = recipe.select.model_copy(update={"method": "kl-gates", "train_tokens": 256})
    found = select.run(chosen, inputs, tmp_path / "gates").facts["chosen"]
    assert len(found) == 1
