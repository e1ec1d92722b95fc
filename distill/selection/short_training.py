"""The short distillation of method ``kl``: one layer of the linear student made full, then trained;
and the settings of that of ``kl-gates``.

The loss, the rates and the loop are those of the stage `logits`. Only the KLs leave: the layer's
weights are thrown away.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ltconvert.convert.transfer import restore_full
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import NotFinite
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.processes import rank_and_world, sum_of_processes
from ltconvert.distill.selection.probe import Probe
from ltconvert.recipes.stages import LogitsSettings, SelectSettings

POINTS = 10  # parts that a layer's training is measured in, at most
GATE_LR = 0.2  # of their scores, in units of their noise
GATE_STEPS = 64  # of `kl-gates`, where rows are short enough: scores move by so many small steps


class LayerDone(Exception):
    """Raised inside the training loop: the layer is measured, nothing of its weights is needed."""


def short_settings(full: LogitsSettings, select: SelectSettings) -> tuple[LogitsSettings, int]:
    """Settings of the short distillation, and its steps.

    As in the stage `logits`, but at a constant rate from the first step on, on rows of
    ``select.seq_len_tokens`` and in steps small enough for every part to have one. The budget is
    one step more than is trained: the layer ends at the beginning of that step, which saves
    writing a checkpoint that nobody reads.
    """
    row = select.seq_len_tokens
    rows = max(1, full.rows_at_once * full.seq_len_tokens // row)
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


def gate_settings(full: LogitsSettings, select: SelectSettings) -> LogitsSettings:
    """Settings of the training of gates: ``select.train_tokens`` in about ``GATE_STEPS`` steps.

    Rows, rate of change and loss as in ``short_settings``; every step is trained, and checkpoints
    are as frequent as in the stage `logits`: a killed run goes on from them.
    """
    row, (settings, _) = select.seq_len_tokens, short_settings(full, select)
    batch = min(settings.batch_tokens, max(row, select.train_tokens // GATE_STEPS))
    update = {
        "micro_batch_rows": min(settings.rows_at_once, batch // row),
        "batch_tokens": batch,
        "checkpoint_minutes": full.checkpoint_minutes,
        "budget_tokens": select.train_tokens,
        "lr": GATE_LR,
        "clip_norm": 1e9,  # AdamW takes no notice of the size of a gradient
    }
    return settings.model_copy(update=update)


class MeasuredObjective(LogitsObjective):
    """The objective of `logits` that notes the KL of each part and ends when the layer is measured.

    Args:
        steps: optimiser steps to train.
        points: parts to measure.
        give_up: asked after every part, with the KLs so far.
    """

    def watch(self, steps: int, points: int, give_up: Callable[[list[float]], bool]) -> None:
        """Begin to measure."""
        self.kls: list[float] = []
        self._steps, self._points, self._give_up = steps, points, give_up
        self._part: list[Tensor] = []

    def work(self, progress: float) -> Hashable | None:
        """Never recorded: a step may end the layer."""
        return None

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """As in the parent; raises LayerDone where the layer ends."""
        step = round(progress * (self._steps + 1))
        while step * self._points >= (len(self.kls) + 1) * self._steps:
            self._close_part()
        metrics = super().train_step(batch, backward, progress)
        self._part.append(metrics["kl"].double())
        return metrics

    def _close_part(self) -> None:
        mean = sum_of_processes(torch.stack(self._part).mean()) / rank_and_world()[1]
        self.kls.append(float(mean))
        self._part = []
        if len(self.kls) == self._points or self._give_up(self.kls):
            raise LayerDone


def train_layer(
    probe: Probe,
    layer: int,
    settings: LogitsSettings,
    steps: int,
    points: int,
    give_up: Callable[[list[float]], bool],
) -> list[float]:
    """The KL of the linear student with one layer full, part by part, while it is distilled."""
    inputs = probe.inputs
    student = copy.deepcopy(inputs.student).float()
    restore_full(student, inputs.teacher.model, [layer])
    student.train()
    if settings.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    objective = MeasuredObjective(probe.teacher, student, settings)

    objective.watch(steps, points, give_up)
    folder = probe.stage_dir / f"layer-{layer:02d}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped in the middle of it
    try:
        inputs.train(objective, settings, folder, f"select layer {layer}")
    except LayerDone:
        pass
    except NotFinite as error:
        # The rates are those of the stage whose loss is used here.
        raise NotFinite(error.happened, "logits") from error
    shutil.rmtree(folder, ignore_errors=True)
    return objective.kls
