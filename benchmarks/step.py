"""Speed of a whole training step of stage `logits` on SmolLM2-135M's shape, random weights.

    python benchmarks/step.py [--kernel reference triton] [--compile off layers] [--rows 8]
    python benchmarks/step.py --student hybrid-window --graph off auto
    python benchmarks/step.py --student dreamer --release 0.5

A line a variant, each as soon as it is measured, all in one process on the same batch: first the
package's own step by kernel backend, without and with its layers compiled and its launches recorded
as training does it, and last `plain`, what one writes without this package (the same models in
plain PyTorch, whole logits, KL by autograd). A step is teacher forward, student forward and
backward, clipping and optimiser. The first step's loss has to be that of the first variant, or no
speed is shown. FLOPs are those of `distill.planning.work`, without recomputation. Of a Dreamer all
is of the recipe's sizes and FLOPs those of its released routing; it has no plain variant.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ltconvert.benchmarks.harness import reason
from ltconvert.benchmarks.step_models import (
    HYBRIDS,
    PlainObjective,
    random_batch,
    smollm2_135m,
    step_flops,
    student_config,
)
from ltconvert.benchmarks.timing import TimeLimit, deadline, median_ms, synchronize
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import build_student
from ltconvert.distill.compilation import Choice, compiled
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import NORM, Gradients
from ltconvert.distill.logits import LogitsObjective, frozen_copy, own_copy
from ltconvert.distill.optim import build_optimizer
from ltconvert.distill.precision import autocast
from ltconvert.distill.recording import PLAIN, Passes
from ltconvert.distill.resume import trainable
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import LogitsSettings

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16, by the maker
LOSS_TOLERANCE = 0.03
HEAD = "| variant | tok/s | ms a step | MFU | of measured peak | peak GiB | first step s | loss |"


@dataclass(frozen=True)
class Variant:
    """How the step is run; ``kernel`` None is the plain step."""

    kernel: str | None
    compile: str = "off"
    graph: str = "off"

    @property
    def name(self) -> str:
        """For the table."""
        if self.kernel is None:
            return "plain"
        compiled = "" if self.compile == "off" else f", {self.compile} compiled"
        return self.kernel + compiled + ("" if self.graph == "off" else ", recorded")


@dataclass
class Measured:
    """Of one variant."""

    step_s: float
    first_s: float
    peak_gib: float
    loss: float


def main() -> int:
    """Print the table; 1 when a variant failed or has another loss."""
    arguments = _parse()
    device = torch.device(arguments.device)
    spec = smollm2_135m(tiny=arguments.tiny)
    choices = product(arguments.kernel, arguments.compile, arguments.graph)
    variants = [Variant(*choice) for choice in choices]
    if not arguments.no_plain and arguments.student in HYBRIDS:
        variants.append(Variant(None))
    size = 256 if arguments.tiny else 8192
    measured_tflops = product_tflops(device, size)
    peak = _peak_tflops(device) or measured_tflops
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shape = f"{arguments.rows} rows of {arguments.length} tokens"
    print(f"{machine}, torch {torch.__version__}, {shape}, peak {peak:.1f} TFLOP/s bf16")
    print(f"(a product of {size} x {size} x {size} reaches {measured_tflops:.1f})\n\n{HEAD}")
    print("|---" * HEAD.count(" |") + "|", flush=True)
    right: float | None = None
    bad = False
    for variant in variants:
        found = _try(variant, spec, arguments, device)
        if isinstance(found, str):
            bad = True
            print(f"| {variant.name} | failed: {found} |", flush=True)
            continue
        right = found.loss if right is None else right
        if not abs(found.loss - right) <= LOSS_TOLERANCE * abs(right):
            bad = True
            red = f"PARITY RED: loss {found.loss:.4f}, not {right:.4f}"
            print(f"| {variant.name} | {red} |", flush=True)
            continue
        rate = arguments.rows * arguments.length / found.step_s
        flops = step_flops(spec, student_config(spec, arguments.student), arguments.length)
        tflops = rate * flops / 1e12
        print(
            f"| {variant.name} | {rate:,.0f} | {found.step_s * 1e3:.1f} | {tflops / peak:.1%} | "
            f"{tflops / measured_tflops:.1%} | {found.peak_gib:.1f} | {found.first_s:.1f} | "
            f"{found.loss:.4f} |",
            flush=True,
        )
    return 1 if bad else 0


def _try(
    variant: Variant, spec: TeacherSpec, arguments: argparse.Namespace, device: torch.device
) -> Measured | str:
    """What was measured, or why nothing was; the models are gone afterwards."""
    try:
        with deadline(arguments.limit):
            return measure(variant, spec, arguments, device)
    except (Exception, TimeLimit) as error:
        return reason(error)
    finally:
        if variant.compile != "off":
            torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=["reference", "triton"] if gpu else ["reference"],
        choices=("auto", "reference", "triton"),
    )
    parser.add_argument("--compile", nargs="+", default=["off"], choices=("off", "layers"))
    parser.add_argument("--graph", nargs="+", default=["off"], choices=("off", "auto"))
    parser.add_argument("--no-plain", action="store_true", help="leave the plain step out")
    parser.add_argument("--student", default="hybrid", choices=(*HYBRIDS, "dreamer"))
    parser.add_argument("--release", type=float, default=1.0, help="Dreamer: share of routing")
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after three more")
    parser.add_argument("--limit", type=float, default=240, help="seconds a variant may take")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try this file")
    return parser.parse_args()


def measure(
    variant: Variant, spec: TeacherSpec, arguments: argparse.Namespace, device: torch.device
) -> Measured:
    """Build the models from the same seed and run the steps as `distill.trainer` does."""
    torch.manual_seed(0)
    objective = _objective(variant, spec, device, arguments.student)
    settings = objective.settings
    optimizer = build_optimizer(objective.parameter_groups(), settings, objective.module)
    gradients = Gradients(trainable(objective.module), optimizer)
    batch = random_batch(spec, arguments.rows, arguments.length, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    problems: list[str] = []

    def run(batch: Batch, progress: float) -> dict[str, Tensor]:
        with autocast(device, "bf16"):
            return objective.train_step(batch, lambda loss: loss.backward(), progress)

    passes = Passes(objective, on=variant.graph == "auto", say=problems.append)

    def step() -> Tensor:
        values = passes(run, batch, arguments.release)  # all of the steps release
        norms = gradients.clip(settings.clip_norm)
        if device.type == "cuda":
            gradients.guard(values["loss"], norms[NORM])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not passes.holds)
        return values["loss"]

    choice = Choice(variant.compile == "layers", "as asked")
    with dispatch.use(variant.kernel or "reference"), compiled(objective, choice, problems.append):
        begun = time.perf_counter()
        loss = float(step())
        first = time.perf_counter() - begun
        for _ in range(PLAIN):
            step()
        if problems:
            raise RuntimeError(problems[0])
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        synchronize(device)
        seconds = (time.perf_counter() - begun) / arguments.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return Measured(seconds, first, peak, loss)


def _objective(
    variant: Variant, spec: TeacherSpec, device: torch.device, kind: str
) -> LogitsObjective:
    """Teacher and student as stage `logits` has them."""
    teacher = LT2ForCausalLM(LT2Config.from_spec(spec)).to(device).eval().requires_grad_(False)
    config = student_config(spec, kind)
    student = build_student(teacher, config.mixers, {"dreamer": config.dreamer})
    student = own_copy(student, teacher).float().train()
    teacher = frozen_copy(teacher, torch.bfloat16)
    objective = PlainObjective if variant.kernel is None else LogitsObjective
    return objective(teacher, student, LogitsSettings(release_share=1.0))


def product_tflops(device: torch.device, size: int) -> float:
    """Speed of one large matrix product in bf16."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / median_ms(lambda: a @ a, device) / 1e9


def _peak_tflops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in PEAK_TFLOPS.items() if chip in name), None)


if __name__ == "__main__":
    sys.exit(main())
