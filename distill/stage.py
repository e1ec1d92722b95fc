"""What the stages share: inputs, results, and the bookkeeping of a run folder.

A stage's folder holds ``stage.json`` (status, what it depends on, scores), ``checkpoint/`` while it
trains, and ``student/`` once it has finished. Everything is written whole, then renamed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert.errors import UserError

if TYPE_CHECKING:
    import torch

    from ltconvert.convert.students.lt2 import LT2ForCausalLM
    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.distill.runlog import RunLog
    from ltconvert.recipes.schema import Recipe

STAGE_FILE = "stage.json"
STUDENT_FOLDER = "student"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass
class StageInputs:
    """What a stage may read.

    Attributes:
        student: the student that the stage before left, on ``device``.
        selection: physical layers that stay full; None before they are chosen.
        precision: ``fp32`` or ``bf16`` (matrix products; weights stay as they are).
        seed: differs from stage to stage, the same in every run of a recipe.
    """

    teacher: Teacher
    recipe: Recipe
    student: LT2ForCausalLM
    selection: list[int] | None
    tokenizer: Any
    run_dir: Path
    log: RunLog
    precision: str
    device: torch.device
    seed: int = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in the run's precision."""
        import torch

        wanted = self.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=wanted)


@dataclass
class StageResult:
    """What a stage leaves: the student, held-out scores, and facts (tokens, steps, seconds, ...)."""

    student: LT2ForCausalLM
    scores: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class StageRecord:
    """The content of a ``stage.json``.

    Attributes:
        depends_on: every setting that the stage's result depends on, nested, and the digest of the
            stage before.
        facts: tokens, steps, seconds and whatever else the stage tells.
        scored_with: settings under which ``scores`` were measured.
    """

    stage: str
    status: str
    depends_on: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    scored_with: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """The stage's result is on disk."""
        return self.status == "finished"

    def write(self, stage_dir: Path) -> None:
        """Write ``stage.json``, whole or not at all."""
        stage_dir.mkdir(parents=True, exist_ok=True)
        write_json(stage_dir / STAGE_FILE, self.__dict__)


def read_record(stage_dir: Path) -> StageRecord | None:
    """The record of a stage's folder, or None when the stage has not begun.

    Raises:
        UserError: the file is there and cannot be understood.
    """
    path = stage_dir / STAGE_FILE
    if not path.exists():
        return None
    try:
        return StageRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; delete the folder {stage_dir} to run this stage again") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a neighbour, then rename: a reader never sees half a file."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field that differs, as (dotted name, value then, value now), or None."""
    # Through JSON, so that a tuple and the list it was stored as are equal.
    before, after = (flatten(json.loads(json.dumps(x))) for x in (then, now))
    for name in [*after, *(name for name in before if name not in after)]:
        if before.get(name) != after.get(name):
            return name, before.get(name), after.get(name)
    return None


def check_same_run(run_dir: Path, stage: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue a stage that was begun under other settings.

    Raises:
        UserError: names the field that changed, its value then and now.
    """
    difference = first_difference(then, now)
    if difference is None:
        return
    name, before, after = difference
    if name.startswith("teacher."):
        before, after, name = then["teacher"], now["teacher"], "teacher"
        before, after = (f"{x['name']} ({str(x['digest'])[:12]})" for x in (before, after))
    raise UserError(
        f"{run_dir} holds a run whose stage {stage} was made with {name} = {before}, this call asks for {after}: "
        "set it back, or choose another output folder"
    )


@contextmanager
def clear_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line; what is already on disk stays whole.

    Raises:
        UserError: in place of the error of the file system.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.EFBIG):
            raise
        reason = os.strerror(error.errno)
    except Exception as error:
        # safetensors and torch.save report a full disk with exceptions of their own.
        reason = _disk_reason(error)
        if reason is None:
            raise
    else:
        return
    raise UserError(
        f"cannot write to {run_dir}: {reason}; free space or choose another folder, then repeat the call: "
        "it continues from the last checkpoint"
    )


def _disk_reason(error: Exception) -> str | None:
    """The file system's complaint inside an exception that is no OSError, if there is one."""
    text = str(error)
    if "os error 28" in text or "PytorchStreamWriter failed writing" in text:
        return os.strerror(errno.ENOSPC)
    if "os error 13" in text:
        return os.strerror(errno.EACCES)
    return None
