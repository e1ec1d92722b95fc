"""What tells the user's own lm-eval tasks from what they were before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ltconvert.distill.evaluation.task_files import absolute_data, folders_and_files, read_task
from ltconvert.errors import UserError

SUFFIXES = (".yaml", ".yml", ".py")


def own_content(tasks: Sequence[str], include_path: str | Path | None) -> str | None:
    """A digest of the user's task files, the code beside them and their local data.

    None where all tasks are lm-eval's or ours, or where a file is gone.
    """
    try:
        folders, files = folders_and_files(tasks, include_path)
        found = [path for folder in folders for path in _sources(folder.rglob("*"))]
        found += [path for file in files for path in _sources(file.parent.iterdir())]
        found += [path for source in found for path in _data(source)]
        if not found:
            return None
        digest = hashlib.blake2b(digest_size=12)
        for path in found:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode(errors="replace"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except (OSError, UserError):
        return None
    return digest.hexdigest()


def _sources(paths: Iterator[Path]) -> list[Path]:
    return sorted(path for path in paths if path.suffix in SUFFIXES and path.is_file())


def _data(source: Path) -> list[Path]:
    """The local data files of a task file."""
    config = read_task(source) if source.suffix != ".py" else None
    kwargs = (config or {}).get("dataset_kwargs") or {}
    named = absolute_data(kwargs.get("data_files") or [], source.resolve().parent)
    return [path for path in map(Path, _flat(named)) if path.is_file()]


def _flat(files: Any) -> Iterator[str]:
    if isinstance(files, dict | list):
        for each in files.values() if isinstance(files, dict) else files:
            yield from _flat(each)
    else:
        yield str(files)
