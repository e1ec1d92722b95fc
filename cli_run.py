"""The verbs that work on a recipe: distill, select-layers, plan, eval. Called by cli.py, lazily."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.errors import UserError

if TYPE_CHECKING:
    import torch

    from ltconvert.cli_session import Session
    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.distill.pipeline import PipelineResult
    from ltconvert.distill.runlog import RunLog
    from ltconvert.distill.selection.result import Selection
    from ltconvert.recipes.schema import Recipe

RUN_FILE = "run.json"


def distill(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """All stages, evaluation and report; with `--json` the rows of the table on stdout."""
    teacher, log, run_dir, device = _begin(session, recipe, teacher_name, out, revision)
    result = _pipeline(session, recipe, teacher, run_dir, log, device)
    log.close()
    if session.json:
        output.print_json(_document(result, run_dir))
    else:
        log.say(f"student: {result.student_dir}")


def select_layers(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """Align and select; prints the ranked table and the words that use it."""
    from ltconvert.distill.selection.result import Selection
    from ltconvert.distill.stage import SELECTION_FILE

    only = {
        name: getattr(recipe, name).model_copy(update={"enabled": False})
        for name in ("logits", "longctx")
    }
    recipe = recipe.model_copy(update=only)
    teacher, log, run_dir, device = _begin(session, recipe, teacher_name, out, revision)
    _pipeline(session, recipe, teacher, run_dir, log, device)
    log.close()
    path = run_dir / "stages" / "select" / SELECTION_FILE
    selection = Selection.load(path)
    if session.json:
        output.print_json(selection.to_dict() | {"path": path})
        return
    _show_selection(selection)
    log.say(f"written: {path}")
    log.say(f"use it again: {selection.setting}")


def _begin(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> tuple[Teacher, RunLog, Path, torch.device]:
    """Say what runs where and why, then load the teacher."""
    from ltconvert.convert.teachers.load import load_teacher
    from ltconvert.distill.runlog import RunLog

    run_dir = out or Path("runs") / f"{Path(teacher_name).stem}-{recipe.name}"
    _check_out(run_dir)
    device = session.device()
    log = RunLog(run_dir, json=session.json)
    log.say(f"run folder: {run_dir}")
    _say_set_up(session, log, device)
    teacher = load_teacher(teacher_name, device=device, revision=revision)
    log.say(f"teacher: {teacher.name}, {teacher.spec.num_layers} layers x {teacher.spec.num_loops}")
    for remark in teacher.remarks:
        log.say(f"  {remark}")
    return teacher, log, run_dir, device


def _say_set_up(session: Session, log: RunLog, device: torch.device) -> None:
    """Device, precision and kernels with the reason for each."""
    import torch

    rows = session.choose_kernels(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    log.say(f"device: {device} ({name}), torch {torch.__version__}")
    log.say("kernels: " + "; ".join(f"{op} {backend} ({why})" for op, backend, why in rows))


def _check_out(run_dir: Path) -> None:
    """Refuse a run folder that is a file, or a folder of something else, before any loading.

    Raises:
        UserError: naming it.
    """
    if run_dir.is_file():
        raise UserError(f"--out {run_dir} is a file; name a folder")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / RUN_FILE).exists():
        raise UserError(
            f"--out {run_dir} holds files that no run of ltconvert wrote; choose another folder"
        )


def _pipeline(
    session: Session,
    recipe: Recipe,
    teacher: Teacher,
    run_dir: Path,
    log: RunLog,
    device: torch.device,
) -> PipelineResult:
    from ltconvert.distill import pipeline

    return pipeline.run(
        recipe, teacher, run_dir, log, device=device, precision=session.precision_name
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


def _show_selection(selection: Selection) -> None:
    """The ranked table with bars, the chosen set, how stable it was and what it cost."""
    main = selection.scores.get(selection.main or "", [])
    low, high = min(main, default=0.0), max(main, default=0.0)
    columns = ["rank", "layer", "keeps", *selection.scores, *([""] if main else [])]
    rows = []
    for rank, layer in enumerate(selection.ranking, start=1):
        row: list[Any] = [rank, layer, "full" if layer in selection.chosen else ""]
        row += [column[layer] for column in selection.scores.values()]
        if main:
            share = (main[layer] - low) / (high - low) if high > low else 1.0
            row.append(output.bar(share if selection.higher_is_better else 1.0 - share))
        rows.append(row)
    output.print_table(f"layers by {selection.method}", columns, rows)
    cost = selection.cost
    output.print_facts(
        f"kept as full attention: {', '.join(map(str, selection.chosen))}",
        {
            "batches": len(selection.history),
            "stopped early, the set was stable": "yes" if selection.stopped_early else "no",
            "tokens": cost.tokens,
            "whole forwards": round(cost.forwards, 1),
            "trained tokens": cost.trained_tokens,
            "seconds": round(cost.seconds, 1),
            **selection.facts,
        },
    )
