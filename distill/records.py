"""The bookkeeping of a run folder: one ``stage.json`` a stage, written whole, then renamed."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ltconvert.errors import UserError

STAGE_FILE = "stage.json"
RECIPE_FILE = "recipe.resolved.yaml"
_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
}


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

    def history(self) -> dict[str, Any]:
        """What a student's provenance says of a finished stage."""
        return {"facts": self.facts, "scores": self.scores, "versions": self.versions}

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
        raise UserError(
            f"{path} is damaged; delete the folder {stage_dir} to run this stage again"
        ) from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON whole, see ``write_whole``."""
    write_whole(path, json.dumps(value, indent=1))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to a neighbour, then rename: a reader never sees half a file."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as stream:
        # A folder whose name is not UTF-8 must not cost a run its report.
        data = content.encode(errors="replace") if isinstance(content, str) else content
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    packages = ("ltconvert", "torch", "transformers")
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in packages
    }


@contextmanager
def clear_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line; what is already on disk stays whole.

    Raises:
        UserError: in place of the error of the file system.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _disk_reason(error, run_dir)
        if reason is None:
            raise
        raise UserError(
            f"cannot write to {run_dir}: {reason}; free space or choose another folder, then "
            "repeat the call: it continues from the last checkpoint"
        ) from error


def _disk_reason(error: Exception, run_dir: Path) -> str | None:
    """The file system's complaint about ``run_dir`` inside an exception, if there is one."""
    if isinstance(error, OSError):
        where = Path(str(error.filename or run_dir)).absolute()
        ours = where.is_relative_to(run_dir.absolute())
        return os.strerror(error.errno) if ours and error.errno in _REFUSALS else None
    # safetensors and torch.save report a full disk with exceptions of their own.
    text = str(error)
    if "os error 28" in text or "PytorchStreamWriter failed writing" in text:
        return os.strerror(errno.ENOSPC)
    return os.strerror(errno.EACCES) if "os error 13" in text else None
