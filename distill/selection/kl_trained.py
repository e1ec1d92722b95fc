"""Method ``kl``: make one layer full in the linear student, distil briefly, rank by the last KL.

The method of fla-org/hybrid-distillation ("GA-S2", arXiv 2512.20569). Every layer sees the same
rows in the same order, so that KLs are compared pairwise. A layer's training is measured in parts
of equal length, and the mean KL of the last part is its score.

A layer stops early once it has been outside the chosen set, as far as it is known, for
``stable_rounds`` parts in a row: so the likely ones, by a forward-only look at one batch, go first.
Nothing but the scores is kept; a killed selection repeats the layer it was at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from ltconvert.distill.optim import plan_steps
from ltconvert.distill.processes import all_values, rank_and_world
from ltconvert.distill.selection import kl_fast
from ltconvert.distill.selection.probe import Probe, Stopwatch
from ltconvert.distill.selection.ranking import order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.short_training import POINTS, short_settings, train_layer

Curves = dict[int, list[float]]  # by layer: mean KL a token in each finished part of its training


def rank(probe: Probe) -> Scores:
    """Train with each layer restored in turn; see the module's text."""
    state = probe.progress.state
    cost = Cost(**state.get("cost", {}))
    curves: Curves = {int(layer): kls for layer, kls in state.get("curves", {}).items()}
    history, watch = state.get("history", []), Stopwatch(cost.seconds)
    settings, steps = short_settings(probe.inputs.recipe.logits, probe.settings)
    step_tokens = plan_steps(settings, rank_and_world()[1]).step_tokens
    points = min(POINTS, steps)
    queue = all_values(state.get("queue") or likely_first(probe, cost))[0]  # all train the same
    for layer in queue[len(curves) :]:
        give_up = partial(
            outside,
            others=list(curves.values()),
            keep=probe.keep,
            stable_rounds=probe.settings.stable_rounds,
        )
        curves[layer] = train_layer(probe, layer, settings, steps, points, give_up)
        cost.trained_tokens += math.ceil(len(curves[layer]) * steps / points) * step_tokens
        history.append(sorted(ranked(curves)[: probe.keep]))
        cost.seconds = watch.seconds
        probe.progress.save(
            {
                "queue": queue,
                "curves": curves,
                "history": history,
                "cost": asdict(cost),
            }
        )
    layers = range(probe.num_layers)
    return Scores(
        columns={
            "kl": [curves[layer][-1] for layer in layers],
            "trained_share": [len(curves[layer]) / points for layer in layers],
        },
        ranking=ranked(curves),
        main="kl",
        higher_is_better=False,
        history=history,
        stopped_early=any(len(curve) < points for curve in curves.values()),
        facts={"curves": [curves[layer] for layer in layers], "order": queue},
        cost=cost,
    )


def ranked(curves: Mapping[int, list[float]]) -> list[int]:
    """Layers that trained longer come first (the rest were given up), then the lower last KL."""
    return sorted(curves, key=lambda layer: (-len(curves[layer]), curves[layer][-1], layer))


def likely_first(probe: Probe, cost: Cost) -> list[int]:
    """All layers by what they gain untrained on one batch: the order in which they are trained."""
    sums = kl_fast.Sums()
    settings = probe.settings.model_copy(update={"direction": "restore"})
    looking = replace(probe, settings=settings)
    with probe.bar(probe.num_layers) as bar:
        kl_fast.score_batch(looking, probe.batches[0], sums, cost, bar)
    return order(sums.columns()["gain"])


def outside(
    kl: Sequence[float], others: Sequence[Sequence[float]], keep: int, stable_rounds: int
) -> bool:
    """Whether ``keep`` others were better in each of the last ``stable_rounds`` parts."""
    if len(kl) < stable_rounds:
        return False
    return all(
        sum(len(other) > part and other[part] <= kl[part] for other in others) >= keep
        for part in range(len(kl) - stable_rounds, len(kl))
    )
