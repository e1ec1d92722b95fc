"""What a plan says of the student in words: its kind, and what a person should know of it."""

from __future__ import annotations

from collections import Counter

import torch

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import on_hub
from ltconvert.distill.evaluation.loop_decoding import ways
from ltconvert.distill.planning.models import Models
from ltconvert.recipes.idle import idle_settings
from ltconvert.recipes.schema import Recipe


def kind_of(recipe: Recipe, models: Models) -> str:
    """`LT2`, `MoDA` or `Dreamer`."""
    if recipe.student.kind == "dreamer":
        return "Dreamer"
    return "MoDA" if any(x.mixer == "moda" for x in models.hybrid.layers) else "LT2"


def makeup(recipe: Recipe, models: Models) -> str:
    """Which mixers a student has in how many layers, or what a Dreamer's one layer chooses from."""
    student, layers = recipe.student, models.hybrid.layers
    if student.kind == "dreamer":
        entries, slices = models.spec.num_layers, student.slices
        kind = layers[0].mixer
        own = "" if kind == "full" else f" with {kind} mixers"
        return (
            f"one layer{own} at {sum(x.visits for x in layers)} depths, where a token uses "
            f"{student.top_entries} of {entries} attention projections and "
            f"{student.top_experts} of {entries * slices} experts (slices of an MLP: {slices})"
        )
    counts = Counter(x.mixer for x in layers)
    listed = ", ".join(f"{kind} in {count}" for kind, count in counts.most_common())
    return f"{listed} of {len(layers)} layers"


def notes(recipe: Recipe, teacher_loops: int) -> list[str]:
    """What is allowed and yet hardly meant, a line each."""
    found = idle_settings(recipe, teacher_loops) + _routers_that_do_not_learn(recipe)
    if on_hub(recipe.data):
        found.append(
            f"data.source {recipe.data.source!r} is no file or folder here; it is taken for a hub "
            "data set, which was not looked at"
        )
    return found


def _routers_that_do_not_learn(recipe: Recipe) -> list[str]:
    """One score over its own sum is 1, whatever it is; so it is in the published form, too."""
    student = recipe.student
    if student.kind != "dreamer":
        return []
    shared = " but the shared expert's" if student.shared_size else ""
    lost = f"no gradient{shared}"
    gradients = {"top_entries": "no gradient", "top_experts": lost, "top_schedule": lost}
    return [
        f"student.{name} 1 leaves a single score, which is normalised to 1: its router gets "
        f"{gradient}, and balancing alone moves the choice; 2 or more let it learn"
        for name, gradient in gradients.items()
        if getattr(student, name) == 1 or (name == "top_schedule" and 1 in student.top_schedule)
    ]


def raised_shares(recipe: Recipe, models: Models) -> list[str]:
    """Steps of `shrink` that leave more than their share, since a token uses so many."""
    student, layers, found = recipe.student, models.spec.num_layers, []
    experts = "top_schedule" if student.top_schedule else "top_experts"
    for pool in models.pools:
        asked = round(pool.share * layers)
        parts = (
            ("entries", pool.entries, 1, student.top_entries, "top_entries"),
            ("experts", pool.experts, student.slices, pool.top_experts, experts),
        )
        found += [
            f"student.pool_schedule {pool.share:g} leaves {kept} of {layers * slices} {what} "
            f"({kept / (layers * slices):.0%}), since a token uses {used} (student.{name})"
            for what, kept, slices, used, name in parts
            if kept > asked * slices
        ]
    return found


def check_decoding(recipe: Recipe, models: Models) -> None:
    """Refuse ways of decoding that are to be measured and that the student does not have.

    Raises:
        UserError: which.
    """
    asked = ways(recipe.eval.loop_cache, recipe.eval.exit_thresholds)
    if not asked:
        return
    with torch.device("meta"):
        model = LT2ForCausalLM(models.config)
    for way in asked:
        way.check(model)
