"""A Dreamer's pools shrink in steps; a run that was killed between them ends the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from pipeline_case import convert, make_recipe
from pydantic import ValidationError

from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.shrink import pool_sizes, set_top_experts
from ltconvert.convert.teachers.load import Teacher
from ltconvert.distill.evaluate import evaluate
from ltconvert.distill.report import build_report
from ltconvert.distill.reporting.run_sections import one_layer
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.shrink import _skipped
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.student import StudentSettings

STUDENT: dict[str, Any] = {
    "kind": "dreamer",
    "mixer": "full",
    "full_layers": 1.0,
    "slices": 2,
    "top_experts": 2,
    "top_entries": 1,
    "pool_schedule": [1.0, 0.67, 0.34],
    "top_schedule": [3, 2, 2],
}


FAMILY = "qwen3"  # of the case


@pytest.mark.parametrize("options", [{}, {"pool_skip": True}, {"pool_cut": "merge"}], ids=str)
def test_pools_shrink_and_what_is_left_learns(
    case: Path, teacher: Teacher, tmp_path: Path, options: dict[str, Any]
) -> None:
    result = convert(teacher, case, tmp_path / "out", student=STUDENT | options)
    assert [row["stage"] for row in result.rows] == ["start", "logits", "shrink", "longctx"]
    facts = json.loads((tmp_path / "out/stages/shrink/stage.json").read_text())["facts"]
    pools = [(step["entries"], step["experts"]) for step in facts["pools"]]
    assert pools == [(3, 6), (2, 4), (1, 2)]
    assert [step["top_experts"] for step in facts["pools"]] == [3, 2, 2]
    sizes = [step["parameters"] for step in facts["pools"]]
    assert sizes == sorted(sizes, reverse=True)
    evaluate(
        teacher,
        result.student,
        teacher.tokenizer,
        make_recipe(case).eval,
        data=make_recipe(case).data,
        folder=tmp_path / "out",
        log=RunLog(tmp_path / "out"),
        parts=["routing"],
    )
    build_report(tmp_path / "out")
    report = (tmp_path / "out/report.md").read_text()
    assert "| 34.0 % | 1 (33.3 %) | 2 (33.3 %) | 2 |" in report and "shrink 3 of 3" in report
    assert "## Routing" in report and "| attention | 1 | 0 |" in report
    assert "depths or more" not in report  # of three depths none can be so many
    _forget(tmp_path / "out", {"top_experts", "entries_share", "experts_share", "null"})
    build_report(tmp_path / "out")  # of a run from before these were noted
    assert "| 34.0 % | 1 | 2 | - |" in (tmp_path / "out/report.md").read_text()
    loaded = load_student(result.student_dir)
    assert loaded.config.dreamer["experts"] == 2
    for branch in ("skipped_attention", "skipped_experts"):
        assert len(loaded.config.dreamer[branch]) == (2 if "pool_skip" in options else 0)
    assert sum(p.numel() for p in loaded.parameters()) == sizes[-1]
    assert not (tmp_path / "out/stages/logits/student").exists()


def _forget(run_dir: Path, names: set[str]) -> None:
    """Take values out of a run's records."""

    def forget(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name not in names}

    for path in (run_dir / "stages/shrink/stage.json", run_dir / "evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text(), object_hook=forget)))


def test_a_run_killed_between_steps_goes_on(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(teacher, case, tmp_path / "whole", student=STUDENT)

    from ltconvert.distill import shrink

    cuts = []

    def killed(*given: Any) -> float:
        cuts.append(given[1])
        if len(cuts) == 3:
            raise KeyboardInterrupt
        return once(*given)

    once = shrink.cut_to
    with monkeypatch.context() as patch:
        patch.setattr(shrink, "cut_to", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(teacher, case, tmp_path / "killed", student=STUDENT)
    again = convert(teacher, case, tmp_path / "killed", student=STUDENT)
    for name, value in whole.student.state_dict().items():
        assert torch.equal(again.student.state_dict()[name], value), name


def test_a_run_killed_while_it_judges_goes_on_and_counts_the_time(
    case: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass without an entry is made once, and the clock knows of those before the kill."""
    from ltconvert.distill import pool_worth
    from ltconvert.distill.selection.probe import Stopwatch

    student = STUDENT | {"pool_schedule": [0.67], "top_schedule": []}
    passes: list[int] = []
    judge = pool_worth.pool_damage

    def counted(*given: Any, done: Any, kill: int = 99, **options: Any) -> Any:
        def note(found: Any) -> None:
            done(found)
            passes.append(found.passes)
            if len(passes) == kill:
                raise KeyboardInterrupt

        return judge(*given, done=note, **options)

    whole = convert(teacher, case, tmp_path / "whole", student=student)
    monkeypatch.setattr(pool_worth, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(Stopwatch, "seconds", property(lambda watch: watch.earlier + 1000.0))
    with monkeypatch.context() as patch:
        patch.setattr(pool_worth, "pool_damage", partial(counted, kill=5))
        with pytest.raises(KeyboardInterrupt, match="goes on from there"):
            convert(teacher, case, tmp_path / "killed", student=student)
    partial_file = tmp_path / "killed/stages/shrink/step-0" / pool_worth.PARTIAL_FILE
    assert json.loads(partial_file.read_text())["state"]["experts"]["passes"] == 2
    monkeypatch.setattr(pool_worth, "pool_damage", counted)
    with monkeypatch.context() as patch:  # once more when the choice is written
        patch.setattr(pool_worth.Judge, "clear", lambda _: _stop())
        with pytest.raises(KeyboardInterrupt):
            convert(teacher, case, tmp_path / "killed", student=student)
    again = convert(teacher, case, tmp_path / "killed", student=student)
    assert passes == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert not partial_file.exists()
    for name, value in whole.student.state_dict().items():
        assert torch.equal(again.student.state_dict()[name], value), name
    (minutes,) = (row["minutes"] for row in again.rows if row["stage"] == "shrink")
    assert minutes > 2000 / 60


def _stop() -> None:
    raise KeyboardInterrupt


def test_shares_below_what_a_token_uses_say_what_is_kept(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    student = STUDENT | {"top_entries": 2, "pool_schedule": [0.34], "top_schedule": [4]}
    convert(teacher, case, tmp_path / "out", student=student)
    (step,) = json.loads((tmp_path / "out/stages/shrink/stage.json").read_text())["facts"]["pools"]
    assert step["share"] == 0.34 and step["entries_share"] == step["experts_share"] == 2 / 3


def test_sizes_of_pools() -> None:
    config = DreamerConfig(30, 120, slices=4, top_entries=2, top_experts=6)
    assert pool_sizes(config, 30, 0.75) == (22, 88)
    assert pool_sizes(config, 30, 0.01) == (2, 8)  # what tokens use, in whole MLPs
    assert pool_sizes(config, 60, 1.0) == (30, 120)  # no more than there are


def test_more_or_fewer_experts_are_what_a_student_made_with_so_many_does() -> None:
    made = {"entries": 3, "experts": 6, "slices": 2}
    student, wanted = (
        tiny_model(tiny_spec(FAMILY), dreamer=made | {"top_experts": top}) for top in (2, 4)
    )
    for model in (student, wanted):
        model.model.dreamer.set_release(1.0)
    wanted.load_state_dict(student.state_dict())
    set_top_experts(student, 4)
    assert student.config.dreamer_config() == wanted.config.dreamer_config()
    ids = tokens(2, 9)
    assert torch.equal(student(ids).logits, wanted(ids).logits)
    with pytest.raises(UserError, match="top_experts 1 is less than the 2 slices"):
        set_top_experts(student, 1)
    with pytest.raises(UserError, match="top_experts is 7, the pool holds 6"):
        set_top_experts(student, 7)


def test_experts_that_will_not_be_left_are_refused_before_any_work(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="5 experts a token in step 2, which begins with 4"):
        convert(teacher, case, tmp_path / "out", student=STUDENT | {"top_schedule": [3, 2, 5]})
    assert not (tmp_path / "out").exists()


def test_every_step_has_its_experts() -> None:
    for tops, mistake in (([2, 2], "as many steps"), ([2, 2, 1], "less than the 2 slices")):
        with pytest.raises(ValidationError, match=mistake):
            StudentSettings(**{**STUDENT, "top_schedule": tops})
    steps = StudentSettings(**{**STUDENT, "top_schedule": []}).steps
    assert steps == [(1.0, 2), (0.67, 2), (0.34, 2)]


def test_shares_fall() -> None:
    with pytest.raises(ValidationError, match="shares never rise from step to step"):
        StudentSettings(**{**STUDENT, "pool_schedule": [0.5, 0.75]})
    with pytest.raises(ValidationError, match="needs routing that the stage logits has released"):
        Recipe(name="early", student=STUDENT, logits={"enabled": False})
    for stage in ("shrink", "longctx"):
        with pytest.raises(ValidationError, match=f"{stage}.release_share is 0.5, but pools"):
            Recipe(name="again", student=STUDENT, **{stage: {"release_share": 0.5}})
    assert "shrink" not in Recipe(name="dense").stages


def test_what_a_dreamer_skips_is_said() -> None:
    config = DreamerConfig(entries=2, experts=4, skipped_attention=[1, 2, 5], skipped_experts=[4])
    assert _skipped(config) == "; depths 1, 2, 5 go without attention; depth 4 goes without experts"
    assert _skipped(DreamerConfig(entries=2, experts=4)) == ""
    said = one_layer(vars(config), None)
    assert said.endswith(" Skipped: depths 1-2, 5 without attention, depth 4 without experts.")
    assert "Skipped" not in one_layer(vars(DreamerConfig(entries=2, experts=4)), None)
