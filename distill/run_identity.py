"""What a stage's result depends on, and whether a run folder's content still fits it.

Each stage depends on its own settings and on the stage before, back to the start, which depends on
the teacher, the student, the data and its content, the seed and the precision. What changes no
result (when to write checkpoints, what to measure) is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert.distill.data.content import CONTENT
from ltconvert.distill.precision import pick_precision
from ltconvert.distill.processes import all_values, is_main_process, wait_for_everyone
from ltconvert.distill.records import write_json
from ltconvert.errors import UserError

if TYPE_CHECKING:
    import torch

    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.recipes.schema import Recipe

RUN_FILE = "run.json"
# Recomputed activations are the same activations, and checkpoints only say what is on disk.
NEUTRAL = ("enabled", "checkpoint_minutes", "gradient_checkpointing")


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


def first_difference(
    then: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """The first field that differs, as (dotted name, value then, value now), or None."""
    # Through JSON, so that a tuple and the list it was stored as are equal.
    before, after = (flatten(json.loads(json.dumps(x))) for x in (then, now))
    for name in [*after, *(name for name in before if name not in after)]:
        if before.get(name) != after.get(name):
            return name, before.get(name), after.get(name)
    return None


def check_same_run(
    run_dir: Path, stage: str, then: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Refuse to continue a stage that was begun under other settings.

    Raises:
        UserError: names the field that changed, its value then and now; or the data source whose
            content did.
    """
    difference = first_difference(then, now)
    if difference is None:
        return
    name, before, after = difference
    section, _, field = name.rpartition(".")
    if field == CONTENT:
        raise UserError(
            f"{run_dir} holds a run on another text: the content of data.source "
            f"{flatten(now)[f'{section}.source']!r} has changed since; put the old text back, or "
            "choose another output folder"
        )
    raise UserError(
        f"{run_dir} holds a run whose stage {stage} was made with {name} = {before}, "
        f"this call asks for {after}: set it back, or choose another output folder"
    )


def owner_of(recipe: Recipe, teacher: Teacher, precision: str) -> dict[str, Any]:
    """What a run folder belongs to."""
    return {
        "teacher": teacher.name,
        "teacher digest": teacher.digest,
        "recipe": recipe.name,
        "precision": precision,
    }


def teacher_identity(teacher: Teacher, then: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a run notes of its teacher; the same weights have the name that it began with."""
    same = then is not None and then.get("digest") == teacher.digest
    return {"name": then["name"] if then and same else teacher.name, "digest": teacher.digest}


def check_owner(run_dir: Path, now: Mapping[str, Any]) -> None:
    """Refuse a run folder that another run has claimed.

    Raises:
        UserError: it belongs to another teacher, recipe or precision.
    """
    then = _read_owner(run_dir / RUN_FILE)
    if then is not None and then.get("teacher digest") == now["teacher digest"]:
        now = {**now, "teacher": then.get("teacher")}  # a name is where it lies, not what it is
    difference = first_difference(now if then is None else then, now)
    if difference is not None:
        name, before, after = difference
        raise UserError(
            f"{run_dir} holds a run with {name} {before}, this call asks for {after}: "
            "choose another output folder"
        )


def claim_for(
    folder: Path, stage: str, identify: Callable[[Mapping[str, Any] | None], Mapping[str, Any]]
) -> None:
    """Note in a folder what work it is for; refuse one that was begun for other work.

    Args:
        identify: gives all that the work depends on, told what the folder notes (None: nothing).

    Raises:
        UserError: see ``check_same_run``, or the note is damaged.
    """
    path = folder / RUN_FILE
    then = _read_owner(path)
    now = identify(then)
    if then is not None:
        check_same_run(folder, stage, then, now)
    wait_for_everyone()
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, now)


def claim(run_dir: Path, now: Mapping[str, Any]) -> None:
    """Make a run folder and note whose it is; all processes have checked it before."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / RUN_FILE).exists():
        write_json(run_dir / RUN_FILE, now)


def _recorded_precision(run_dir: Path) -> str | None:
    """The precision that the folder's run began with, None in a new folder."""
    owner = _read_owner(run_dir / RUN_FILE)
    return None if owner is None else owner.get("precision")


def precision_of_run(
    device: torch.device, run_dir: Path | None, requested: str = "auto"
) -> tuple[str, str]:
    """(`fp32` or `bf16`, why): as requested; for ``auto`` that of the folder's run, so that its
    figures are comparable, or else the faster one, which is measured. The first process decides.

    Raises:
        UserError: see ``pick_precision``, or the folder's record is damaged.
    """
    recorded = _recorded_precision(run_dir) if run_dir and requested == "auto" else None
    if recorded is not None:
        return recorded, "as the run began"
    return all_values(pick_precision(device, requested))[0]


def _read_owner(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        raise UserError(f"{path} is damaged; choose another output folder") from None


def chain(
    recipe: Recipe,
    teacher: Mapping[str, Any],
    precision: str,
    stages: Sequence[str],
    data: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """What the start and each stage depend on; each holds the fingerprint of the one before.

    Args:
        teacher, data: of ``teacher_identity`` and ``data_identity``, in the words of the run if it
            has begun.
    """
    student = recipe.student.model_dump(mode="json")
    count = student.pop("full_layers")
    listed = {"full_layers": count} if isinstance(count, list | str) else {}
    depends_on = {
        "start": {
            "teacher": dict(teacher),
            "precision": precision,
            "seed": recipe.seed,
            "student": student | listed,
            "data": dict(data),
        }
    }
    before = depends_on["start"]
    for stage in stages:
        settings = getattr(recipe, stage).model_dump(mode="json")
        own: dict[str, Any] = {stage: {k: v for k, v in settings.items() if k not in NEUTRAL}}
        if stage == "select":
            own["student"] = {"full_layers": count}
        before = depends_on[stage] = own | {"after": fingerprint(before)}
    return depends_on


def fingerprint(value: Mapping[str, Any]) -> str:
    """A short hash of nested plain values."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
