"""One trial of the pointers: phase after phase up the ladder, as far as a number of steps goes.

Each phase is a call of the training loop in a folder of its own, at a constant rate after a short
warm-up, with a new optimiser. The phases are short, so that no step is spent on what is known.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ltconvert.benchmarks.claims.common import mean_and_error
from ltconvert.benchmarks.claims.pointer_task import PointerStream, PointerTask
from ltconvert.benchmarks.claims.trials import Bench, new_model, train_model
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.distill.evaluation.scores import last_hidden
from ltconvert.distill.precision import autocast
from ltconvert.distill.records import write_json
from ltconvert.distill.runlog import RunLog
from ltconvert.recipes.stages import TrainSettings

HISTORY_FILE = "history.json"


class Climb:
    """One variant from one seed.

    Args:
        tasks: the ladder; a phase trains on its rung and those below.
        folder: holds what a further call goes on from.
    """

    def __init__(
        self,
        bench: Bench,
        config: LT2Config,
        tasks: Sequence[PointerTask],
        seed: int,
        folder: Path,
    ) -> None:
        self.bench, self.config, self.tasks = bench, config, tasks
        self.seed, self.folder = seed, folder
        history = folder / HISTORY_FILE
        self.history: list[dict[str, Any]] = (
            json.loads(history.read_text())["phases"] if history.exists() else []
        )

    def rung(self, phases: int) -> int:
        """How many rungs were passed in the first phases."""
        return sum(phase["passed"] for phase in self.history[:phases])

    def climb(self, limit_s: float | None) -> dict[str, Any]:
        """All phases that are left."""
        options = self.bench.options
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        model = new_model(self.bench, self.config, self.seed)
        start(model)
        # The last finished phase is called again: it has no step left, and gives back its weights.
        for phase in range(max(0, len(self.history) - 1), options.steps // options.phase_steps):
            rung = self.rung(phase)
            if rung == len(self.tasks):
                break
            self._train(model, phase, self.tasks[: rung + 1], end)
            if phase == len(self.history):
                self._look(model, phase, self.tasks[rung])
        sizes = [x["n"] for x in self.history if x["passed"] and x["swaps"] == x["n"]]
        return {
            "largest": max(sizes, default=0),
            "sizes": len(sizes),
            "parameters": model_facts(self.config).parameters,
            "visits": len(model.model.schedule),
            "history": self.history,
        }

    def _train(
        self, model: LT2ForCausalLM, phase: int, tasks: Sequence[PointerTask], end: float
    ) -> None:
        options, task = self.bench.options, tasks[-1]
        rows = max(1, options.batch_tokens // task.length)
        settings = TrainSettings(
            budget_tokens=options.phase_steps * rows * task.length,
            seq_len_tokens=task.length,
            batch_tokens=rows * task.length,
            micro_batch_rows=rows,
            lr=options.lr,
            schedule="constant",
            warmup_share=0.1,
            weight_decay=0.1,
        )
        train_model(
            self.bench,
            model,
            PointerStream(tasks, rows, (self.seed, phase)),
            settings,
            self._phase_folder(phase),
            log=RunLog(self.folder),
            stage=f"phase{phase + 1} n={task.pointers} swaps={task.swaps}",
            seed=self.seed,
            limit_s=None if end == math.inf else max(0.0, end - time.monotonic()),
        )

    def _look(self, model: LT2ForCausalLM, phase: int, task: PointerTask) -> None:
        """Note how the phase ended; only the last phase's checkpoint is needed from then on."""
        options = self.bench.options
        right, error = accuracy(
            model, task, options.examples, options.batch_tokens, self.bench.precision
        )
        found = {"n": task.pointers, "swaps": task.swaps, "accuracy": right, "stderr": error}
        self.history.append({**found, "passed": right >= options.pass_accuracy})
        write_json(self.folder / HISTORY_FILE, {"phases": self.history})
        self.bench.log.say(
            f"phase {phase + 1}: n = {task.pointers}, {task.swaps} swaps: "
            f"{right:.1%} right on held-out rows"
        )
        if phase:
            shutil.rmtree(self._phase_folder(phase - 1), ignore_errors=True)

    def _phase_folder(self, phase: int) -> Path:
        return self.folder / f"phase-{phase}"


@torch.no_grad()
def start(model: LT2ForCausalLM) -> None:
    """Draw the matrices anew such that the stream begins with the tokens and keeps them in sight.

    Small embeddings, the usual start, are buried by what the first layer adds. Unit ones are not,
    with matrices that keep the size of their inputs and 2 N branches that add up to unit size.
    """
    branches = 2 * len(model.model.layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.Linear) and module is not model.lm_head:
            adds = name.endswith(("o_proj", "down_proj"))
            share = branches**-0.5 if adds else 1.0
            nn.init.normal_(module.weight, std=share * module.in_features**-0.5)


@torch.inference_mode()
def accuracy(
    model: LT2ForCausalLM, task: PointerTask, examples: int, batch_tokens: int, precision: str
) -> tuple[float, float | None]:
    """Share of the questions that are answered right on held-out rows, and its error over rows."""
    rows = min(examples, max(1, batch_tokens // task.length))
    stream, shares = PointerStream([task], rows, None), []
    for _ in range(-(-examples // rows)):
        batch = next(stream).to(model.device)
        asked_BT = batch.labels_BT >= 0
        with autocast(model.device, precision):
            logits_NV = model.logits(last_hidden(model, batch)[asked_BT])
        right_N = logits_NV.argmax(-1) == batch.labels_BT[asked_BT]
        shares.append(right_N.view(rows, task.asked).double().mean(1).cpu())
    return mean_and_error(torch.cat(shares).tolist())
