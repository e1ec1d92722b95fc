"""What cannot fit is refused, with the setting that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ltconvert.distill.planning.memory import stage_memory
from ltconvert.distill.planning.models import Models
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import SelectSettings

SHORTEST_ROW = 256


def refuse_memory(
    stage: str, recipe: Recipe, models: Models, precision: str, device: str, free_bytes: int
) -> None:
    """Compare a stage's peak with the memory there is.

    Raises:
        UserError: names the stage, what it needs, what there is, and the setting that would help.
    """

    def needed(changed: Recipe) -> dict[str, int]:
        return stage_memory(stage, changed, models, precision, device)

    parts = needed(recipe)
    if sum(parts.values()) <= free_bytes:
        return
    words = remedy(stage, recipe, lambda changed: sum(needed(changed).values()) <= free_bytes)
    helps = f"it fits with {words}"
    if words is None:
        largest = max(parts, key=lambda name: parts[name])
        helps = (
            f"no setting of the stage is enough (most of it is {largest}): "
            "choose a smaller teacher or a device with more memory"
        )
    raise UserError(
        f"stage {stage} needs about {gib(sum(parts.values()))}, "
        f"{device} has {gib(free_bytes)} free; {helps}"
    )


def refuse_disk(needed_bytes: int, free_bytes: int | None) -> None:
    """Compare the run folder at its fullest with the disk; None: the disk is not known.

    Raises:
        UserError: it does not fit.
    """
    if free_bytes is not None and needed_bytes > free_bytes:
        raise UserError(
            f"the run writes up to {gib(needed_bytes)}, its disk has {gib(free_bytes)} free; "
            "choose an --out folder on a larger disk"
        )


def gib(size: float) -> str:
    """Bytes as `1.5 GiB`, or `12 MiB` below a tenth of that."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"


def remedy(stage: str, recipe: Recipe, fits: Callable[[Recipe], bool]) -> str | None:
    """Words for the command line that make ``fits`` true; the fewest that do, None if none do.

    Single changes are tried first, from the one that alters the result least, then all together.
    """
    changes = list(_changes(stage, recipe))
    for section, name, value in changes:
        if fits(_changed(recipe, [(section, name, value)])):
            return _words([(section, name, value)])
    together: list[tuple[str, str, Any]] = []
    for section, name, value in changes:
        together = [c for c in together if c[:2] != (section, name)] + [(section, name, value)]
        if fits(_changed(recipe, together)):
            return _words(together)
    return None


def _changes(stage: str, recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """(section, setting, value) that save memory, from the least harmful on."""
    if stage == "select" and recipe.select.method not in ("kl", "kl-gates"):
        yield from _lighter_scoring(recipe.select)
        return
    # The short distillation of kl and kl-gates takes its settings from the stage logits.
    section = "logits" if stage == "select" else stage
    settings = getattr(recipe, section)
    rows = settings.rows_at_once
    while rows > 1:
        rows //= 2
        yield section, "micro_batch_rows", rows
    if stage == "align":
        layers = settings.layers_at_once or 1 << 30
        yield from ((section, "layers_at_once", n) for n in (16, 8, 4, 2, 1) if n < layers)
    elif not settings.gradient_checkpointing:
        yield section, "gradient_checkpointing", True
    if stage == "select":
        yield "select", "method", "kl-fast"
    else:
        yield from _shorter(section, settings.seq_len_tokens)


def _lighter_scoring(settings: SelectSettings) -> Iterator[tuple[str, str, Any]]:
    """Smaller batches: fewer tokens in fewer rows at a time; at last no scores at all."""
    yield from _shorter("select", settings.seq_len_tokens)
    tokens = settings.eval_tokens
    while not settings.method.startswith("recall") and tokens // 2 >= settings.seq_len_tokens:
        tokens //= 2
        yield "select", "eval_tokens", tokens
    yield "select", "method", "uniform"


def _shorter(section: str, length: int) -> Iterator[tuple[str, str, Any]]:
    while length // 2 >= SHORTEST_ROW:
        length //= 2
        yield section, "seq_len_tokens", length


def _changed(recipe: Recipe, changes: list[tuple[str, str, Any]]) -> Recipe:
    for section, name, value in changes:
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def _words(changes: list[tuple[str, str, Any]]) -> str:
    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return " ".join(f"--set {section}.{name}={text(value)}" for section, name, value in changes)
