"""The pipeline on a toy teacher: what a run leaves, and what another call makes of it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lock_case import changed, holder
from pipeline_case import convert, make_case, make_recipe

from ltconvert import recipes
from ltconvert.convert.checkpoint import load_student, read_provenance
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.distill import lineage, pipeline, stage
from ltconvert.distill.pipeline import PipelineResult
from ltconvert.distill.records import clear_disk_errors
from ltconvert.distill.run_identity import check_owner, claim_for
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError

STAGES = ("align", "select", "logits", "longctx")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def teacher(case: Path) -> Teacher:
    return load_teacher(str(case / "teacher"))


@pytest.fixture(scope="module")
def finished(
    case: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> PipelineResult:
    return convert(teacher, case, tmp_path_factory.mktemp("run") / "out")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_student(folder).state_dict())


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_every_stage_has_a_row_and_a_record(finished: PipelineResult) -> None:
    assert [row["stage"] for row in finished.rows] == ["start", *STAGES]
    assert all(row["kl"] >= 0 and row["teacher_ppl"] > 1 for row in finished.rows)
    assert [row["tokens"] for row in finished.rows][1::2] == [512, 512]
    run_dir = finished.student_dir.parent
    for name in STAGES:
        record = json.loads((run_dir / "stages" / name / "stage.json").read_text())
        assert record["status"] == "finished"
        assert torch.__version__.startswith(record["versions"]["torch"])  # without its build
    noted = [
        json.loads(line)["stage"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert {"align", "logits", "longctx"} <= set(noted)


def test_training_brings_the_student_closer(finished: PipelineResult) -> None:
    kl = {row["stage"]: row["kl"] for row in finished.rows}
    assert kl["align"] < kl["start"] and kl["logits"] < kl["select"]


def test_the_saved_student_is_the_live_one_and_tells_where_it_comes_from(
    finished: PipelineResult, teacher: Teacher
) -> None:
    assert same(weights(finished.student_dir), dict(finished.student.state_dict()))
    assert len(finished.selection) == 1
    assert finished.student.config.mixers[finished.selection[0]] == "full"
    told = read_provenance(finished.student_dir)
    assert told["teacher"]["digest"] == teacher.digest and told["selection"] == finished.selection
    assert list(told["stages"]) == ["start", *STAGES]
    assert (finished.student_dir / "tokenizer.json").is_file()


def test_what_stays_on_disk(finished: PipelineResult) -> None:
    run_dir = finished.student_dir.parent
    assert (run_dir / "stages/align/student/config.json").is_file()
    assert not list(run_dir.glob("stages/*/checkpoint*"))
    assert not (run_dir / "stages/logits/student").exists()
    assert not (run_dir / "stages/longctx/student").exists()
    assert (run_dir / "stages/select/selection.json").is_file()


def test_the_teacher_is_left_as_it_was(
    case: Path, finished: PipelineResult, teacher: Teacher
) -> None:
    fresh = load_teacher(str(case / "teacher"))
    assert same(dict(fresh.model.state_dict()), dict(teacher.model.state_dict()))
    assert all(p.dtype == torch.float32 for p in teacher.model.parameters())


def test_a_run_killed_while_it_tidies_up_is_finished(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file that goes with a student that nothing is read from any more."""
    off = {"enabled": False}
    stages: dict[str, Any] = {"align": off, "select": {"method": "uniform"}, "longctx": off}
    real, left = os.unlink, [0]

    def unlink(path: Any, *arguments: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(path, *arguments, **options)

    done = convert(teacher, case, tmp_path / "out", **stages)
    student = tmp_path / "out/stages/logits/student"
    for number in (1, 2, 4):
        left[0] = number
        shutil.copytree(done.student_dir, student, dirs_exist_ok=True)
        monkeypatch.setattr(os, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            convert(teacher, case, tmp_path / "out", **stages)
        monkeypatch.undo()
        again = convert(teacher, case, tmp_path / "out", **stages)
        assert same(weights(again.student_dir), again.student.state_dict())
        assert not student.exists() and not list(student.parent.glob("student*"))


def test_a_finished_run_is_not_run_again(
    case: Path, teacher: Teacher, finished: PipelineResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a finished stage ran again")

    monkeypatch.setattr(pipeline, "RUN_STAGE", dict.fromkeys(STAGES, never))
    again = convert(teacher, case, finished.student_dir.parent)
    assert again.rows == finished.rows and again.selection == finished.selection
    assert same(dict(again.student.state_dict()), dict(finished.student.state_dict()))


@pytest.mark.parametrize(
    "sections",
    [
        {"logits": {"checkpoint_minutes": 1.0}},
        {"logits": {"gradient_checkpointing": True}},
        {"eval": {"task_limit": 3}},
    ],
    ids=["checkpoint_minutes", "gradient_checkpointing", "eval"],
)
def test_settings_that_change_no_result_may_change(
    case: Path, teacher: Teacher, finished: PipelineResult, sections: dict[str, Any]
) -> None:
    assert convert(teacher, case, finished.student_dir.parent, **sections).rows == finished.rows


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"align": {"lr": 0.5}}, "align.lr = 0.001, this call asks for 0.5"),
        ({"student": {"full_layers": 2}}, "student.full_layers = 1, this call asks for 2"),
        ({"student": {"short_conv": False}}, "student.short_conv = True, this call asks for False"),
        ({"data": {"shuffle_seed": 7}}, "data.shuffle_seed = 0, this call asks for 7"),
        ({"logits": {"temperature": 2.0}}, "logits.temperature = 1.0, this call asks for 2.0"),
        (
            {"longctx": {"budget_tokens": 640}},
            "longctx.budget_tokens = 512, this call asks for 640",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_recipe_is_refused_by_the_field_that_differs(
    case: Path, teacher: Teacher, finished: PipelineResult, sections: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as error:
        convert(teacher, case, finished.student_dir.parent, **sections)
    assert field in str(error.value) and "\n" not in str(error.value)


def test_a_run_that_another_process_is_at_is_left_alone(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    with holder(tmp_path / "run"):
        with pytest.raises(UserError, match="at work in it"):
            convert(teacher, case, tmp_path / "run")
        with pytest.raises(UserError, match="at work in it"):
            recipe, log = make_recipe(case), RunLog(None)
            pipeline.inputs_of("select", recipe, teacher, tmp_path / "run", log, precision="fp32")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_run_goes_on_with_its_text_alone(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    """Changed text is refused and named; the same text is accepted at another date and path."""
    off: dict[str, Any] = {name: {"enabled": False} for name in ("logits", "longctx")}
    data = {"source": str(tmp_path / "text.jsonl")}
    sections = {"align": {"budget_tokens": 128}, "data": data, **off}
    source = Path(data["source"])
    source.write_text((case / "text.jsonl").read_text())
    run_dir = tmp_path / "run"
    rows = convert(teacher, case, run_dir, **sections).rows
    more = sections | {"logits": {"budget_tokens": 128}}
    with changed(source), pytest.raises(UserError) as error:
        convert(teacher, case, run_dir, **more)
    assert f"content of data.source '{source}' has changed" in str(error.value)
    assert not (run_dir / "stages" / "logits").exists()
    os.utime(source, (1, 1))
    assert convert(teacher, case, run_dir, **sections).rows == rows
    (tmp_path / "elsewhere").mkdir()
    data["source"] = str(source.rename(tmp_path / "elsewhere" / source.name))
    assert convert(teacher, case, run_dir, **more).rows[: len(rows)] == rows


def test_a_run_of_before_texts_had_digests_goes_on(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"align": {"budget_tokens": 128}, "longctx": {"enabled": False}}
    with monkeypatch.context() as patched:
        for module in (lineage, stage):
            patched.setattr(module, "data_identity", lambda data: data.model_dump(mode="json"))
        rows = convert(teacher, case, tmp_path, **few, logits={"enabled": False}).rows
    assert "content" not in (tmp_path / "stages/start/stage.json").read_text()
    chosen = (tmp_path / "stages/select/selection.json").read_text()
    whole = convert(teacher, case, tmp_path, **few, logits={"budget_tokens": 128})
    assert whole.rows[: len(rows)] == rows
    assert (tmp_path / "stages/select/selection.json").read_text() == chosen


def test_another_teachers_run_is_refused(
    tmp_path: Path, tiny_tokenizer: Any, case: Path, finished: PipelineResult
) -> None:
    make_case(tmp_path, tiny_tokenizer, "qwen3")
    with pytest.raises(UserError, match=r"holds a run .*teacher.*choose another output folder"):
        convert(load_teacher(str(tmp_path / "teacher")), case, finished.student_dir.parent)


def test_a_teacher_under_another_name_is_the_same(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    """The weights say who it is; a run that has begun goes on, its records as they are."""
    few = {"align": {"budget_tokens": 128}, "longctx": {"enabled": False}}
    convert(teacher, case, tmp_path, logits={"enabled": False}, **few)
    owner = (tmp_path / "run.json").read_bytes()
    start = (tmp_path / "stages/start/stage.json").read_bytes()
    moved = replace(teacher, name="moved")
    rows = convert(moved, case, tmp_path, logits={"budget_tokens": 128}, **few).rows
    assert [row["stage"] for row in rows] == ["start", "align", "select", "logits"]
    assert (tmp_path / "run.json").read_bytes() == owner
    assert (tmp_path / "stages/start/stage.json").read_bytes() == start


def test_another_precision_is_refused_and_auto_keeps_the_runs_own(
    case: Path, teacher: Teacher, finished: PipelineResult
) -> None:
    run_dir = finished.student_dir.parent
    recipe = make_recipe(case)
    with pytest.raises(UserError, match="precision fp32, this call asks for bf16"):
        pipeline.run(recipe, teacher, run_dir, RunLog(run_dir), precision="bf16")
    again = pipeline.run(recipe, teacher, run_dir, RunLog(run_dir), precision="auto")
    assert again.precision == "fp32"


def test_a_shorter_recipe_in_a_finished_run_leaves_its_result_alone(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    off = {"enabled": False}
    few = {name: {"budget_tokens": 128} for name in ("align", "logits", "longctx")}
    convert(teacher, case, tmp_path, **few)
    before = weights(tmp_path / "student")
    shorter = {"align": few["align"], "logits": off, "longctx": off}
    selected = convert(teacher, case, tmp_path, **shorter)
    assert [row["stage"] for row in selected.rows] == ["start", "align", "select"]
    assert same(weights(tmp_path / "student"), before)
    assert [row["stage"] for row in convert(teacher, case, tmp_path, **few).rows][-1] == "longctx"


def test_a_stage_can_be_added_to_a_finished_run(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    few = {name: {"budget_tokens": 128} for name in ("align", "logits", "longctx")}
    convert(teacher, case, tmp_path / "two", **(few | {"longctx": {"enabled": False}}))
    added, whole = (convert(teacher, case, tmp_path / name, **few) for name in ("two", "one"))
    assert same(dict(added.student.state_dict()), dict(whole.student.state_dict()))
    assert same(weights(added.student_dir), weights(whole.student_dir))


def test_a_damaged_note_of_whose_a_folder_is_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"precision": "fp')
    for touch in (lambda: claim_for(tmp_path, "study", dict), lambda: check_owner(tmp_path, {})):
        with pytest.raises(UserError, match=r"run\.json is damaged; choose another"):
            touch()


def test_a_damaged_record_is_one_line(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    (tmp_path / "stages/align").mkdir(parents=True)
    (tmp_path / "stages/align/stage.json").write_text('{"stage": "al')
    with pytest.raises(UserError, match=r"stage\.json is damaged"):
        convert(teacher, case, tmp_path)


def test_a_damaged_student_is_made_again_as_the_lines_say(
    case: Path, teacher: Teacher, finished: PipelineResult, tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(finished.student_dir.parent, tmp_path / "run"))
    (run_dir / "student/model.safetensors").write_bytes(b"12345")
    for _ in range(3):  # the last stage's student, then the one before, which was not kept
        try:
            again = convert(teacher, case, run_dir)
            break
        except UserError as error:
            named = str(error).rpartition("delete ")[2].replace(",", " ").split()
            for path in (word for word in named if word.startswith(str(run_dir))):
                shutil.rmtree(path)
    assert same(weights(again.student_dir), weights(finished.student_dir))


def test_what_will_not_work_is_refused_before_anything_is_trained(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    short = {"method": "recall", "seq_len_tokens": 32}
    with pytest.raises(UserError, match=r"too short.*raise select\.seq_len_tokens"):
        convert(teacher, case, tmp_path / "run", select=short)
    assert not (tmp_path / "run").exists()
    broken = load_teacher(str(case / "teacher"))
    broken.model.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="weights are damaged, or do not fit its config"):
        convert(broken, case, tmp_path / "nan")


def test_a_stage_that_has_left_nothing_does_not_hold_to_its_settings(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"longctx": {"enabled": False}, "align": {"budget_tokens": 128}}

    def fails(*_: Any) -> None:
        raise UserError("no")

    with monkeypatch.context() as patch:
        patch.setitem(pipeline.RUN_STAGE, "logits", fails)
        with pytest.raises(UserError, match="no"):
            convert(teacher, case, tmp_path, logits={"budget_tokens": 128, "lr": 1e-3}, **few)
    assert json.loads((tmp_path / "stages/logits/stage.json").read_text())["status"] == "running"
    convert(teacher, case, tmp_path, logits={"budget_tokens": 128, "lr": 1e-4}, **few)


def test_disabled_stages_leave_no_trace(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    off = {"enabled": False}
    result = convert(
        teacher, case, tmp_path, student={"full_layers": [1]}, select=off, longctx=off, logits=off
    )
    assert [row["stage"] for row in result.rows] == ["start", "align"]
    assert result.student.config.mixers == ["gdn", "full", "gdn"]
    attention = result.student.model.layers[1].mixer.state_dict()
    assert same(dict(attention), dict(teacher.model.model.layers[1].mixer.state_dict()))


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_converts(name: str, case: Path, teacher: Teacher, tmp_path: Path) -> None:
    """Its student, its way to choose layers and its stages, at toy size."""
    loaded = recipes.load(name)
    few = {"budget_tokens": 128}
    small = {"window_tokens": 8, "top_k_tokens": 8, "block_tokens": 4, "chosen_blocks": 2}
    student = {"full_layers": 1} | loaded["student"] | small
    if "loop_start" in student:  # one layer, and one that runs twice
        student |= {"prelude_layers": 1, "coda_layers": 0, "loop_rank": 2}
        student["loop_calibration_tokens"] = 128
    if isinstance(turns := student.get("mixer"), list):
        student["mixer"] = turns[-3:]
    if isinstance(share := student["full_layers"], float):
        student["full_layers"] = round(3 * share + 0.4)  # one of three
    enabled = {
        stage: {"enabled": loaded.get(stage, {}).get("enabled", True)}
        for stage in ("align", "select")
    }
    method = {"method": loaded.get("select", {}).get("method", "kl-fast"), "recall_examples": 2}
    if method["method"].startswith("recall"):
        method["seq_len_tokens"] = 320  # what an example takes with this tokenizer
    result = convert(
        teacher,
        case,
        tmp_path,
        student=student,
        loop=few,
        align=few | enabled["align"],
        select=method | enabled["select"],
        logits=few,
        longctx={"enabled": False},
    )
    mixer = loaded["student"].get("mixer", "gdn")
    mixers = mixer if isinstance(mixer, list) else [mixer]
    if mixers != ["full"]:
        assert result.student.config.mixers.count("full") == student["full_layers"]
    assert set(result.student.config.mixers) <= {"full", *mixers}
    assert same(weights(result.student_dir), dict(result.student.state_dict()))
    assert all(math.isfinite(row["kl"]) for row in result.rows)


def test_a_choice_left_open_without_select_is_refused(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"student.full_layers = 1 .*select.enabled=true"):
        convert(teacher, case, tmp_path, select={"enabled": False})


def test_a_student_that_keeps_everything_is_its_teacher(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    off = {"enabled": False}
    result = convert(teacher, case, tmp_path, student={"mixer": "full"}, logits=off, longctx=off)
    assert [row["stage"] for row in result.rows] == ["start"]
    assert result.rows[0]["kl"] < 1e-9
    assert (tmp_path / "student/config.json").is_file()


@pytest.mark.parametrize("mixer", ["dsa", "nsa"])
def test_a_student_that_chooses_goes_through_all_stages(
    case: Path, teacher: Teacher, tmp_path: Path, mixer: str
) -> None:
    small = {"top_k_tokens": 12, "window_tokens": 8, "block_tokens": 4, "chosen_blocks": 2}
    result = convert(teacher, case, tmp_path, student={"mixer": mixer, **small})
    assert [row["stage"] for row in result.rows] == ["start", *STAGES]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    choices = {line["stage"]: line["choice"] for line in lines if "choice" in line}
    assert set(choices) == ({"align", "logits", "longctx"} if mixer == "dsa" else set())
    loaded = load_student(result.student_dir)
    assert sorted(loaded.config.mixers) == sorted([mixer, mixer, "full"])
    # In `align` nothing that the teacher has is trained.
    aligned = load_student(tmp_path / "stages/align/student")
    for name, value in teacher.model.state_dict().items():
        assert torch.equal(aligned.state_dict()[name], value), name


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_is_one_line_and_loses_nothing(
    case: Path,
    teacher: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    few = {name: {"budget_tokens": 128} for name in ("align", "logits", "longctx")}
    with monkeypatch.context() as patch:
        patch.setattr("ltconvert.distill.resume.save_file", refuse)
        with pytest.raises(UserError, match=f"cannot write to .*{os.strerror(number)}") as error:
            convert(teacher, case, tmp_path, **few)
    assert "\n" not in str(error.value)
    assert len(convert(teacher, case, tmp_path, **few).rows) == 5


def test_an_unwritable_place_is_one_line(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        convert(teacher, case, tmp_path / "file" / "run")


def test_align_in_groups_trains_every_layer(
    case: Path, teacher: Teacher, tmp_path: Path, finished: PipelineResult
) -> None:
    off = {"enabled": False}
    result = convert(teacher, case, tmp_path, align={"layers_at_once": 2}, logits=off, longctx=off)
    kl = {row["stage"]: row["kl"] for row in result.rows}
    whole = {row["stage"]: row["kl"] for row in finished.rows}
    assert kl["align"] == pytest.approx(whole["align"], rel=0.2) and kl["align"] < kl["start"]
    assert not list(tmp_path.glob("stages/align/**/checkpoint*"))


def test_a_problem_with_the_data_is_not_taken_for_one_with_the_run_folder(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), clear_disk_errors(tmp_path / "run"):
        raise PermissionError(errno.EACCES, "no", str(tmp_path / "data.jsonl"))


def test_a_student_is_no_teacher(finished: PipelineResult, case: Path, tmp_path: Path) -> None:
    again = load_teacher(str(finished.student_dir))
    with pytest.raises(UserError, match="gdn layers") as caught:
        convert(again, case, tmp_path / "run")
    assert "\n" not in str(caught.value)
