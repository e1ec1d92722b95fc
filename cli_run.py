"""The verbs that work on a recipe: distill, plan, and how all of them begin. Called by cli.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_models import short_name
from ltconvert.errors import UserError

if TYPE_CHECKING:
    import torch

    from ltconvert.cli_session import Session
    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.distill.pipeline import PipelineResult
    from ltconvert.distill.plan import Plan
    from ltconvert.distill.runlog import RunLog
    from ltconvert.recipes.schema import Recipe


def distill(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """All stages, evaluation and report; with `--json` the rows of the table on stdout."""
    from ltconvert.distill.evaluate import check_recall, evaluate_run
    from ltconvert.distill.evaluation.task_files import check_tasks
    from ltconvert.distill.processes import is_main_process
    from ltconvert.distill.report import show_evaluation

    check_tasks(recipe.eval.tasks)  # a misspelt task should not come to light after the training
    with begin(session, recipe, teacher_name, out, revision) as start:
        if start.teacher.tokenizer is not None:  # without one the run is refused
            check_recall(start.teacher.tokenizer, recipe.eval, recipe.seed)
        result = run_stages(start)
        start.log.close()
        if not is_main_process():
            return
        found = evaluate_run(
            start.run_dir,
            start.teacher,
            result.student,
            recipe,
            start.log,
            precision=result.precision,
        )
        if session.json:
            output.print_json(_document(result, start.run_dir) | {"evaluation": found})
            return
        output.print_line(show_evaluation(start.run_dir))
        output.print_line(f"student: {result.student_dir}")
        output.print_line(
            f"report: {start.run_dir / 'report.md'} and {start.run_dir / 'report.html'}"
        )


def plan(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """The table of what a run takes; refuses one that cannot fit, with the setting that would."""
    from ltconvert.distill.planning.render import render_plan

    device = session.device()
    session.choose_kernels(device)
    precision, _ = session.precision(device)
    run_dir = out or default_out(teacher_name, recipe)
    made = _planned(recipe, teacher_name, revision, run_dir, (device, precision))
    if session.json:
        output.print_json(made.to_dict())
    else:
        output.print_rich(render_plan(made))


def default_out(teacher_name: str, recipe: Recipe) -> Path:
    """Where a run goes without --out."""
    return Path("runs") / f"{short_name(teacher_name)}-{recipe.name}"


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    recipe: Recipe
    teacher: Teacher
    run_dir: Path
    log: RunLog
    device: torch.device
    precision: str


@contextmanager
def begin(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> Iterator[Start]:
    """Keep the run folder to this call, say what runs where and why, and load the teacher.

    Raises:
        UserError: the folder is another's, or the run cannot fit.
    """
    from ltconvert.distill.run_lock import working_in

    run_dir = out or default_out(teacher_name, recipe)
    _check_out(run_dir)
    with working_in(run_dir):
        yield _started(session, recipe, teacher_name, run_dir, revision)


def _started(
    session: Session, recipe: Recipe, teacher_name: str, run_dir: Path, revision: str | None
) -> Start:
    from ltconvert.convert.teachers.load import load_teacher
    from ltconvert.distill.planning.rows import agreed_rows, recorded_rows, with_rows
    from ltconvert.distill.run_identity import RUN_FILE
    from ltconvert.distill.runlog import RunLog

    device = session.device()
    log = RunLog(run_dir, json=session.json)
    log.say(f"run folder: {run_dir}")
    precision = _say_set_up(session, log, run_dir, device)
    if (run_dir / RUN_FILE).exists():  # a run that has begun has shown that it fits
        recipe = with_rows(recipe, recorded_rows(recipe, run_dir))
    else:
        made = _say_plan(recipe, teacher_name, revision, run_dir, log, (device, precision))
        recipe = with_rows(recipe, agreed_rows(made.micro_batch_rows))
    teacher = load_teacher(teacher_name, device=device, revision=revision)
    loops = f" in {teacher.spec.num_loops} loops" if teacher.spec.num_loops > 1 else ""
    log.say(f"teacher: {teacher.name}, {teacher.spec.num_layers} layers{loops}")
    for remark in teacher.remarks:
        log.say(f"  {remark}")
    return Start(recipe, teacher, run_dir, log, device, precision)


def _say_set_up(session: Session, log: RunLog, run_dir: Path, device: torch.device) -> str:
    """Device, precision and kernels with the reason for each; the precision."""
    import torch

    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    log.say(f"device: {device}{name}, torch {torch.__version__}")
    precision, reason = session.precision(device, run_dir)
    log.say(f"precision: {precision} ({reason})")
    by_choice: dict[str, list[str]] = {}
    for op, backend, why in session.choose_kernels(device):
        by_choice.setdefault(f"{backend} ({why})", []).append(op)
    choices = (f"{', '.join(ops)}: {choice}" for choice, ops in by_choice.items())
    log.say(f"kernels: {'; '.join(choices)}")
    return precision


def _say_plan(
    recipe: Recipe,
    teacher_name: str,
    revision: str | None,
    run_dir: Path,
    log: RunLog,
    where: tuple[torch.device, str],
) -> Plan:
    """Refuse what cannot fit before anything is loaded; what it takes in a few lines."""
    from ltconvert.distill.planning.render import summary_lines

    made = _planned(recipe, teacher_name, revision, run_dir, where)
    for line in summary_lines(made):
        log.say(f"plan: {line}")
    return made


def _planned(
    recipe: Recipe,
    teacher_name: str,
    revision: str | None,
    run_dir: Path,
    where: tuple[torch.device, str],
) -> Plan:
    """The plan of a run from the teacher's config alone."""
    from ltconvert.convert.teachers.load import teacher_config
    from ltconvert.distill import plan as planning
    from ltconvert.distill.inherited import inherited

    config = teacher_config(teacher_name, revision=revision)
    alike = inherited(recipe, short_name(teacher_name), config)
    return planning.plan(recipe, config.spec(), *where, inherited=alike, run_dir=run_dir)


def _check_out(run_dir: Path) -> None:
    """Refuse a run folder that is a file, or a folder of something else, before any loading.

    Raises:
        UserError: naming it.
    """
    from ltconvert.distill.run_identity import RUN_FILE
    from ltconvert.distill.run_lock import LOCK_FILE

    if run_dir.is_file():
        raise UserError(f"--out {run_dir} is a file; name a folder")
    found = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    if found - {LOCK_FILE} and RUN_FILE not in found:
        raise UserError(
            f"--out {run_dir} holds files that no run of ltconvert wrote; choose another folder"
        )


def run_stages(start: Start) -> PipelineResult:
    """All stages that the recipe asks for and that are not finished."""
    from ltconvert.distill import pipeline

    with start.log.hearing("ltconvert.kernels"):
        return pipeline.run(
            start.recipe,
            start.teacher,
            start.run_dir,
            start.log,
            device=start.device,
            precision=start.precision,
        )


def _document(result: PipelineResult, run_dir: Path) -> dict[str, Any]:
    """What `distill --json` prints."""
    return {
        "run_dir": run_dir,
        "student": result.student_dir,
        "full_layers": result.selection,
        "precision": result.precision,
        "stages": result.rows,
    }
