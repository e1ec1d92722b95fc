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
    """Align and select; prints the ranked table and the words that use it.

    Raises:
        UserError: the recipe leaves nothing to choose.
    """
    from ltconvert.distill.processes import is_main_process
    from ltconvert.distill.selection.render import render_selection
    from ltconvert.distill.selection.result import Selection
    from ltconvert.distill.stage import SELECTION_FILE

    _check_selects(recipe, "select-layers")
    only = {
        name: getattr(recipe, name).model_copy(update={"enabled": False})
        for name in ("logits", "shrink", "longctx")
    }
    recipe = recipe.model_copy(update=only)
    with begin(session, recipe, teacher_name, out, revision) as start:
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
        UserError: the student does not loop, or nothing in it is converted.
    """
    from ltconvert.convert.teachers.load import describe_teacher
    from ltconvert.convert.transfer import origin_spec
    from ltconvert.distill import pipeline, select
    from ltconvert.distill.processes import is_main_process
    from ltconvert.distill.selection.per_loop import PER_LOOP_FILE, PER_LOOP_FOLDER
    from ltconvert.distill.selection.render import render_per_loop

    spec, _ = describe_teacher(teacher_name, revision=revision)
    loops = recipe.student.loops or origin_spec(spec, recipe.student.model_dump()).num_loops
    if loops == 1:
        raise UserError("--per-loop compares loops, and this student has one; leave it out")
    _check_selects(recipe, "--per-loop")
    with begin(session, recipe, teacher_name, out, revision) as start:
        with start.log.hearing("ltconvert.kernels"):
            inputs = pipeline.inputs_of(
                "select",
                start.recipe,
                start.teacher,
                start.run_dir,
                start.log,
                device=start.device,
                precision=start.precision,
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


def _check_selects(recipe: Recipe, what: str) -> None:
    """Before anything is aligned: whether the stage `select` runs at all.

    Raises:
        UserError: with the reason.
    """
    if "select" in recipe.stages:
        return
    why = "set select.enabled=true"
    if not recipe.student.converts:
        why = f"the recipe {recipe.name} converts no layer, so that none is to choose"
    raise UserError(f"{what} needs the stage select: {why}")
