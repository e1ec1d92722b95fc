"""The one training loop: every stage that has an optimiser runs through `train`.

Weights and optimiser are fp32; matrix products run under autocast in bf16 where that was picked.
Processes each take their own rows and average the gradients after accumulation, by hand: objectives
may run several backward passes a step (a local one a layer), which a wrapper around the module
would not see. All randomness of a step comes from (seed, stage, step, process), so that a resumed
run draws what an undisturbed one draws.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ltconvert.distill.interrupt import Stopped, StopRequest, stop_requests
from ltconvert.distill.objective import Objective, Stream, TrainResult
from ltconvert.distill.optim import build_optimizer, lr_share, plan_steps, set_lr
from ltconvert.distill.precision import autocast
from ltconvert.distill.prefetch import Prefetch
from ltconvert.distill.processes import seed_everything
from ltconvert.distill.resume import (
    TrainState,
    clean_up,
    load_checkpoint,
    save_checkpoint,
    trainable,
)
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError
from ltconvert.recipes.schema import TrainSettings

__all__ = ["Objective", "Stream", "TrainResult", "train"]

CHECKPOINT_STEPS_VARIABLE = "LTCONVERT_CHECKPOINT_STEPS"  # a checkpoint every n steps


@dataclass(frozen=True)
class _Run:
    """What one call of `train` was given."""

    objective: Objective
    stream: Stream
    settings: TrainSettings
    stage: str
    stage_dir: Path
    log: RunLog
    precision: str
    device: torch.device
    seed: int


def train(
    objective: Objective,
    stream: Stream,
    settings: TrainSettings,
    *,
    stage: str,
    stage_dir: Path,
    log: RunLog,
    precision: str,
    device: torch.device | str,
    seed: int,
) -> TrainResult:
    """Train `objective.module` in place on `settings.budget_tokens` tokens.

    Goes on from `<stage_dir>/checkpoint` when there is one, bit for bit on a CPU in fp32.

    Raises:
        UserError: the loss or a gradient is not finite, or the checkpoint does not fit.
        Stopped: SIGINT or SIGTERM came; the step is finished and saved.
    """
    device = torch.device(device)
    with ExitStack() as stack:
        if device.type != "cpu":  # on a CPU the thread would only take time from the step
            stream = stack.enter_context(closing(Prefetch(stream)))
        request = stack.enter_context(stop_requests())
        run = _Run(objective, stream, settings, stage, stage_dir, log, precision, device, seed)
        return _Loop(run).train(request)


class _Loop:
    """The parts that change while `train` runs."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.accelerator = Accelerator(mixed_precision="no", cpu=run.device.type == "cpu")
        self.plan = plan_steps(run.settings, self.accelerator.num_processes)
        self.parameters = trainable(run.objective.module)
        objective = run.objective
        self.optimizer = build_optimizer(
            objective.parameter_groups(), run.settings, objective.module
        )
        identity = {
            "seed": run.seed,
            "precision": run.precision,
            "steps": self.plan.steps,
            "step_tokens": self.plan.step_tokens,
        }
        self.state = TrainState(0, 0.0, {}, identity, {})
        self.saved: Path | None = None
        self.saved_step = 0
        self.saved_at = time.monotonic()

    def train(self, request: StopRequest) -> TrainResult:
        """All steps that are left."""
        self._start()
        state, plan = self.state, self.plan
        stopping = False
        with self.run.log.steps(self.run.stage, plan.steps, state.step) as line:
            while state.step < plan.steps and not stopping:
                begun = time.monotonic()
                state.metrics, stopping = self._step(request)
                state.step += 1
                state.seconds += time.monotonic() - begun
                shown = {**state.metrics, "tokens": state.step * plan.step_tokens}
                self.run.log.metrics(self.run.stage, state.step, shown)
                line.step(state.step, state.metrics, plan.step_tokens)
                if stopping or state.step == plan.steps or self._save_is_due():
                    self._save()
        if stopping or request:
            raise Stopped(self._farewell())
        tokens = state.step * plan.step_tokens
        return TrainResult(state.step, tokens, state.seconds, state.metrics)

    def _start(self) -> None:
        run, plan = self.run, self.plan
        if self.accelerator.is_main_process:
            clean_up(run.stage_dir)
        self.accelerator.wait_for_everyone()
        self.saved = clean_up(run.stage_dir)
        if self.saved is not None:
            identity = self.state.plan
            self.state = load_checkpoint(self.saved, run.objective.module, self.optimizer, identity)
            self.saved_step = self.state.step
            run.stream.load_state_dict(self.state.stream)
        run.log.rewind(run.stage, self.state.step)
        _announce(run, plan.steps, plan.step_tokens, self.state.step)

    def _step(self, request: StopRequest) -> tuple[dict[str, float], bool]:
        """One optimiser step: (its metrics, whether any process was asked to stop)."""
        run, step = self.run, self.state.step
        seed_everything(run.seed, run.stage, step, self.accelerator.process_index)
        sums: dict[str, Tensor] = {}
        for _ in range(self.plan.accumulation):
            batch = next(run.stream).to(run.device)
            with autocast(run.device, run.precision):
                values = run.objective.train_step(batch, self._backward, step / self.plan.steps)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float()
        self._average_gradients()
        metrics, stopping = self._average_metrics(sums, bool(request))
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, run.settings.clip_norm)
        self._check_finite(metrics["loss"], float(norm))
        share = lr_share(step, self.plan.steps, run.settings)
        set_lr(self.optimizer, share)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**metrics, "lr": run.settings.lr * share, "grad_norm": float(norm)}, stopping

    def _backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss / self.plan.accumulation)

    def _average_gradients(self) -> None:
        if self.accelerator.num_processes == 1:
            return
        for parameter in self.parameters.values():
            # Every process has to take part for every parameter, used or not.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(grad, reduction="mean")

    def _average_metrics(
        self, sums: Mapping[str, Tensor], stop: bool
    ) -> tuple[dict[str, float], bool]:
        """Means over micro-batches and processes; the wish to stop travels with them."""
        names = list(sums)
        values = [sums[name].reshape(()) / self.plan.accumulation for name in names]
        values.append(torch.tensor(float(stop), device=values[0].device))
        mean = self.accelerator.reduce(torch.stack(values), reduction="mean").tolist()
        return dict(zip(names, mean[:-1], strict=True)), mean[-1] > 0

    def _check_finite(self, loss: float, norm: float) -> None:
        """Before the optimiser moves: weights and checkpoint are still good.

        Raises:
            UserError: names stage, step, the first bad gradient, the last checkpoint, remedies.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        bad = (n for n, p in self.parameters.items() if p.grad is not None and not _finite(p.grad))
        if name := next(bad, ""):
            what += f" (first at {name})"
        kept = "there is no checkpoint yet"
        if self.saved is not None:
            kept = f"the last good checkpoint, step {self.saved_step}, is kept in {self.saved}"
        stage = self.run.stage.split()[0]
        raise UserError(
            f"stage {self.run.stage}, step {self.state.step + 1} of {self.plan.steps}: {what}; "
            f"{kept}; try a lower {stage}.lr, a longer {stage}.warmup_share, a smaller "
            f"{stage}.clip_norm or --precision fp32"
        )

    def _save_is_due(self) -> bool:
        every = int(os.environ.get(CHECKPOINT_STEPS_VARIABLE, "0"))
        if every and self.state.step % every == 0:
            return True
        return time.monotonic() - self.saved_at > 60 * self.run.settings.checkpoint_minutes

    def _save(self) -> None:
        """All processes stand at the same position, so that the first one writes for all."""
        run = self.run
        self.state.stream = run.stream.state_dict()
        if self.accelerator.is_main_process:
            self.saved = save_checkpoint(
                run.stage_dir, self.state, run.objective.module, self.optimizer
            )
        self.saved_step, self.saved_at = self.state.step, time.monotonic()

    def _farewell(self) -> str:
        return (
            f"stopped after step {self.state.step} of {self.plan.steps} of stage {self.run.stage}; "
            f"saved in {self.run.stage_dir}; the same command goes on from there"
        )


def _announce(run: _Run, steps: int, step_tokens: int, done: int) -> None:
    wanted = run.settings.batch_tokens
    asked = "" if step_tokens == wanted else f" (batch_tokens {wanted} in whole micro-batches)"
    begin = f", going on after step {done}" if done else ""
    size = f"{steps} steps of {step_tokens} tokens{asked}"
    run.log.say(f"{run.stage}: {size}, {run.precision}{begin}")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
