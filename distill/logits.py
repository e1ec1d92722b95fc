"""Stage `logits`: all parameters of the student learn the teacher's next-token distribution.

Both models hand over their final hidden states; the divergence is computed head and all in chunks
(``kernels.linear_kl``), so the logits of the two models never stand in memory whole. Every token
counts that is no padding, to the end of the row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ltconvert.convert.students.blocks import run_choosing_layer, run_layer
from ltconvert.convert.students.depth_layer import DepthCall
from ltconvert.convert.students.dreamer.router import Routes
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.align import is_converted
from ltconvert.distill.data import Batch
from ltconvert.distill.data.batch import IGNORED
from ltconvert.distill.objective import Wrap
from ltconvert.distill.routing import Release
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.kernels.linear_kl import LinearKL, linear_kl
from ltconvert.recipes.stages import LogitsSettings


class LogitsObjective:
    """``kl_weight * KL + ce_weight * CE`` per token, all parameters of the student train.

    A looped student learns the KL of every loop (its loop t against the teacher's loop t) during
    ``loop_warmup_share`` of the steps, and that of the last loop alone from then on. Mixers that
    choose keys add ``choice_weight`` times the loss of what chooses, over the chosen ones. Where
    layers read a depth stream, the schedule of their merge goes from 0 to 1, steadily, during
    ``depth_warmup_share`` of the steps; so does the routing of a Dreamer during ``release_share``.

    Args:
        teacher: frozen; runs without gradients.
        student: shares no tensor with the teacher.
    """

    release: Release | None = None  # of a Dreamer's routing

    def __init__(
        self, teacher: LT2ForCausalLM, student: LT2ForCausalLM, settings: LogitsSettings
    ) -> None:
        self.teacher, self.module, self.settings = teacher, student, settings
        student.requires_grad_(True)
        # The exit gate does not enter the loss: left trainable, it would only be decayed.
        if student.model.exit_gate is not None:
            student.model.exit_gate.requires_grad_(False)
        if student.model.dreamer is not None:
            shares = settings.release_share, settings.balance_rate
            self.release = Release(student.model.dreamer, *shares)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Converted mixers and what a depth stream or a Dreamer needs at ``mixer_lr``; everything
        else, kept attention too, at ``lr``.
        """
        layers = self.module.model.layers
        mixers = [
            parameter
            for i, layer in enumerate(layers)
            if is_converted(self.module, i)
            for parameter in layer.mixer.parameters()
        ]
        if self.release is not None:
            mixers += self.release.layer.new_parameters()
        else:
            mixers += [p for name, p in self.module.named_parameters() if "depth_" in name]
        own = {id(parameter) for parameter in mixers}
        rest = [p for p in self.module.parameters() if p.requires_grad and id(p) not in own]
        groups = [
            {"name": "mixers", "params": mixers, "lr": self.settings.mixer_lr},
            {"name": "rest", "params": rest, "lr": self.settings.lr},
        ]
        return [group for group in groups if group["params"]]

    def compile_with(self, wrap: Wrap) -> None:
        """The layers of both models, or the parts of a Dreamer's."""
        self.teacher.model.call_layer = self.module.model.call_layer = wrap(run_layer)
        self.module.model.call_choosing_layer = wrap(run_choosing_layer)
        self.module.model.call_depth_layer = DepthCall(wrap)
        if self.release is not None:
            self.release.layer.compile_with(wrap)

    def work(self, progress: float) -> Hashable | None:
        """Which loops are compared. Nothing is recorded while a depth stream is merged in, nor of a
        Dreamer, which sorts its tokens by what they chose.
        """
        merging = self.module.model.depth_plan is not None and self._merged(progress) < 1
        if merging or self.release is not None:
            return None
        return progress < self.settings.loop_warmup_share

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """One forward of each model, one backward; ``loss``, ``kl``, ``ce`` in nats a token."""
        self.move_schedules(progress)
        with torch.no_grad():
            teacher = _hidden(self.teacher, batch)
        student = _hidden(self.module, batch, learns_choice=True)
        last = self._compare(student.last_BTC, teacher.last_BTC, batch)
        loss = last.loss
        if progress < self.settings.loop_warmup_share:
            loss = loss + self._earlier_loops(student, teacher, batch)
        values = {"kl": last.kl, "ce": last.ce}
        if self.release is not None:
            values |= self.release.count(student.routes, batch.mask_BT)
        if student.choice is not None:
            loss = loss + self.settings.choice_weight * student.choice
            values["choice"] = student.choice.detach()
        backward(loss)
        return {"loss": loss.detach(), **values}

    def move_schedules(self, progress: float) -> None:
        """Set what is merged in or released, if anything, to where it is at ``progress``."""
        if self.release is not None:
            self.release.begin(progress)
        if self.module.model.depth_plan is not None:
            self.module.model.depth_schedule.fill_(self._merged(progress))

    def _merged(self, progress: float) -> float:
        """Share of the depth stream at ``progress``."""
        share = self.settings.depth_warmup_share
        return min(1.0, progress / share) if share else 1.0

    def _earlier_loops(self, student: Hidden, teacher: Hidden, batch: Batch) -> Tensor | float:
        """Sum of the KL of all loops but the last; nothing where the two loop differently."""
        if len(student.loops_BTC) != len(teacher.loops_BTC):
            return 0.0
        pairs = zip(student.loops_BTC[:-1], teacher.loops_BTC[:-1], strict=True)
        return sum((self._compare(s, t, batch, ce=False).loss for s, t in pairs), start=0.0)

    def _compare(
        self, student_BTC: Tensor, teacher_BTC: Tensor, batch: Batch, *, ce: bool = True
    ) -> LinearKL:
        """KL (and CE) of two hidden states through the models' own heads, both a kept token.

        A token without a next one adds nothing to the CE, but counts: the mean over labelled tokens
        alone would weigh them by how many others their micro-batch has.
        """
        settings, mask_BT = self.settings, batch.mask_BT
        heads = self.module.head_weight, self.teacher.head_weight
        labels_N = batch.labels_BT.flatten() if ce and settings.ce_weight else None
        found = linear_kl(
            student_BTC.flatten(0, 1),
            heads[0],
            teacher_BTC.flatten(0, 1),
            heads[1],
            mask_N=None if mask_BT is None else mask_BT.flatten(),
            labels_N=labels_N,
            temperature=settings.temperature,
            divergence=settings.divergence,
            beta=settings.jsd_beta,
            kl_weight=settings.kl_weight,
            ce_weight=settings.ce_weight if ce else 0.0,
            student_softcap=self.module.config.final_softcap,
            teacher_softcap=self.teacher.config.final_softcap,
            reduction="sum",
            vocab_size=min(head.shape[0] for head in heads),
        )
        kept = batch.labels_BT.numel() if mask_BT is None else mask_BT.sum().clamp(min=1)
        labelled = 0 if labels_N is None else (labels_N != IGNORED).sum()
        return found._replace(loss=found.loss / kept, ce=found.ce * labelled / kept)


class Hidden(NamedTuple):
    """What the head reads, the same after every loop, the loss of what chooses keys, routes."""

    last_BTC: Tensor
    loops_BTC: tuple[Tensor, ...]
    choice: Tensor | None
    routes: tuple[tuple[Routes, Routes], ...]


def _hidden(model: LT2ForCausalLM, batch: Batch, *, learns_choice: bool = False) -> Hidden:
    """Hidden states of a packed batch."""
    output = model.model(
        batch.input_ids_BT,
        attention_mask=batch.mask_BT,
        segment_ids=batch.segment_ids_BT,
        use_cache=False,
        learns_choice=learns_choice,
    )
    last_BTC, loops_BTC = output.last_hidden_state, output.loop_states
    return Hidden(last_BTC, loops_BTC, output.choice_loss, output.routes or ())


def frozen_copy(model: LT2ForCausalLM, dtype: torch.dtype) -> LT2ForCausalLM:
    """The model with its linear layers' weights in ``dtype`` and every other tensor shared with it.

    For runs under autocast to ``dtype``: no bit of any result changes, since autocast would round
    the same weights the same way on every use, and that rounding is saved. Embeddings, norms and a
    tied head keep their precision. Of no use outside autocast.
    """
    embedding = model.model.embed_tokens.weight
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding:
            for parameter in module.parameters():
                rounded = parameter.detach().to(dtype)
                memo[id(parameter)] = nn.Parameter(rounded, requires_grad=False)
    return copy.deepcopy(model, memo)


def own_copy(student: LT2ForCausalLM, teacher: LT2ForCausalLM) -> LT2ForCausalLM:
    """The student with copies of the tensors that it shares with the teacher; the others move."""
    shared = {parameter.data_ptr() for parameter in teacher.parameters()}
    memo: dict[int, Any] = {id(p): p for p in student.parameters() if p.data_ptr() not in shared}
    return copy.deepcopy(student, memo)


def prepare(inputs: StageInputs, settings: LogitsSettings) -> LogitsObjective:
    """The objective on a student that shares nothing with the teacher, in fp32."""
    teacher = inputs.teacher.model
    student = own_copy(inputs.student, teacher).float().train()
    if inputs.precision == "bf16":
        teacher = frozen_copy(teacher, torch.bfloat16)
    student.model.gradient_checkpointing = settings.gradient_checkpointing
    return LogitsObjective(teacher, student, settings)


def run(
    settings: LogitsSettings, inputs: StageInputs, stage_dir: Path, *, stage: str = "logits"
) -> StageResult:
    """Distil the teacher's logits into ``inputs.student``; resumes from ``stage_dir`` by itself.

    What the student does not share with the teacher is trained in place.
    """
    objective = prepare(inputs, settings)
    trained = inputs.train(objective, settings, stage_dir, stage)
    facts = {"tokens": trained.tokens, "steps": trained.steps, "seconds": trained.seconds}
    return StageResult(finished(objective), facts=facts)


def finished(objective: LogitsObjective) -> LT2ForCausalLM:
    """The student after training, with everything that was merged in or released wholly so."""
    objective.move_schedules(1.0)
    objective.module.model.gradient_checkpointing = False
    return objective.module.eval().requires_grad_(False)
