"""Up to how many pointers can a model follow swaps and recall the values? Looped or not, by mixer.

    python benchmarks/claims/pointer_swap.py --minutes 30

The task is in ``pointer_task.py``, with as many swaps as pointers. All variants have as many
parameters and the same steps, in phases of ``--phase-steps``: a variant that is right on 90 % of
the held-out questions at the end of a phase goes on with twice as many pointers, from 8 up to 128,
else it has another phase of the same size. Rates and optimiser start anew in each phase. Rows are
the same for all variants of a seed as long as they are in step. What counts is the largest number
of pointers passed. ``--minutes`` is shared out evenly over the trials that are left; a trial that
needs more counts once a further call of the same command has finished it.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ltconvert.benchmarks.claims.common import (
    Finding,
    compare,
    equal_config,
    mean_and_error,
    ratio_mixers,
    shown,
    table,
)
from ltconvert.benchmarks.claims.pointer_task import PointerStream, PointerTask
from ltconvert.benchmarks.claims.trials import (
    Bench,
    launch,
    new_model,
    run_trials,
    train_model,
    trial_parser,
)
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.evaluation.scores import last_hidden
from ltconvert.distill.precision import autocast
from ltconvert.distill.records import write_json
from ltconvert.distill.runlog import RunLog
from ltconvert.recipes.stages import TrainSettings

VARIANTS = {  # (full, linear) layers of a ratio, looped or not
    "full-looped": ((1, 0), True),
    "hybrid-looped": ((1, 4), True),
    "gdn-looped": ((0, 1), True),
    "full-once": ((1, 0), False),
    "hybrid-once": ((1, 4), False),
    "gdn-once": ((0, 1), False),
}
HISTORY_FILE = "history.json"
TINY = {
    "heads": 1, "mlp": 64, "loops": 2, "batch_tokens": 256, "smallest": 2, "largest": 4,
    "steps": 4, "phase_steps": 2, "examples": 16,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """See ``trials.launch``."""
    parser = trial_parser(__doc__, "pointer_swap")
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--smallest", type=int, default=8, help="pointers to begin with")
    add("--largest", type=int, default=128, help="pointers to end with")
    add("--steps", type=int, default=3000, help="optimiser steps of a trial")
    add("--phase-steps", type=int, default=300, help="steps before the next look at held-out rows")
    add("--pass-accuracy", type=float, default=0.9)
    add("--examples", type=int, default=512, help="held-out rows of each size")
    return launch(parser, run, TINY, arguments)


def run(bench: Bench) -> None:
    """All trials that are left, then the tables."""
    names = bench.options.variants

    def measure(name: str, seed: int, folder: Path, limit_s: float | None) -> dict[str, Any]:
        return _Climb(bench, name, seed, folder).climb(limit_s)

    results = run_trials(bench, names, measure)
    rows = []
    for name in names:
        of_seed = results[name]
        if not of_seed:
            rows.append([name, "-", "-", "-", "not finished"])
            continue
        first = next(iter(of_seed.values()))
        largest = [str(found["largest"]) for found in of_seed.values()]
        last = [found["history"][-1]["accuracy"] for found in of_seed.values()]
        rows.append(
            [name, first["parameters"], first["visits"], ", ".join(largest), shown(last, 2)]
        )
    head = ["variant", "parameters", "visits", "largest n by seed", "accuracy of the last phase"]
    for line in table(head, rows):
        bench.log.say(line)
    bench.conclude(findings(results))


def findings(results: dict[str, dict[int, Any]]) -> list[Finding]:
    """The paper's claims, as far as variants for them were run; compared are curriculum stages.

    The published hybrids of that comparison are linear and sparse; here they are full and linear.
    """
    claims = {
        "a looped hybrid gets further than looped full attention (published: n = 128 against 64)": (
            "hybrid-looped", "full-looped",
        ),
        "looping takes Gated DeltaNet further": ("gdn-looped", "gdn-once"),
        "looping takes the hybrid further": ("hybrid-looped", "hybrid-once"),
        "looping takes full attention further": ("full-looped", "full-once"),
    }  # fmt: skip
    stages = {
        name: {seed: found["stages"] for seed, found in of_seed.items()}
        for name, of_seed in results.items()
    }
    return [
        compare(claim, stages[one], stages[other], "doublings of n")
        for claim, (one, other) in claims.items()
        if one in stages and other in stages
    ]


class _Climb:
    """One trial: phase after phase, each a call of the training loop in a folder of its own."""

    def __init__(self, bench: Bench, name: str, seed: int, folder: Path) -> None:
        self.bench, self.seed, self.folder = bench, seed, folder
        options = bench.options
        ratio, looped = VARIANTS[name]
        self.config = equal_config(
            options,
            self.task(options.largest).vocab,
            ratio_mixers(*ratio, options.layers),
            options.loops if looped else 1,
        )
        history = folder / HISTORY_FILE
        self.history: list[dict[str, Any]] = (
            json.loads(history.read_text())["phases"] if history.exists() else []
        )

    def task(self, pointers: int) -> PointerTask:
        """Rows of so many pointers."""
        return PointerTask(self.bench.options.largest, pointers, swaps=pointers)

    def stages(self, phases: int) -> int:
        """How often n was passed in the first phases."""
        return sum(phase["passed"] for phase in self.history[:phases])

    def climb(self, limit_s: float | None) -> dict[str, Any]:
        """All phases that are left."""
        options = self.bench.options
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        model = new_model(self.bench, self.config, self.seed)
        # The last finished phase is called again: it has no step left, and gives back its weights.
        for phase in range(max(0, len(self.history) - 1), options.steps // options.phase_steps):
            pointers = options.smallest * 2 ** self.stages(phase)
            if pointers > options.largest:
                break
            self._train(model, phase, pointers, end)
            if phase == len(self.history):
                self._look(model, phase, pointers)
        stages = self.stages(len(self.history))
        return {
            "largest": options.smallest * 2 ** (stages - 1) if stages else 0,
            "stages": stages,
            "parameters": model_facts(self.config).parameters,
            "visits": len(model.model.schedule),
            "history": self.history,
        }

    def _train(self, model: LT2ForCausalLM, phase: int, pointers: int, end: float) -> None:
        options, task = self.bench.options, self.task(pointers)
        rows = max(1, options.batch_tokens // task.length)
        settings = TrainSettings(
            budget_tokens=options.phase_steps * rows * task.length,
            seq_len_tokens=task.length,
            batch_tokens=rows * task.length,
            micro_batch_rows=rows,
            lr=options.lr,
            warmup_share=0.1,
            weight_decay=0.1,
        )
        train_model(
            self.bench,
            model,
            PointerStream(task, rows, (self.seed, phase)),
            settings,
            self._phase_folder(phase),
            log=RunLog(self.folder),
            stage=f"phase{phase + 1} n={pointers}",
            seed=self.seed,
            limit_s=None if end == math.inf else max(0.0, end - time.monotonic()),
        )

    def _look(self, model: LT2ForCausalLM, phase: int, pointers: int) -> None:
        """Note how the phase ended; only the last phase's checkpoint is needed from then on."""
        options = self.bench.options
        right, error = accuracy(
            model, self.task(pointers), options.examples, options.batch_tokens, self.bench.precision
        )
        passed = right >= options.pass_accuracy
        found = {"n": pointers, "accuracy": right, "stderr": error, "passed": passed}
        self.history.append(found)
        write_json(self.folder / HISTORY_FILE, {"phases": self.history})
        self.bench.log.say(f"phase {phase + 1}: n = {pointers}, {right:.1%} right on held-out rows")
        if phase:
            shutil.rmtree(self._phase_folder(phase - 1), ignore_errors=True)

    def _phase_folder(self, phase: int) -> Path:
        return self.folder / f"phase-{phase}"


@torch.inference_mode()
def accuracy(
    model: LT2ForCausalLM, task: PointerTask, examples: int, batch_tokens: int, precision: str
) -> tuple[float, float | None]:
    """Share of the questions that are answered right on held-out rows, and its error over rows."""
    rows = min(examples, max(1, batch_tokens // task.length))
    stream, shares = PointerStream(task, rows, None), []
    for _ in range(-(-examples // rows)):
        batch = next(stream).to(model.device)
        asked_BT = batch.labels_BT >= 0
        with autocast(model.device, precision):
            logits_NV = model.logits(last_hidden(model, batch)[asked_BT])
        right_N = logits_NV.argmax(-1) == batch.labels_BT[asked_BT]
        shares.append(right_N.view(rows, task.asked).double().mean(1).cpu())
    return mean_and_error(torch.cat(shares).tolist())


if __name__ == "__main__":
    sys.exit(main())
