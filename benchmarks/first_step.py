"""Seconds to the first training step from cold caches, with and without compiling ahead.

    python benchmarks/first_step.py [--rows 16] [--length 4096] [--mixer gdn_window]

A new process with empty caches a line or two: stages `align` and then `logits`, and `logits` alone,
each with kernels and imports as they are needed (`lazy`) and in the background (`ahead`), on
SmolLM2-135M's shape with random weights and compiled layers. `first step` begins where the stage
has its models; in `align` it holds calibrating. `tracing` is PyTorch's count of all it does for the
compiled layers. Then Triton's compilations: of our kernels where a launch waited, of those ahead,
and of PyTorch's own in this process (most of those are in others). Below a line: what was missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from ltconvert.benchmarks.step_models import mixers_of, random_batch, smollm2_135m
from ltconvert.benchmarks.timing import synchronize
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill import compilation
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.calibrate import calibrate
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import NORM, Gradients
from ltconvert.distill.logits import LogitsObjective, frozen_copy, own_copy
from ltconvert.distill.objective import Objective
from ltconvert.distill.optim import build_optimizer
from ltconvert.distill.precision import autocast
from ltconvert.distill.resume import trainable
from ltconvert.distill.warm import warming
from ltconvert.kernels import ahead as ahead_of_launch
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import AlignSettings, LogitsSettings, TrainSettings

HEAD = (
    "| kernels | stage | before s | first step s | tracing s | second step s | waited for | ahead "
    "| PyTorch's |"
)
RUNS = (("align", "logits"), ("logits",))


@dataclass
class Compilations:
    """Triton's, by who waited for them: names and seconds."""

    done: dict[str, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def noted(self, compile: Callable[..., Any], whose: str) -> Callable[..., Any]:
        """``compile``, noted."""

        def timed(source: Any, *arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = compile(source, *arguments, **options)
            ahead = threading.current_thread().name.startswith(ahead_of_launch.THREADS)
            took = getattr(source, "name", "?"), time.perf_counter() - begun
            self.done["ahead" if ahead else whose].append(took)
            return result

        return timed

    def cell(self, kind: str) -> str:
        """Number and seconds."""
        return f"{len(self.done[kind])} in {sum(x for _, x in self.done[kind]):.1f} s"


def main() -> int:
    """Print the table; 1 where a process failed."""
    arguments = _parse()
    if arguments.part is not None:
        _measure(arguments)
        return 0
    print(f"{HEAD}\n{'|---' * (HEAD.count('|') - 1)}|", flush=True)
    codes = []
    for stages in RUNS:
        for kernels in ("lazy", "ahead"):
            with tempfile.TemporaryDirectory() as caches:
                words = [*sys.argv[1:], "--part", kernels, *stages]
                names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
                own = {name: os.path.join(caches, name) for name in names}
                command = [sys.executable, "-P", __file__, *words]
                codes.append(subprocess.run(command, env=os.environ | own, check=False).returncode)
    return int(any(codes))


def _measure(arguments: argparse.Namespace) -> None:
    """The lines of one process."""
    kernels, *stages = arguments.part
    device = torch.device(arguments.device)
    if kernels == "ahead":
        compilation.importing()
    torch.manual_seed(0)
    spec = smollm2_135m(tiny=arguments.tiny)
    teacher = LT2ForCausalLM(LT2Config.from_spec(spec)).to(device).eval().requires_grad_(False)
    student = build_student(teacher, mixers_of(spec, arguments.mixer), share=True)
    batch = random_batch(spec, arguments.rows, arguments.length, device)
    began = psutil.Process().create_time()
    with _noted() as compilations, dispatch.use("triton" if device.type == "cuda" else "auto"):
        for stage in stages:
            made = _align(teacher, student) if stage == "align" else _logits(teacher, student)
            synchronize(device)
            before = time.time() - began
            times = _first_steps(*made, batch, kernels == "ahead")
            counts = [compilations.cell(kind) for kind in ("waited", "ahead", "PyTorch's")]
            cells = [f"{before:.1f}", *(f"{x:.1f}" for x in times), *counts]
            print(f"| {kernels} | {stage} | {' | '.join(cells)} |", flush=True)
            if kernels == "ahead" and (missed := compilations.done["waited"]):
                print(f"not compiled ahead: {', '.join(name for name, _ in missed)}", flush=True)
            compilations.done.clear()
            began = time.time()


def _align(
    teacher: LT2ForCausalLM, student: LT2ForCausalLM
) -> tuple[AlignObjective, TrainSettings]:
    for layer in student.model.layers:
        if layer.mixer.converted:
            layer.mixer.float()
    return AlignObjective(teacher, student), AlignSettings()


def _logits(
    teacher: LT2ForCausalLM, student: LT2ForCausalLM
) -> tuple[LogitsObjective, TrainSettings]:
    own = own_copy(student, teacher).float().train()
    settings = LogitsSettings()
    return LogitsObjective(frozen_copy(teacher, torch.bfloat16), own, settings), settings


def _first_steps(
    objective: Any, settings: TrainSettings, batch: Batch, ahead: bool
) -> tuple[float, float, float]:
    """Seconds from the models to the end of the first step, those of tracing, of a second step."""
    device = batch.input_ids_BT.device
    rows, length = batch.input_ids_BT.shape
    choice, times = compilation.Choice(True, "as asked"), [time.perf_counter()]
    background = warming(objective, (rows, length), device, "bf16", print)
    with background if ahead else nullcontext():
        if isinstance(objective, AlignObjective):
            with autocast(device, "bf16"):
                calibrate(objective.teacher, objective.module, [batch], objective.layers)
        optimizer = build_optimizer(objective.parameter_groups(), settings, objective.module)
        gradients = Gradients(trainable(objective.module), optimizer)
        with compilation.compiled(objective, choice, print):
            for _ in range(2):
                _step(objective, settings, batch, gradients, optimizer)
                synchronize(device)
                times.append(time.perf_counter())
    return times[1] - times[0], _tracing_seconds(), times[2] - times[1]


def _step(
    objective: Objective,
    settings: TrainSettings,
    batch: Batch,
    gradients: Gradients,
    optimizer: Any,
) -> None:
    """As `distill.trainer` takes it."""
    with autocast(batch.input_ids_BT.device, "bf16"):
        values = objective.train_step(batch, lambda loss: loss.backward(), 0.0)
    norms = gradients.clip(settings.clip_norm)
    if batch.input_ids_BT.device.type == "cuda":
        gradients.guard(values["loss"], norms[NORM])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _tracing_seconds() -> float:
    """Of all regions since the last call, by PyTorch's own count: tracing, inductor, loading."""
    from torch._dynamo.utils import compilation_time_metrics as metrics

    seconds = sum(metrics.get("_compile.compile_inner", []))
    metrics.clear()
    return seconds


@contextmanager
def _noted() -> Iterator[Compilations]:
    """Note what Triton compiles: it takes its compiler from one place, PyTorch from another."""
    found = Compilations()
    if not dispatch.TRITON_INSTALLED:
        yield found
        return
    import triton

    own, public = triton.compiler.compile, triton.compile
    triton.compiler.compile = found.noted(own, "waited")
    triton.compile = found.noted(public, "PyTorch's")
    try:
        yield found
    finally:
        triton.compiler.compile, triton.compile = own, public


def _parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16, help="rows a forward pass")
    parser.add_argument("--length", type=int, default=4096, help="tokens a row")
    parser.add_argument("--mixer", default="gdn_window", help="of layers that are not full")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try this file")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
