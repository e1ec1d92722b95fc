"""How a model is named on the command line, and what a run of it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltconvert.errors import UserError


def student_folder(reference: str) -> str:
    """`reference`, or the finished student inside it when it is a run folder.

    Raises:
        UserError: a run folder whose student is not there yet.
    """
    folder = Path(reference)
    if not _is_run(folder):
        return reference
    if (folder / "student" / "config.json").is_file():
        return str(folder / "student")
    raise UserError(
        f"{reference} is a run folder without a finished student; repeat its distill command"
    )


def run_of(student: Path) -> Path | None:
    """The run folder that a student's folder stands in, None outside of one."""
    return student.parent if student.name == "student" and _is_run(student.parent) else None


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.resolved.yaml").is_file()


def own_teacher(provenance: Mapping[str, Any]) -> str | None:
    """The reference of the teacher that a student was made from, None when it is not known."""
    from ltconvert.convert.teachers.packaged import PACKAGED

    teacher = provenance.get("teacher") or {}
    return teacher.get("name") if teacher.get("name") in PACKAGED else teacher.get("source")


def short_name(reference: str) -> str:
    """The last part of a folder, file or hub id, fit for the name of a folder."""
    return reference.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
