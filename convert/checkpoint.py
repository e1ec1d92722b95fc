"""Students on disk: transformers' own layout, and their provenance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.errors import UserError, first_line

PROVENANCE = "provenance.json"


def save_student(
    model: LT2ForCausalLM,
    tokenizer: Any | None,
    folder: str | Path,
    provenance: Mapping[str, Any],
    *,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a student whole, then rename: the folder is either the old one or the new one.

    Loads with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` where
    ltconvert is installed, and with ``load_student``.

    Raises:
        UserError: the disk refuses.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        (partial / PROVENANCE).write_text(
            json.dumps(dict(provenance), indent=2, default=str) + "\n"
        )
        replace_folder(partial, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the student to {folder}: {error}; free space or choose another --out"
        ) from error
    return folder


def replace_folder(new: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``; a whole folder is there or beside it always."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it is there, and what an earlier call was killed at; never half of it."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def load_student(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> LT2ForCausalLM:
    """A saved student, in eval mode.

    Args:
        dtype: of the parameters; by default that of the files.

    Raises:
        UserError: the folder holds no student, or its files are broken.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds no student (no config.json); give the folder that `distill` wrote"
        )
    _check_is_student(folder / "config.json")
    try:
        config = LT2Config.from_pretrained(folder)
        loaded: Any = LT2ForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype or "auto", output_loading_info=True
        )
        model, info = loaded
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(f"cannot load the student in {folder}: {first_line(error)}") from error
    except Exception as error:  # safetensors raises a type of its own that derives from Exception
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"broken weights in {folder}: {first_line(error)}") from error
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
    if wrong:
        raise UserError(f"{folder}: {len(wrong)} tensors do not match the config, first {wrong[0]}")
    with torch.no_grad():
        for parameter in model.parameters():
            # Memory-mapped weights are not aligned, and matrix products over them round
            # differently: a resumed run would part from an undisturbed one in the last bit.
            parameter.data = parameter.data.clone()
    return model.to(device).eval()


def _check_is_student(path: Path) -> None:
    """Refuse the folder of another kind of model; damaged files are left to the loader."""
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        return
    if kind != LT2Config.model_type:
        raise UserError(
            f"{path.parent} holds no student of ltconvert but a model of type {kind!r}; "
            "a teacher is named by --teacher"
        )


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """Where a student came from; empty for a folder without that file."""
    path = Path(folder) / PROVENANCE
    return json.loads(path.read_text()) if path.is_file() else {}
