"""Disk of each stage, at its fullest. Students and checkpoints are fp32."""

from __future__ import annotations

from ltconvert.distill.planning.models import Models
from ltconvert.recipes.schema import Recipe

_CHECKPOINT_BYTES = 12  # a weight and AdamW's two moments
_WEIGHT_BYTES = 4


def stage_disk(stage: str, recipe: Recipe, models: Models) -> int:
    """What the stage itself writes at most: two checkpoints for a moment, then its student."""
    if stage == "select":
        return 1 << 20
    if stage == "align":
        trained, student = models.aligned_parameters, models.linear.parameters
        layers = recipe.align.layers_at_once
        if layers is not None and models.converted:
            # Each finished group keeps its checkpoint; the one at work may have two.
            trained = models.aligned_parameters
            one_more = trained * min(layers, len(models.converted)) // len(models.converted)
            return (trained + one_more) * _CHECKPOINT_BYTES + student * _WEIGHT_BYTES
    else:
        trained = student = models.trained_in(stage).parameters
    if stage == "shrink":  # each step keeps its checkpoint; the one at work may have two
        trained = sum(pool.facts.parameters for pool in models.pools)
        one_more = max((pool.facts.parameters for pool in models.pools), default=0)
        return (trained + one_more) * _CHECKPOINT_BYTES + student * _WEIGHT_BYTES
    return 2 * trained * _CHECKPOINT_BYTES + student * _WEIGHT_BYTES


def peak_disk(stages: list[str], recipe: Recipe, models: Models) -> int:
    """The run folder at its fullest: the stage at work beside the students that are kept.

    The looped origin and the aligned student stay, the student of a later stage until the next one
    has finished.
    """
    kept, peak = 0, 0
    for stage in stages:
        peak = max(peak, kept + stage_disk(stage, recipe, models))
        if stage == "loop":
            kept += models.origin.parameters * _WEIGHT_BYTES
        elif stage == "align":
            kept += models.linear.parameters * _WEIGHT_BYTES
        elif stage == "logits":
            kept += models.hybrid.parameters * _WEIGHT_BYTES
        elif stage == "shrink":
            kept += models.trained_in("longctx").parameters * _WEIGHT_BYTES
    return max(peak, kept) + models.hybrid.parameters * _WEIGHT_BYTES
