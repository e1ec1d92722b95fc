"""Models, batch and arithmetic of the training step that `step.py` times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert import recipes
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.dreamer.build import dreamer_options
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.planning.work import forward_flops
from ltconvert.distill.selection.simple import uniform_layers


class PlainObjective(LogitsObjective):
    """The same loss from whole logits, attention without a mask (every row is one document)."""

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """One forward of each model, one backward."""
        with torch.no_grad():
            teacher_BTV = F.log_softmax(_logits(self.teacher, batch), -1, dtype=torch.float32)
        student_BTV = F.log_softmax(_logits(self.module, batch), -1, dtype=torch.float32)
        loss = F.kl_div(
            student_BTV.flatten(0, 1),
            teacher_BTV.flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        backward(loss)
        return {"loss": loss.detach()}


def _logits(model: LT2ForCausalLM, batch: Batch) -> Tensor:
    return model.logits(model.model(batch.input_ids_BT, use_cache=False).last_hidden_state)


def random_batch(spec: TeacherSpec, rows: int, length: int, device: torch.device) -> Batch:
    """Random tokens, each row one document without padding."""
    ids_BT = torch.randint(0, spec.vocab_size, (rows, length), device=device)
    return Batch(
        input_ids_BT=ids_BT,
        segment_ids_BT=torch.zeros_like(ids_BT, dtype=torch.int32),
        labels_BT=ids_BT.roll(-1, 1),
        keep_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        padded=False,
    )


def smollm2_135m(*, tiny: bool = False) -> TeacherSpec:
    """SmolLM2-135M's architecture, or a toy of the same kind."""
    layers, heads, kv_heads, width = (4, 2, 1, 16) if tiny else (30, 9, 3, 64)
    return TeacherSpec(
        family="llama",
        vocab_size=512 if tiny else 49152,
        hidden_size=heads * width,
        intermediate_size=64 if tiny else 1536,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        attention_scale=width**-0.5,
        rope={"default": {"rope_type": "default", "rope_theta": 100_000.0}},
        layer_rope=("default",) * layers,
        layer_windows=(None,) * layers,
        tie_word_embeddings=True,
    )


HYBRIDS = {"hybrid": "gdn", "hybrid-window": "gdn_window"}  # what three quarters of the layers are


def mixers_of(spec: TeacherSpec, other: str) -> list[str]:
    """A quarter of the layers stays full, evenly spaced."""
    full = uniform_layers(round(spec.num_layers / 4), spec.num_layers)
    return ["full" if i in full else other for i in range(spec.num_layers)]


def student_config(spec: TeacherSpec, kind: str) -> LT2Config:
    """A hybrid student, or the recipe's Dreamer."""
    if kind in HYBRIDS:
        return LT2Config.from_spec(spec, mixers_of(spec, HYBRIDS[kind]))
    settings = recipes.resolve("dreamer").student.model_dump()
    return LT2Config.from_spec(spec, dreamer=dreamer_options(spec, settings))


def step_flops(spec: TeacherSpec, config: LT2Config, length: int) -> float:
    """Of one token: the teacher forward, the student forward and backward."""
    teacher = model_facts(LT2Config.from_spec(spec))
    student = model_facts(config)
    return forward_flops(teacher, spec, length) + 3 * forward_flops(student, spec, length)
