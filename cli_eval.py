"""`ltconvert eval`: a teacher, a student, or both side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_models import own_teacher, run_of, short_name, student_folder
from ltconvert.errors import UserError

if TYPE_CHECKING:
    import torch

    from ltconvert.cli_session import Session
    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.recipes.schema import Recipe


@dataclass(frozen=True)
class Models:
    """What is to be evaluated.

    Attributes:
        teacher: a reference that `load_teacher` takes.
        student: a student's folder.
        run_dir: the run folder that the student stands in.
        provenance: of the student.
    """

    teacher: str | None
    student: Path | None
    run_dir: Path | None
    provenance: Mapping[str, Any]

    @property
    def source(self) -> str | None:
        """The student's folder, as an evaluation notes it."""
        return None if self.student is None else str(self.student.resolve())


def find(teacher: str | None, student: str | None) -> Models:
    """The models that `--teacher` and `--student` name; a student brings its own teacher.

    Raises:
        UserError: neither is given, or the student is no folder.
    """
    if teacher is None and student is None:
        raise UserError("eval needs --teacher, --student or both")
    if student is None:
        return Models(teacher, None, None, {})
    from ltconvert.convert.checkpoint import read_provenance

    folder = Path(student_folder(student))
    if not folder.is_dir():
        raise UserError(f"--student {student}: no such folder; give a student or a run folder")
    provenance = read_provenance(folder)
    return Models(teacher or own_teacher(provenance), folder, run_of(folder), provenance)


def recipe_of(
    models: Models, budget: str | None, options: Mapping[str, Any], overrides: list[str]
) -> Recipe:
    """The student's own recipe, else the defaults, with what the call says laid over it."""
    from ltconvert import recipes
    from ltconvert.recipes.schema import Recipe

    own = models.provenance.get("recipe")
    base = recipes.validate(own, where=f"{models.student}") if own else Recipe(name="eval")
    # Rows that its run chose for its own budget would not fit another's, and nothing trains here.
    sections = base.model_dump().items()
    trained = [name for name, x in sections if isinstance(x, dict) and x.get("micro_batch_rows")]
    base = recipes.adjust(base, options={name: {"micro_batch_rows": None} for name in trained})
    return recipes.adjust(base, budget=budget, options=options, overrides=overrides)


def run(
    session: Session, models: Models, recipe: Recipe, task_path: Path | None, out: Path | None
) -> None:
    """Measure, write `evaluation.json` and the report, print the tables.

    Raises:
        UserError: another teacher than the student's own, and the report would go to its run; the
            folder that nobody named has other models' figures; or another call is at work in it.
    """
    from ltconvert.distill.run_lock import working_in

    folder = out or models.run_dir or default_out(models)
    with working_in(folder):
        _measure(session, models, recipe, task_path, folder, named=out is not None)


def _measure(
    session: Session,
    models: Models,
    recipe: Recipe,
    task_path: Path | None,
    folder: Path,
    *,
    named: bool,
) -> None:
    from ltconvert.convert.checkpoint import load_student
    from ltconvert.distill.evaluate import evaluate
    from ltconvert.distill.report import build_report, show_evaluation
    from ltconvert.distill.runlog import RunLog

    device = session.device()
    session.choose_kernels(device)
    precision, reason = session.precision(device, models.run_dir)
    log = RunLog(None, json=session.json)
    log.say(f"device: {device}, precision: {precision} ({reason})")
    teacher = _teacher(models, device)
    _check_place(folder, models, teacher, named=named)
    student = load_student(models.student, device=device) if models.student else None
    found = evaluate(
        teacher,
        student,
        teacher.tokenizer if teacher else _tokenizer(models),
        recipe.eval,
        data=recipe.data,
        folder=folder,
        log=log,
        precision=precision,
        seed=recipe.seed,
        include_path=task_path,
        student_source=models.source,
    )
    build_report(folder)
    if session.json:
        output.print_json(found | {"folder": folder})
        return
    output.print_line(show_evaluation(folder))
    output.print_line(f"report: {folder / 'report.md'} and {folder / 'report.html'}")


def _teacher(models: Models, device: torch.device) -> Teacher | None:
    """The teacher, if one is known.

    Raises:
        UserError: it is not there; of the student's own one how to name another.
    """
    from ltconvert.convert.teachers.load import load_teacher

    if models.teacher is None:
        return None
    try:
        return load_teacher(models.teacher, device=device)
    except UserError as error:
        if models.teacher != own_teacher(models.provenance):
            raise
        raise UserError(
            f"the teacher that {models.student} records cannot be loaded: {error}; name it with "
            "--teacher"
        ) from error


def default_out(models: Models) -> Path:
    """Where the report of models outside a run folder goes."""
    path = models.student
    if path is not None and path.name == "student":
        path = path.resolve().parent
    return Path("runs") / f"eval-{short_name(str(path or models.teacher))}"


def _check_place(folder: Path, models: Models, teacher: Teacher | None, *, named: bool) -> None:
    """Refuse to put figures in place of other models', but in a folder that the call names."""
    from ltconvert.distill.evaluate import read_evaluation

    digest = None if teacher is None else teacher.digest
    if folder == models.run_dir:
        own = models.provenance.get("teacher") or {}
        if teacher is not None and own.get("digest", digest) != digest:
            raise UserError(
                f"{folder} holds a student of {own.get('name')}; its evaluation beside "
                f"{teacher.name} would take the place of that beside its own teacher: give another "
                "folder with --out"
            )
    elif not named:
        measured = (read_evaluation(folder) or {}).get("models", {})
        for who, what, now in (("student", "source", models.source), ("teacher", "digest", digest)):
            then = measured.get(who, {})
            if now is not None and then.get(what, now) != now:
                raise UserError(
                    f"{folder} holds the evaluation of another {who}, {then.get('source')}; give "
                    "another folder with --out, or delete it"
                )


def _tokenizer(models: Models) -> Any:
    """The tokenizer saved beside a student whose teacher is not known."""
    from ltconvert.convert.teachers.tokenizers import folder_tokenizer

    assert models.student is not None
    tokenizer = folder_tokenizer(models.student)
    if tokenizer is None:
        raise UserError(f"{models.student} has no tokenizer; name its teacher with --teacher")
    return tokenizer
