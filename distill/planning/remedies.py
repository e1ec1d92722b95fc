"""Which setting makes a stage fit that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ltconvert.recipes.schema import Recipe, SelectSettings

SHORTEST_ROW = 256


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
    if stage == "select" and recipe.select.method != "kl":
        yield from _lighter_scoring(recipe.select)
        return
    # The short distillation of select.method=kl takes its settings from the stage logits.
    section = "logits" if stage == "select" else stage
    settings = getattr(recipe, section)
    if settings.micro_batch_rows > 1:
        yield section, "micro_batch_rows", 1
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
    while settings.method != "recall" and tokens // 2 >= settings.seq_len_tokens:
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
