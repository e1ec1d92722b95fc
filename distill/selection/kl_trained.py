"""Method ``kl``: make one layer full in the linear student, distil briefly, rank by the last KL.

The method of fla-org/hybrid-distillation ("GA-S2"). Every layer sees the
same rows in the same order, so that KLs are compared pairwise. A layer's training is measured in
``POINTS`` parts of equal length, and the mean KL of the last part is its score.

A layer stops early once it has been outside the chosen set, as far as it is known, for
``stable_rounds`` parts in a row: so the likely ones, by a forward-only look at one batch, go first.
Nothing but the scores is kept; a killed selection repeats the layer it was at.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ltconvert.convert.transfer import restore_full
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.processes import rank_and_world
from ltconvert.distill.selection import kl_fast
from ltconvert.distill.selection.probe import Probe, Stopwatch
from ltconvert.distill.selection.ranking import order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.trainer import plan_steps
from ltconvert.errors import UserError
from ltconvert.recipes.schema import LogitsSettings, SelectSettings

POINTS = 10


class LayerDone(Exception):
    """Raised inside the training loop: the layer is measured, nothing of its weights is needed."""


@dataclass
class Curve:
    """Mean KL a token in each finished part of a layer's training."""

    kl: list[float] = field(default_factory=list)


def rank(probe: Probe) -> Scores:
    """Train with each layer restored in turn; see the module's text."""
    state = probe.progress.state
    cost = Cost(**state.get("cost", {}))
    curves = {int(layer): Curve(kl) for layer, kl in state.get("curves", {}).items()}
    history, watch = state.get("history", []), Stopwatch(cost.seconds)
    settings, steps = short_settings(probe.inputs.recipe.logits, probe.settings)
    step_tokens = plan_steps(settings, rank_and_world()[1]).step_tokens
    points = min(POINTS, steps)
    queue = state.get("queue") or likely_first(probe, cost)
    for layer in queue[len(curves) :]:
        curves[layer] = train_layer(probe, layer, settings, steps, points, list(curves.values()))
        cost.trained_tokens += math.ceil(len(curves[layer].kl) * steps / points) * step_tokens
        history.append(sorted(ranked(curves)[: probe.keep]))
        cost.seconds = watch.seconds
        probe.progress.save(
            {
                "queue": queue,
                "curves": {layer: curve.kl for layer, curve in curves.items()},
                "history": history,
                "cost": asdict(cost),
            }
        )
    layers = range(probe.num_layers)
    return Scores(
        columns={
            "kl": [curves[layer].kl[-1] for layer in layers],
            "trained_share": [len(curves[layer].kl) / points for layer in layers],
        },
        ranking=ranked(curves),
        main="kl",
        higher_is_better=False,
        history=history,
        stopped_early=any(len(curve.kl) < points for curve in curves.values()),
        facts={"curves": [curves[layer].kl for layer in layers], "order": queue},
        cost=cost,
    )


def ranked(curves: Mapping[int, Curve]) -> list[int]:
    """Layers that trained longer come first (the rest were given up), then the lower last KL."""
    return sorted(curves, key=lambda layer: (-len(curves[layer].kl), curves[layer].kl[-1], layer))


def likely_first(probe: Probe, cost: Cost) -> list[int]:
    """All layers by what they gain untrained on one batch: the order in which they are trained."""
    sums = kl_fast.Sums()
    settings = probe.settings.model_copy(update={"direction": "restore"})
    looking = copy.copy(probe)
    looking.settings = settings
    with probe.bar(probe.num_layers) as bar:
        kl_fast.score_batch(looking, probe.batches[0], sums, cost, bar)
    return order(sums.columns()["gain"])


def short_settings(full: LogitsSettings, select: SelectSettings) -> tuple[LogitsSettings, int]:
    """Settings of the short distillation, and its steps.

    As in the stage `logits`, but at a constant rate from the first step on, on rows of
    ``select.seq_len_tokens`` and in steps small enough for every part to have one. The budget is
    one step more than is trained: the layer ends at the beginning of that step, which saves
    writing a checkpoint that nobody reads.
    """
    row = select.seq_len_tokens
    rows = max(1, full.micro_batch_rows * full.seq_len_tokens // row)
    batch = min(full.batch_tokens, max(row, select.train_tokens // POINTS))
    settings = full.model_copy(
        update={
            "seq_len_tokens": row,
            "micro_batch_rows": min(rows, max(1, batch // row)),
            "batch_tokens": batch,
            "schedule": "constant",
            "warmup_share": 0.0,
            "loop_warmup_share": 0.0,
            "checkpoint_minutes": 1e9,
            "budget_tokens": select.train_tokens,
        }
    )
    plan = plan_steps(settings, rank_and_world()[1])
    budget = (plan.steps + 1) * plan.step_tokens
    return settings.model_copy(update={"budget_tokens": budget}), plan.steps


class MeasuredObjective(LogitsObjective):
    """The objective of `logits` that notes the KL of each part and ends when the layer is measured.

    Args:
        steps: optimiser steps to train.
        points: parts to measure.
        give_up: asked after every part, with the KLs so far.
    """

    def watch(self, steps: int, points: int, give_up: Callable[[list[float]], bool]) -> None:
        """Begin to measure."""
        self.curve = Curve()
        self._steps, self._points, self._give_up = steps, points, give_up
        self._part: list[Tensor] = []

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """As in the parent; raises LayerDone where the layer ends."""
        step = round(progress * (self._steps + 1))
        while step * self._points >= (len(self.curve.kl) + 1) * self._steps:
            self._close_part()
        metrics = super().train_step(batch, backward, progress)
        self._part.append(metrics["kl"].double())
        return metrics

    def _close_part(self) -> None:
        self.curve.kl.append(_mean_over_processes(torch.stack(self._part).mean()))
        self._part = []
        if len(self.curve.kl) == self._points or self._give_up(self.curve.kl):
            raise LayerDone


def train_layer(
    probe: Probe,
    layer: int,
    settings: LogitsSettings,
    steps: int,
    points: int,
    others: Sequence[Curve],
) -> Curve:
    """The KL of the linear student with one layer full, part by part, while it is distilled."""
    inputs = probe.inputs
    student = copy.deepcopy(inputs.student).float()
    restore_full(student, inputs.teacher.model, [layer])
    student.train()
    if settings.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    objective = MeasuredObjective(probe.teacher, student, settings)

    def give_up(kl: list[float]) -> bool:
        return outside(kl, others, probe.keep, probe.settings.stable_rounds)

    objective.watch(steps, points, give_up)
    folder = probe.stage_dir / f"layer-{layer:02d}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped in the middle of it
    try:
        inputs.train(objective, settings, folder, f"select layer {layer}")
    except LayerDone:
        pass
    except UserError as error:
        # The rates are those of the stage whose loss is used here.
        raise UserError(str(error).replace("select.", "logits.")) from error
    shutil.rmtree(folder, ignore_errors=True)
    return objective.curve


def outside(kl: Sequence[float], others: Sequence[Curve], keep: int, stable_rounds: int) -> bool:
    """Whether ``keep`` others were better in each of the last ``stable_rounds`` parts."""
    if len(kl) < stable_rounds:
        return False
    return all(
        sum(len(other.kl) > part and other.kl[part] <= kl[part] for other in others) >= keep
        for part in range(len(kl) - stable_rounds, len(kl))
    )


def _mean_over_processes(value: Tensor) -> float:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
        value = value / torch.distributed.get_world_size()
    return float(value)
