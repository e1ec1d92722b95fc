"""The one training loop: every stage that has an optimiser runs through `train`.

Weights and optimiser are fp32; matrix products run under autocast in bf16 where that was picked.
Processes each take their own rows and average the gradients after accumulation, by hand: objectives
may run several backward passes a step (a local one a layer), which a wrapper around the module
would not see. All randomness of a step comes from (seed, stage, step, process), so that a resumed
run draws what an undisturbed one draws.

A step never waits for a GPU: its loss and norm are looked at one step later. Until then, should
they not be finite, the optimiser holds still, so that weights and checkpoints stay good.
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
from torch import Tensor

from ltconvert.distill import compilation, recording
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import BAD, NORM, Gradients, NotFinite
from ltconvert.distill.interrupt import StopRequest, stop_requests
from ltconvert.distill.objective import Objective, Stream, TrainResult
from ltconvert.distill.optim import StepPlan, build_optimizer, lr_share, plan_steps, set_lr
from ltconvert.distill.precision import autocast
from ltconvert.distill.prefetch import Prefetch
from ltconvert.distill.processes import seed_everything, take_from_the_first
from ltconvert.distill.progress import StepLine
from ltconvert.distill.readings import Reading, Readings
from ltconvert.distill.resume import (
    TrainState,
    clean_up,
    load_checkpoint,
    save_checkpoint,
    trainable,
)
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError
from ltconvert.recipes.runtime import RuntimeSettings
from ltconvert.recipes.stages import TrainSettings

__all__ = ["Objective", "Stream", "TrainResult", "train"]

CHECKPOINT_STEPS_VARIABLE = "LTCONVERT_CHECKPOINT_STEPS"  # a checkpoint every n steps
_STOP = "stop"


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
    runtime: RuntimeSettings


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
    runtime: RuntimeSettings = RuntimeSettings(),  # noqa: B008 (frozen)
    limit_s: float | None = None,
) -> TrainResult:
    """Train `objective.module` in place on `settings.budget_tokens` tokens.

    Goes on from `<stage_dir>/checkpoint` when there is one, bit for bit on a CPU in fp32.

    Args:
        limit_s: seconds after which it stops as on a signal; None: as long as it takes.

    Raises:
        UserError: the loss or a gradient is not finite, or the checkpoint does not fit.
        Stopped: SIGINT or SIGTERM came; the step is finished and saved.
        OutOfTime: the same, since `limit_s` is over.
    """
    device = torch.device(device)
    with ExitStack() as stack:
        if device.type != "cpu":  # on a CPU the thread would only take time from the step
            stream = stack.enter_context(closing(Prefetch(stream, pin=device.type == "cuda")))
        request = stack.enter_context(stop_requests(limit_s))
        run = _Run(
            objective, stream, settings, stage, stage_dir, log, precision, device, seed, runtime
        )
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
        self.readings = Readings(run.device)
        recorded = recording.wanted(run.runtime.cuda_graph, run.device, self.plan.steps)
        self.passes = recording.Passes(objective, on=recorded, say=run.log.say)
        self.wish: int | None = None  # the step (from 0) in which a process was asked to stop
        self.line: StepLine | None = None
        self.gradients = Gradients(self.parameters, self.optimizer)

    def train(self, request: StopRequest) -> TrainResult:
        """All steps that are left."""
        self._start()
        run, state, plan = self.run, self.state, self.plan
        choice = compilation.choose(run.runtime.compile, run.device, plan.steps)
        _announce(run, plan, state.step, choice)
        try:
            with (
                compilation.compiled(run.objective, choice, run.log.say),
                run.log.steps(run.stage, plan.steps, state.step) as self.line,
            ):
                stopping = self._steps(request)
        finally:
            self.passes.close()
            self.optimizer.zero_grad(set_to_none=True)
        if stopping or request:
            raise request.error(self._farewell())
        tokens = state.step * plan.step_tokens
        return TrainResult(state.step, tokens, state.seconds, state.metrics)

    def _steps(self, request: StopRequest) -> bool:
        """Train and save; whether it was ended by a wish to stop."""
        state, plan = self.state, self.plan
        alone, stopping = self.accelerator.num_processes == 1, False
        while state.step < plan.steps and not stopping:
            begun = time.monotonic()
            try:
                self._step(request)
            except NotFinite:
                raise
            except Exception:  # a stream or an objective may end the loop: what is done counts
                self._read(everything=True)
                raise
            state.step += 1
            state.stream = self.run.stream.state_dict()
            # Several processes have to stop after the same step, whenever each read of the wish.
            late = plan.steps if self.wish is None else self.wish + self.readings.late
            stopping = bool(request) if alone else state.step > late
            saving = stopping or state.step == plan.steps or self._save_is_due()
            if saving:
                self._read(everything=True)
            stopping |= state.step == plan.steps and self.wish is not None
            state.seconds += time.monotonic() - begun
            if saving:
                self._save()
        return stopping

    def _start(self) -> None:
        run = self.run
        if self.accelerator.is_main_process:
            clean_up(run.stage_dir)
        self.accelerator.wait_for_everyone()
        take_from_the_first(parameter.data for parameter in self.parameters.values())
        self.saved = clean_up(run.stage_dir)
        self.state.stream = run.stream.state_dict()
        if self.saved is not None:
            identity = self.state.plan
            self.state = load_checkpoint(self.saved, run.objective.module, self.optimizer, identity)
            self.saved_step = self.state.step
            run.stream.load_state_dict(self.state.stream)
        run.log.rewind(run.stage, self.state.step)

    def _step(self, request: StopRequest) -> None:
        """One optimiser step; looks at the numbers that it is time for, its own or older ones."""
        run, step = self.run, self.state.step
        seed_everything(run.seed, run.stage, step, self.accelerator.process_index)
        sums: dict[str, Tensor] = {}
        for _ in range(self.plan.accumulation):
            batch = self._next_batch().to(run.device)
            values = self.passes(self._pass, batch, step / self.plan.steps)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float()
        self.gradients.average()
        share = lr_share(step, self.plan.steps, run.settings)
        names, numbers = self._average_metrics(sums, bool(request))
        norms = self.gradients.clip(run.settings.clip_norm)
        names, numbers = [*names, *norms], torch.stack([*numbers.unbind(), *norms.values()])
        self.readings.put(step, run.settings.lr * share, names, numbers)
        self._read()  # before the optimiser moves: weights and checkpoint are good
        if self.readings.late:
            self.gradients.guard(numbers[names.index("loss")], norms[NORM])
        set_lr(self.optimizer, share)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.passes.holds)

    def _next_batch(self) -> Batch:
        """The stream's next one; where it breaks off, the steps before this one are saved first."""
        try:
            return next(self.run.stream)
        except Exception as error:
            self._read(everything=True)
            if self.state.step > self.saved_step:
                self._save()
            if not isinstance(error, UserError) or self.saved_step == 0:
                raise
            kept = f"{self.saved_step} of {self.plan.steps} steps of stage {self.run.stage}"
            raise UserError(f"{error}; {kept} are saved in {self.run.stage_dir}") from error

    def _pass(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        with autocast(self.run.device, self.run.precision):
            return self.run.objective.train_step(batch, self._backward, progress)

    def _backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss / self.plan.accumulation)

    def _average_metrics(self, sums: Mapping[str, Tensor], stop: bool) -> tuple[list[str], Tensor]:
        """Means over micro-batches and processes; the wish to stop travels with them."""
        values = [value.reshape(()) / self.plan.accumulation for value in sums.values()]
        values.append(torch.full_like(values[0], float(stop)))
        return [*sums, _STOP], self.accelerator.reduce(torch.stack(values), reduction="mean")

    def _read(self, *, everything: bool = False) -> None:
        """Look at the steps whose numbers it is time for, or at all, and note them.

        Raises:
            UserError: a loss or norm is not finite; names stage, step, the first bad gradient, the
                last checkpoint, remedies.
        """
        for reading in self.readings.take(everything=everything):
            loss, norm = reading.values["loss"], reading.values[NORM]
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NotFinite(self._diagnosis(reading), self.run.stage.split()[0])
            if self.wish is None and reading.values[_STOP] > 0:
                self.wish = reading.step
            self._note(reading)

    def _note(self, reading: Reading) -> None:
        values = {k: v for k, v in reading.values.items() if k not in (_STOP, BAD, NORM)}
        self.state.metrics = {**values, "lr": reading.lr, NORM: reading.values[NORM]}
        step, step_tokens = reading.step + 1, self.plan.step_tokens
        shown = {**self.state.metrics, "tokens": step * step_tokens}
        self.run.log.metrics(self.run.stage, step, shown)
        assert self.line is not None
        self.line.step(step, self.state.metrics, step_tokens)

    def _diagnosis(self, reading: Reading) -> str:
        loss = reading.values["loss"]
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        if name := self.gradients.first_bad(reading.values[BAD]):
            what += f" (first at {name})"
        kept = "there is no checkpoint yet"
        if self.saved is not None:
            kept = f"the last good checkpoint, step {self.saved_step}, is kept in {self.saved}"
        where = f"stage {self.run.stage}, step {reading.step + 1} of {self.plan.steps}"
        return f"{where}: {what}; {kept}"

    def _save_is_due(self) -> bool:
        every = int(os.environ.get(CHECKPOINT_STEPS_VARIABLE, "0"))
        if every and self.state.step % every == 0:
            return True
        return time.monotonic() - self.saved_at > 60 * self.run.settings.checkpoint_minutes

    def _save(self) -> None:
        """All processes stand at the same position, so that the first one writes for all."""
        run = self.run
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


def _announce(run: _Run, plan: StepPlan, done: int, choice: compilation.Choice) -> None:
    wanted, tokens = run.settings.batch_tokens, plan.step_tokens
    asked = "" if tokens == wanted else f" (batch_tokens {wanted} in whole micro-batches)"
    begin = f", going on after step {done}" if done else ""
    size = f"{plan.steps} steps of {tokens} tokens{asked}"
    run.log.say(f"{run.stage}: {size}, {run.precision}, {choice}{begin}")
