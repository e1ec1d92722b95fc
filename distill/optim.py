"""How a token budget becomes steps, and the optimiser with its learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ltconvert.convert.students.dreamer.banks import Bank
from ltconvert.recipes.stages import TrainSettings


@dataclass(frozen=True)
class StepPlan:
    """How the budget is spent: micro-batches a step (of one process), tokens a step, steps."""

    accumulation: int
    step_tokens: int
    steps: int


def plan_steps(settings: TrainSettings, world: int = 1) -> StepPlan:
    """Cut the budget into steps of about `batch_tokens`, at least one micro-batch a process."""
    micro_tokens = settings.rows_at_once * settings.seq_len_tokens * world
    accumulation = max(1, settings.batch_tokens // micro_tokens)
    step_tokens = accumulation * micro_tokens
    return StepPlan(accumulation, step_tokens, math.ceil(settings.budget_tokens / step_tokens))


def lr_share(step: int, steps: int, settings: TrainSettings) -> float:
    """Learning rate of step `step` (from 0) of `steps`, as a share of the peak.

    Linear from above 0 to 1 over `warmup_share` of the steps, then constant, or falling to
    `final_lr_share` at the last step along a line or half a cosine.
    """
    warmup = math.ceil(settings.warmup_share * steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - 1 - warmup)
    if settings.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1.0 - (1.0 - settings.final_lr_share) * done


def build_optimizer(
    groups: Sequence[dict[str, Any]], settings: TrainSettings, module: nn.Module
) -> torch.optim.AdamW:
    """AdamW over the groups of ``module``'s parameters; weight decay on its matrices alone.

    Matrices are the weights of linear layers, of banks of these, and embeddings. Other parameters
    with two axes are none (norms by head and channel, residuals by loop and channel, convolutions
    that start as the identity): 0 is not where they come from.

    The fused form updates in place in one pass, without temporary copies of all gradients, on a
    CPU too.
    """
    layers = (m for m in module.modules() if isinstance(m, nn.Linear | nn.Embedding | Bank))
    decayed = {id(layer.weight) for layer in layers}
    prepared = []
    for group in groups:
        matrices = [p for p in group["params"] if id(p) in decayed]
        others = [p for p in group["params"] if id(p) not in decayed]
        common = {key: value for key, value in group.items() if key != "params"}
        common["peak_lr"] = group["lr"]
        prepared += [
            {**common, "params": params, "weight_decay": decay}
            for params, decay in ((matrices, settings.weight_decay), (others, 0.0))
            if params
        ]
    return torch.optim.AdamW(prepared, betas=(settings.beta1, settings.beta2), fused=True)


def set_lr(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Scale every group's peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share
