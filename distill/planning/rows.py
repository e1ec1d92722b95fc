"""Rows a forward pass, where the recipe leaves them to the machine: as many as pay and fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from ltconvert.distill.planning.memory import stage_memory
from ltconvert.distill.planning.models import Models
from ltconvert.distill.processes import all_values, rank_and_world
from ltconvert.distill.records import RECIPE_FILE
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import STAGES, TrainSettings

# More tokens at a time bring no more speed: a GPU is busy with so many, a CPU with far fewer.
ENOUGH_TOKENS = {"cuda": 65_536, "cpu": 2048}
SHARE_OF_MEMORY = 0.85


def choose_rows(
    recipe: Recipe, models: Models, precision: str, device: str, free_bytes: int
) -> dict[str, int]:
    """Rows of every training stage, also of those that this run leaves to a later one.

    Those that the recipe names are taken as they are. A choice divides the rows of an optimiser
    step, so that the step stays as long as it was asked.
    """
    rows: dict[str, int] = {}
    for stage in STAGES:
        settings = getattr(recipe, stage)
        if not isinstance(settings, TrainSettings) or (stage == "loop" and not models.ties):
            continue
        rows[stage] = settings.rows_at_once
        if settings.micro_batch_rows is None:
            for count in _choices(settings, device):
                more = with_rows(recipe, {stage: count})
                peak = sum(stage_memory(stage, more, models, precision, device).values())
                if peak > SHARE_OF_MEMORY * free_bytes:
                    break
                rows[stage] = count
    return rows


def _choices(settings: TrainSettings, device: str) -> list[int]:
    """Divisors of one process's rows a step, from 1 up to where more brings nothing."""
    step = max(1, settings.batch_tokens // settings.seq_len_tokens // rank_and_world()[1])
    most = ENOUGH_TOKENS.get(device, ENOUGH_TOKENS["cuda"]) // settings.seq_len_tokens
    return [count for count in range(1, min(step, most) + 1) if step % count == 0]


def agreed_rows(rows: Mapping[str, int]) -> dict[str, int]:
    """Rows that fit every process of a run: GPUs may differ, or hold something else as well.

    The smallest of a stage, which divides a step's rows as each of them does.
    """
    everyone = all_values(rows)
    return {stage: min(each[stage] for each in everyone) for stage in rows}


def with_rows(recipe: Recipe, rows: Mapping[str, int]) -> Recipe:
    """The recipe with these rows a stage."""
    changed = {
        stage: getattr(recipe, stage).model_copy(update={"micro_batch_rows": count})
        for stage, count in rows.items()
    }
    return recipe.model_copy(update=changed)


def recorded_rows(recipe: Recipe, run_dir: Path) -> dict[str, int]:
    """What a run that has begun chose for stages whose rows the recipe leaves open.

    Raises:
        UserError: the run's recipe cannot be read.
    """
    path = run_dir / RECIPE_FILE
    if not path.is_file():
        return {}
    try:
        then = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, TypeError, ValueError):
        raise UserError(f"{path} is damaged; choose another output folder") from None
    found: dict[str, int] = {}
    for stage in STAGES:
        settings = getattr(recipe, stage)
        if isinstance(settings, TrainSettings) and settings.micro_batch_rows is None:
            count = (then.get(stage) or {}).get("micro_batch_rows")
            found |= {stage: count} if count else {}
    return found
