"""`ltconvert select-layers`: which layers must stay full, and a look into the loops."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ltconvert import cli_output as output
from ltconvert.cli_run import begin, run_stages
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.cli_session import Session
    from ltconvert.recipes.schema import Recipe


def select_layers(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """Align and select; prints the ranked table and the words that use it."""
    from ltconvert.distill.processes import is_main_process
    from ltconvert.distill.selection.render import render_selection
    from ltconvert.distill.selection.result import Selection
    from ltconvert.distill.stage import SELECTION_FILE

    only = {
        name: getattr(recipe, name).model_copy(update={"enabled": False})
        for name in ("logits", "longctx")
    }
    recipe = recipe.model_copy(update=only)
    start = begin(session, recipe, teacher_name, out, revision)
    run_stages(start)
    start.log.close()
    if not is_main_process():
        return
    path = start.run_dir / "stages" / "select" / SELECTION_FILE
    selection = Selection.load(path)
    if session.json:
        output.print_json(selection.to_dict() | {"path": path})
        return
    output.print_rich(render_selection(selection))
    output.print_line(f"written: {path}")


def per_loop(
    session: Session, recipe: Recipe, teacher_name: str, out: Path | None, revision: str | None
) -> None:
    """Align, then score each visit of a layer; prints layers by loops. Nothing is chosen by it.

    Raises:
        UserError: the student does not loop.
    """
    from ltconvert.convert.teachers.load import describe_teacher
    from ltconvert.distill import select
    from ltconvert.distill.processes import is_main_process
    from ltconvert.distill.selection.per_loop import PER_LOOP_FILE, PER_LOOP_FOLDER
    from ltconvert.distill.selection.render import render_per_loop
    from ltconvert.distill.stage import StageInputs
    from ltconvert.recipes.schema import STAGES

    spec, _ = describe_teacher(teacher_name, revision=revision)
    if (recipe.student.loops or spec.num_loops) == 1:
        raise UserError("--per-loop compares loops, and this student has one; leave it out")
    start = begin(session, recipe, teacher_name, out, revision)
    result = run_stages(start, until="align")
    inputs = StageInputs(
        teacher=start.teacher,
        recipe=start.recipe,
        student=result.student,
        tokenizer=start.teacher.tokenizer,
        log=start.log,
        precision=result.precision,
        device=start.device,
        seed=recipe.seed + 1 + STAGES.index("select"),
    )
    scores = select.per_loop(inputs, start.run_dir)
    start.log.close()
    if not is_main_process():
        return
    path = start.run_dir / PER_LOOP_FOLDER / PER_LOOP_FILE
    if session.json:
        output.print_json(asdict(scores) | {"path": path})
        return
    output.print_rich(render_per_loop(scores))
    output.print_line(f"written: {path}")
