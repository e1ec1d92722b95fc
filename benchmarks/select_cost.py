"""Cost of method `kl-fast` against one whole forward pass a changed layer.

    python benchmarks/select_cost.py --teacher smollm2-135m --rows 2 --length 256

Scores one batch with the prefix computed once and, for a few layers, with whole forward passes of
models of their own. No speed is reported when the two disagree.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import load_teacher
from ltconvert.convert.transfer import build_student, swapped
from ltconvert.distill.data import Batch, PackedStream
from ltconvert.distill.evaluation.scores import last_hidden
from ltconvert.distill.logits import frozen_copy
from ltconvert.distill.precision import pick_precision
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection import kl_fast
from ltconvert.distill.selection.partial import Progress
from ltconvert.distill.selection.probe import Probe
from ltconvert.distill.selection.result import Cost
from ltconvert.distill.stage import StageInputs
from ltconvert.kernels.linear_kl import linear_scores
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.stages import SelectSettings

PARITY_LAYERS = 3
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def main() -> int:
    """Print one JSON document; 1 when parity fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    precision, reason = pick_precision(device, arguments.precision)
    probe, batch = set_up(arguments, device, precision)
    sums, cost, seconds = fast(probe, batch)
    whole_seconds, worst = whole(probe, batch, sums)
    report: dict[str, Any] = {
        "teacher": arguments.teacher,
        "device": str(device),
        "precision": f"{precision} ({reason})",
        "batch_tokens": arguments.rows * arguments.length,
        "worst_relative_error": worst,
    }
    green = worst <= TOLERANCE[precision]
    if green:
        layers, loops = probe.num_layers, probe.teacher.config.num_loops
        report |= {
            "whole_forwards": cost.forwards,
            "forwards_a_direction": (cost.forwards - 2) / 2,
            "bound_a_direction": layers * (1 - 1 / (2 * loops)) + 1,
            "naive_forwards": 2 * layers + 2,
            "seconds_a_batch": round(seconds, 2),
            "seconds_a_batch_naive": round(whole_seconds * 2 * layers, 2),
        }
    else:
        report["parity"] = "red: no speed is reported"
    print(json.dumps(report, indent=1))
    return 0 if green else 1


def set_up(
    arguments: argparse.Namespace, device: torch.device, precision: str
) -> tuple[Probe, Batch]:
    """Teacher, its all-linear student as it starts, and one batch of text."""
    teacher = load_teacher(arguments.teacher, device=device)
    layers = teacher.spec.num_layers
    student = build_student(teacher.model, ["gdn"] * layers, share=True).requires_grad_(False)
    stream = PackedStream(
        DataSettings(),
        teacher.tokenizer,
        split="train",
        seq_len_tokens=arguments.length,
        rows=arguments.rows,
    )
    models = teacher.model, student
    if precision == "bf16":
        models = tuple(frozen_copy(model, torch.bfloat16) for model in models)
    inputs = StageInputs(
        teacher=teacher,
        recipe=SimpleNamespace(),
        student=student,
        tokenizer=teacher.tokenizer,
        log=RunLog(None, json=True),
        precision=precision,
        device=device,
    )
    batch = next(stream)
    probe = Probe(*models, 1, SelectSettings(), [batch], Progress(None, {}), Path(), inputs)
    return probe, batch


def fast(probe: Probe, batch: Batch) -> tuple[kl_fast.Sums, Cost, float]:
    """Scores, cost and seconds of one batch; a first one warms up."""
    for _ in range(2):
        sums, cost, start = kl_fast.Sums(), Cost(), time.perf_counter()
        with probe.inputs.log.bar("kl-fast", 2 * probe.num_layers, "layers") as bar:
            kl_fast.score_batch(probe, batch, sums, cost, bar)
    return sums, cost, time.perf_counter() - start


def whole(probe: Probe, batch: Batch, sums: kl_fast.Sums) -> tuple[float, float]:
    """Mean seconds of a changed model's whole pass with its KL, and the worst relative error."""
    teacher, student, layers = probe.teacher, probe.student, probe.num_layers
    batch = batch.to(probe.device)
    at_BT = (batch.labels_BT >= 0) & batch.keep_BT
    worst, seconds, count = 0.0, 0.0, 0

    def kl(model: LT2ForCausalLM, layer: int, mixer: Any) -> float:
        with swapped(model, layer, mixer):
            hidden_NC = last_hidden(model, batch)[at_BT]
        scores = linear_scores(
            hidden_NC, model.head_weight, target_NC, teacher.head_weight, batch.labels_BT[at_BT]
        )
        return float(scores.kl_N.double().sum())

    with probe.quiet_forward():
        target_NC = last_hidden(teacher, batch)[at_BT]
        for layer in range(0, layers, max(1, (layers - 1) // (PARITY_LAYERS - 1))):
            mixers = [model.model.layers[layer].mixer for model in (student, teacher)]
            start = time.perf_counter()
            found = kl(teacher, layer, mixers[0]), kl(student, layer, mixers[1])
            seconds += time.perf_counter() - start
            count += 2
            for one, other in zip(found, (sums.removed[layer], sums.restored[layer]), strict=True):
                worst = max(worst, abs(one - other) / max(abs(one), 1e-9))
    return seconds / count, worst


if __name__ == "__main__":
    sys.exit(main())
