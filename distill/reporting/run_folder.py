"""What a run folder tells, read back from its files; whatever is missing is None or empty."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ltconvert.distill.records import RECIPE_FILE
from ltconvert.errors import UserError
from ltconvert.recipes.stages import STAGES

STAGE_ORDER = ("start", *STAGES)


@dataclass
class RunFolder:
    """Contents of a run folder (or of a folder that only holds an evaluation).

    Attributes:
        owner: ``run.json``: teacher, recipe, precision.
        recipe: ``recipe.resolved.yaml``, as text and parsed.
        metrics: ``metrics.jsonl``: lines of each stage, in the order of their steps.
        stages: ``stages/*/stage.json`` of finished stages, in the order they ran.
        unfinished: names of stages that have begun only.
        selection: ``selection.json`` of the stage ``select``.
        evaluation: ``evaluation.json``.
        provenance: ``student/provenance.json``.
    """

    folder: Path
    owner: dict[str, Any] | None = None
    recipe_text: str | None = None
    recipe: dict[str, Any] | None = None
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    selection: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """A title: the teacher and the recipe, or the folder's name."""
        if self.owner:
            return f"{self.owner.get('teacher')} by {self.owner.get('recipe')}"
        return self.folder.resolve().name

    def part(self, name: str) -> Any | None:
        """The result of one part of the evaluation, None when it was not run."""
        return ((self.evaluation or {}).get("parts") or {}).get(name)

    def model(self, who: str) -> dict[str, Any] | None:
        """Facts of ``teacher`` or ``student`` as the evaluation noted them."""
        return ((self.evaluation or {}).get("models") or {}).get(who)

    @property
    def mixers(self) -> list[str] | None:
        """The student's mixer of each physical layer."""
        student = self.model("student")
        if student is not None:
            return student["mixers"]
        config = _json(self.folder / "student" / "config.json")
        return None if config is None else config.get("mixers")

    @property
    def pools(self) -> dict[str, Any] | None:
        """What the one layer of a Dreamer is made of; None of other students."""
        config = _json(self.folder / "student" / "config.json") or {}
        return config.get("dreamer")

    @property
    def loops(self) -> int:
        """Loops of the student, 1 when not known."""
        for found in (self.model("student"), self.selection):
            if found is not None:
                return int(found.get("loops") or 1)
        return 1

    @property
    def core(self) -> tuple[int, int]:
        """The first layer that is looped, and the one after the last."""
        config = _json(self.folder / "student" / "config.json") or {}
        last = len(self.mixers or []) - int(config.get("coda_layers") or 0)
        return int(config.get("prelude_layers") or 0), last


def read_run(folder: Path) -> RunFolder:
    """Read everything that is there.

    Raises:
        UserError: there is no such folder, or a file in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no run folder {folder}")
    run = RunFolder(folder, owner=_json(folder / "run.json"))
    recipe = folder / RECIPE_FILE
    if recipe.exists():
        run.recipe_text = recipe.read_text(encoding="utf-8")
        run.recipe = yaml.safe_load(run.recipe_text)
    run.metrics = _metrics(folder / "metrics.jsonl")
    records = [_json(path) or {} for path in folder.glob("stages/*/stage.json")]
    records.sort(key=lambda record: _position(record.get("stage", "")))
    run.stages = [record for record in records if record.get("status") == "finished"]
    run.unfinished = [r["stage"] for r in records if r.get("status") == "running"]
    run.selection = _json(folder / "stages" / "select" / "selection.json")
    run.evaluation = _json(folder / "evaluation.json")
    run.provenance = _json(folder / "student" / "provenance.json")
    return run


def _position(stage: str) -> int:
    return STAGE_ORDER.index(stage) if stage in STAGE_ORDER else len(STAGE_ORDER)


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is damaged; delete it and repeat the command that wrote it"
        ) from None


def _metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines by stage; a last line that a kill cut in half is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            found.setdefault(record["stage"], []).append(record)
        except (ValueError, KeyError, TypeError):
            continue
    return found
