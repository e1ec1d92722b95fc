"""What the tests of selection share: packed rows, models, a probe, and KLs of whole forwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.data import Batch
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.partial import Progress
from ltconvert.distill.selection.probe import Probe
from ltconvert.distill.stage import StageInputs
from ltconvert.recipes.stages import SelectSettings


def packed(rows: int = 2, length: int = 17, seed: int = 1, padding: int = 0) -> Batch:
    """Random rows of two documents each, padded at the end of the last."""
    ids_BT = tokens(rows, length, seed)
    segments_BT = (torch.arange(length) >= 7).int().repeat(rows, 1)
    keep_BT = torch.ones(rows, length, dtype=torch.bool)
    if padding:
        keep_BT[-1, -padding:] = False
        segments_BT[-1, -padding:] = 2
    labels_BT = torch.where(segments_BT == segments_BT.roll(-1, 1), ids_BT.roll(-1, 1), -100)
    labels_BT[:, -1] = 5
    labels_BT[~keep_BT] = -100
    return Batch(ids_BT, segments_BT, labels_BT, keep_BT)


def pair(family: str = "llama", **changes: Any) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    """A random teacher and its all-linear student with mixers moved away from the start."""
    teacher = tiny_model(tiny_spec(family, **changes)).requires_grad_(False)
    student = build_student(teacher, ["gdn"] * len(teacher.model.layers), share=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in student.model.layers:
            for parameter in layer.mixer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return teacher, student.eval()


def probe(
    teacher: LT2ForCausalLM,
    student: LT2ForCausalLM,
    batches: Sequence[Batch],
    *,
    keep: int = 1,
    path: Path | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Probe:
    """What a method gets, without a recipe."""
    inputs = StageInputs(
        teacher=SimpleNamespace(model=teacher),
        recipe=None,
        student=student,
        tokenizer=tokenizer,
        log=RunLog(None),
        precision="fp32",
        device=torch.device("cpu"),
    )
    plain = SelectSettings(**{"stable_rounds": 99, "direction": "both"} | settings)
    return Probe(teacher, student, keep, plain, batches, Progress(path, {}), Path(), inputs)


def log_probs(model: LT2ForCausalLM, batch: Batch) -> Tensor:
    """fp64 [N, V] at the tokens that have a successor, from one whole forward."""
    with torch.no_grad():
        logits = model(
            batch.input_ids_BT, attention_mask=batch.keep_BT, segment_ids=batch.segment_ids_BT
        ).logits
    return logits[batch.labels_BT != -100].double().log_softmax(-1)


def kl(teacher: LT2ForCausalLM, model: LT2ForCausalLM, batches: Sequence[Batch]) -> float:
    """Mean KL(teacher || model) a token."""
    values = []
    for batch in batches:
        p, q = log_probs(teacher, batch), log_probs(model, batch)
        values.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(values).mean())


def hybrid(teacher: LT2ForCausalLM, student: LT2ForCausalLM, full: Sequence[int]) -> LT2ForCausalLM:
    """A model of its own with full attention in ``full`` and the student's mixers elsewhere."""
    count = len(teacher.model.layers)
    model = build_student(teacher, ["full" if i in full else "gdn" for i in range(count)])
    for layer in set(range(count)) - set(full):
        source = student.model.layers[layer].mixer
        model.model.layers[layer].mixer.load_state_dict(source.state_dict())
    return model.eval()


class Visits:
    """Counts the layers that a model runs."""

    def __init__(self, *models: LT2ForCausalLM) -> None:
        self.count = 0
        for model in models:
            for layer in model.model.layers:
                layer.register_forward_hook(self._tick)

    def _tick(self, *_: Any) -> None:
        self.count += 1
