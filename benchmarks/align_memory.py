"""Peak memory of stage `align` over that of its teacher.

    python benchmarks/align_memory.py --teacher smollm2-135m --rows 2 --length 256

Each line of the table is a process of its own: the teacher's forward pass alone, then two optimiser
steps of align with all layers at once and with fewer (``align.layers_at_once``), at its worst: the
last group, when the mixers of all other layers wait on disk. Counted is what comes on top
of the interpreter and its libraries: resident memory on a CPU, allocated memory on a GPU. Nothing
is reported when the local backward passes do not give the gradients of one whole loss.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.convert.transfer import build_student
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.calibrate import run_teacher
from ltconvert.distill.data import Batch
from ltconvert.distill.optim import build_optimizer
from ltconvert.distill.parking import Parking
from ltconvert.recipes.stages import AlignSettings

TOLERANCE = 1e-4
STEPS = 2


def main() -> int:
    """Print one JSON document; 1 when parity fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--mixer", default="gdn", choices=("gdn", "window"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--layers-at-once", type=int, nargs="*", default=[0, 8, 4, 2, 1])
    parser.add_argument("--measure", help="used by the benchmark itself: one line of the table")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments)))
        return 0
    lines = {name: _child(name) for name in ["parity", "forward"]}
    if lines["parity"]["worst_relative_error"] > TOLERANCE:
        print(f"parity failed: {lines['parity']}", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"arguments": vars(arguments), **lines, "align": {}}
    forward = lines["forward"]["peak_bytes"]
    for count in arguments.layers_at_once:
        line = _child(str(count))
        line["over_weights"] = line["peak_bytes"] / line["teacher_bytes"]
        line["over_forward"] = line["peak_bytes"] / forward
        report["align"]["all" if count == 0 else str(count)] = line
    print(json.dumps(report, indent=1))
    return 0


def _child(name: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--measure", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    device = torch.device(arguments.device)
    bare = _used(device)
    # On a GPU the weights are held in the run's precision, as the command line loads them.
    half = arguments.precision == "bf16" and device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    teacher = load_teacher(arguments.teacher, dtype=dtype, device=device)
    _reset_peak(device)
    shape = (arguments.rows, arguments.length)
    ids_BT = torch.randint(0, teacher.spec.vocab_size, shape, device=device)
    batch = Batch(
        ids_BT,
        torch.zeros(shape, dtype=torch.int32, device=device),
        ids_BT,
        torch.ones(shape, dtype=torch.bool, device=device),
    )
    if arguments.measure == "parity":
        return {"worst_relative_error": parity(teacher, batch, arguments.mixer)}
    bf16 = arguments.precision == "bf16"
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        if arguments.measure == "forward":
            run_teacher(teacher.model, batch, len(teacher.model.model.schedule))
        else:
            _train(teacher, batch, arguments.mixer, int(arguments.measure))
    weights = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
    return {"peak_bytes": _peak(device) - bare, "teacher_bytes": weights}


def _student(teacher: Teacher, mixer: str) -> LT2ForCausalLM:
    student = build_student(teacher.model, [mixer] * teacher.spec.num_layers, share=True)
    for layer in student.model.layers:
        layer.mixer.float()
    return student


def _train(teacher: Teacher, batch: Batch, mixer: str, layers_at_once: int) -> None:
    """Two steps on the last group of layers, then all mixers together as at the stage's end."""
    student = _student(teacher, mixer)
    layers = list(range(teacher.spec.num_layers))[-layers_at_once:]
    folder = tempfile.TemporaryDirectory()
    parking = Parking(student, Path(folder.name) / "parked", batch.keep_BT.device)
    parking.leave(set(range(teacher.spec.num_layers)) - set(layers))
    _reset_peak(batch.keep_BT.device)
    objective = AlignObjective(teacher.model, student, layers)
    optimizer = build_optimizer(objective.parameter_groups(), AlignSettings(), objective.module)
    for _ in range(STEPS):
        objective.train_step(batch, lambda loss: loss.backward(), 0.0)
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    parking.close()


def parity(teacher: Teacher, batch: Batch, mixer: str) -> float:
    """Largest error of a mixer's gradient by local backwards against one global loss, relative."""
    student = _student(teacher, mixer)
    objective = AlignObjective(teacher.model, student, [0, teacher.spec.num_layers - 1])
    objective.train_step(batch, lambda loss: loss.backward(), 0.0)
    local = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    losses: list[torch.Tensor] = []
    objective.train_step(batch, losses.append, 0.0)
    torch.stack(losses).sum().backward()
    whole = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    return max(float((local[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in whole.items())


def _used(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated())
    return _status("VmRSS")


def _reset_peak(device: torch.device) -> None:
    """Forget what loading took; Linux only on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return _status("VmHWM")


def _status(name: str) -> int:
    """A size from /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
