"""Finding lm-eval tasks: ours, the user's own files, and those that lm-eval brings, by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ltconvert.distill.evaluation.offline_tasks import FOLDER
from ltconvert.errors import UserError, first_line


def load_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> list[Any]:
    """lm-eval's Task and Group objects, data sets read.

    Args:
        tasks: names (tasks, groups or tags), ``.yaml`` files, or folders of them (all their tasks).
        include_path: another folder whose tasks are known by name.

    Raises:
        UserError: an unknown name, a broken file, or data that cannot be had; one line each.
    """
    names, files, manager, folders = _find(tasks, include_path)
    own = [folder.resolve() for folder in folders[1:]]
    loaded = []
    for name in names:
        path = manager.task_index[name].yaml_path
        mine = path is not None and _inside(path, own) and _is_task(path)
        loaded += _load(manager, path if mine else name)
    for path in files:
        loaded += _load(manager, path)
    return loaded


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> None:
    """Refuse an unknown task before anything runs; no data is read.

    Raises:
        UserError: an unknown name, or a file or folder that is not there.
    """
    _find(tasks, include_path)


def _find(
    tasks: Sequence[str], include_path: str | Path | None
) -> tuple[list[str], list[Path], Any, list[Path]]:
    """``(names, files, lm-eval's TaskManager, folders)``; the first folder is ours."""
    from lm_eval.tasks import TaskManager

    folders = [FOLDER] + ([_folder(include_path)] if include_path else [])
    names, files = _sort_out(tasks, folders)
    manager = TaskManager(include_path=folders, include_defaults=False)
    unknown = set(names) - set(manager.all_tasks)
    if any(not name.startswith("ltconvert_") for name in unknown):
        # Thousands of files: seconds, so only where a name may be among them.
        manager = TaskManager(include_path=folders, include_defaults=True)
    _check_names(names, manager.all_tasks)
    return names, files, manager, folders


def folders_and_files(
    tasks: Sequence[str], include_path: str | Path | None
) -> tuple[list[Path], list[Path]]:
    """The user's own folders of tasks, and task files.

    Raises:
        UserError: one of them is not there.
    """
    folders = [_folder(include_path)] if include_path else []
    _, files = _sort_out(tasks, folders)
    return folders, files


def _sort_out(tasks: Sequence[str], folders: list[Path]) -> tuple[list[str], list[Path]]:
    """Names, and files that the user points at; folders are added to ``folders``."""
    names: list[str] = []
    files: list[Path] = []
    for task in tasks:
        path = Path(task).expanduser()
        if path.is_dir() and (os.sep in task or _yaml_files(path)):
            found = _names_in(path)
            if not found:
                raise UserError(f"{path} holds no lm-eval task (.yaml files with a `task:` name)")
            folders.append(path)
            names += found
        elif path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise UserError(f"no task file {path}")
            files.append(path)
        else:
            names.append(task)
    return list(dict.fromkeys(names)), list(dict.fromkeys(files))


def _folder(include_path: str | Path) -> Path:
    folder = Path(include_path).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {folder} with task files")
    return folder


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.yaml"))


def _names_in(folder: Path) -> list[str]:
    """The groups of a folder, and its tasks that are in none of them."""
    configs = [config for path in _yaml_files(folder) if (config := read_task(path))]
    groups = [config for config in configs if "group" in config]
    grouped = {_member(member) for config in groups for member in _listed(config.get("task"))}
    names = [config["group"] for config in groups if config["group"] not in grouped]
    tasks = [c["task"] for c in configs if "group" not in c and isinstance(c.get("task"), str)]
    return names + [name for name in tasks if name not in grouped]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _member(member: Any) -> Any:
    return member.get("task", member.get("group")) if isinstance(member, dict) else member


def read_task(path: Path, *, functions: bool = False) -> dict[str, Any] | None:
    """A task file with its includes merged, or None when it is none."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        return load_yaml(path, resolve_func=functions)
    except Exception:
        return None


def _is_task(path: Path) -> bool:
    config = read_task(path)
    return config is not None and "group" not in config and "class" not in config


def _inside(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in folders)


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"near names: {', '.join(near)}" if near else "see `lm_eval ls tasks`"
        raise UserError(
            f"unknown task {name!r}; {hint}; a file of your own is given by its path (my_task.yaml)"
        )


def _load(manager: Any, spec: str | Path) -> list[Any]:
    """Task and Group objects of one name or file.

    Raises:
        UserError: the file cannot be understood or its data cannot be had.
    """
    named = spec if isinstance(spec, str) else _with_absolute_data(spec)
    try:
        loaded = manager.load([named])
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise UserError(f"task {str(spec)!r}: {reason}") from error
    groups = loaded.get("groups", {})
    members = {member for group in groups.values() for member in group.child_names}
    top = [group for name, group in groups.items() if name not in members]
    return top or list(loaded["tasks"].values())


def _with_absolute_data(path: Path) -> dict[str, Any] | str:
    """A user's task with its data files found beside it, where they are not found from here."""
    config = read_task(path, functions=True)
    if config is None or "task" not in config or "group" in config:
        return str(path)
    kwargs = config.get("dataset_kwargs") or {}
    if "data_files" in kwargs:
        kwargs = kwargs | {"data_files": absolute_data(kwargs["data_files"], path.resolve().parent)}
        config["dataset_kwargs"] = kwargs
    return config


def absolute_data(files: Any, folder: Path) -> Any:
    """A task's ``data_files``, those that are found beside it alone with their whole path."""
    if isinstance(files, dict):
        return {split: absolute_data(value, folder) for split, value in files.items()}
    if isinstance(files, list):
        return [absolute_data(value, folder) for value in files]
    beside = folder / str(files)
    return str(beside) if not Path(files).exists() and beside.exists() else files


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _reason(error: Exception) -> str | None:
    """Why a task does not load, where a person can mend it; else None."""
    offline = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout"}
    names = {type(cause).__name__ for cause in _causes(error)}
    first = first_line(error)
    if isinstance(error, UserError):
        return first
    if names & offline or any(isinstance(cause, ConnectionError) for cause in _causes(error)):
        return (
            "its data set is on the Hugging Face hub, which cannot be reached; go online (and "
            "unset HF_HUB_OFFLINE), or use ltconvert_offline or task files with local data"
        )
    if names & {"DatasetNotFoundError", "RepositoryNotFoundError", "GatedRepoError"}:
        return f"the hub does not give its data set: {first}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"not a YAML file: {error.problem} in line {error.problem_mark.line + 1}"
    if isinstance(error, FileNotFoundError):
        return f"its data is not there: {first}"
    if isinstance(error, ValueError | KeyError | TypeError | ImportError | AttributeError):
        return f"lm-eval cannot load it: {first}"
    return None
