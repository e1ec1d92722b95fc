"""Stage `align`: student mixers learn what the teacher's attention adds to the residual stream.

The frozen teacher runs once and feeds itself (teacher forcing). Whenever it visits a layer, the
student's mixer reads the same input and its contribution, post norm included where the family has
one, is compared with the teacher's. Each visit runs its own backward at once, so that one mixer's
activations exist at a time, whatever the depth and the number of loops; the gradients of a looped
layer add up over its visits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.students.blocks import DecoderLayer, show_layer
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.calibrate import calibrate
from ltconvert.distill.data import Batch
from ltconvert.distill.losses import contribution_loss
from ltconvert.distill.objective import Wrap
from ltconvert.distill.parking import Parking
from ltconvert.distill.rehearsal import rehearsing
from ltconvert.distill.resume import clean_up
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.distill.trainer import TrainResult
from ltconvert.recipes.stages import AlignSettings

CALIBRATION_BATCHES = 4
PARKED_FOLDER = "parked"


class AlignObjective:
    """Loss ``mean over visits of contribution_loss`` with a local backward a visit.

    Mixers that choose keys add ``choice_weight`` times the loss of what chooses, over all keys.

    Args:
        teacher: frozen; all its layers run, up to the last one in ``layers``.
        student: built with ``share=True``; only the mixers of ``layers`` train.
        layers: physical layers whose mixers train; those that are full in the student are left out.

    Attributes:
        rehearsal: the thread that rehearses, if one does, see ``rehearsal``.
    """

    rehearsal: Thread | None = None

    def __init__(
        self,
        teacher: LT2ForCausalLM,
        student: LT2ForCausalLM,
        layers: Sequence[int] | None = None,
        *,
        lr: float = 1e-3,
        choice_weight: float = 1.0,
    ) -> None:
        self.teacher, self.module, self.lr = teacher, student, lr
        self.choice_weight = choice_weight
        self._show, self._error = show_layer, mixer_error
        chosen = range(len(student.model.layers)) if layers is None else layers
        self.layers = [i for i in chosen if is_converted(student, i)]
        self.chooses = any(student.model.layers[i].mixer.chooses for i in self.layers)
        student.requires_grad_(False)
        for layer in self.layers:
            for parameter in student.model.layers[layer].mixer.aligned_parameters():
                parameter.requires_grad_(True)
        schedule = teacher.model.schedule
        visits = [step.slot for step in schedule if step.layer in set(self.layers)]
        self.num_visits = len(visits)
        self.end_slot = max(visits, default=-1) + 1

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All mixers, one learning rate."""
        mixers = [self.module.model.layers[i].mixer for i in self.layers]
        params = [parameter for mixer in mixers for parameter in mixer.aligned_parameters()]
        return [{"name": "mixers", "params": params, "lr": self.lr}]

    def compile_with(self, wrap: Wrap) -> None:
        """The teacher's layers, and the comparison of a mixer with its forward pass."""
        self._show, self._error = wrap(show_layer), wrap(mixer_error)

    def work(self, progress: float) -> Hashable | None:
        """The same in all steps; nothing is recorded beside a rehearsal.

        A parameter in the graphs of both has its gradient added up on the stream of the earlier
        one, which a recording must not wait for.
        """
        return None if self.rehearsal is not None and self.rehearsal.is_alive() else ()

    def rehearse(self, batch: Batch) -> None:
        """Both passes of one layer of each make, uncompiled; no gradient is kept."""
        mixers = self.module.config.mixers
        firsts = sorted({mixers[i]: i for i in reversed(self.layers)}.values())
        part = copy.copy(self)
        part.layers, part._show, part._error = firsts, show_layer, mixer_error
        part.end_slot = (
            next(s.slot for s in self.teacher.model.schedule if s.layer == firsts[-1]) + 1
        )
        trained = [p for group in part.parameter_groups() for p in group["params"]]

        def backward(loss: Tensor) -> None:
            torch.autograd.grad(loss, trained, allow_unused=True)

        part.train_step(batch, backward, 0.0)

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """One pass of the teacher; ``backward`` is called once a visit of a layer."""
        model, pupil = self.teacher.model, self.module.model
        total = torch.zeros((), device=batch.input_ids_BT.device)
        choices = torch.zeros_like(total)
        with torch.no_grad():
            h_BTC = model.embed(batch.input_ids_BT)
            context = model.context(
                h_BTC, attention_mask=batch.mask_BT, segment_ids=batch.segment_ids_BT
            )
            if self._error is not mixer_error:
                context.prepare(model.windows() | pupil.windows())
            state = model.start(h_BTC)
        for step in model.schedule[: self.end_slot]:
            with torch.no_grad():
                state = model.enter(step, state, context)
                layer, here = model.layers[step.layer], model.context_of(step, context)
                h_BTC, x_BTC, y_BTC = self._show(layer, state.h_BTC, here)
                state = model.leave(step, state.with_stream(h_BTC))
            if step.layer not in self.layers:
                continue
            own = pupil.layers[step.layer]
            here = pupil.context_of(step, context)
            error, choice = self._error(own, x_BTC, y_BTC, here, batch.mask_BT)
            loss = error / self.num_visits
            if choice is not None:
                choices = choices + choice.detach() / self.num_visits
                loss = loss + self.choice_weight * choice / self.num_visits
            backward(loss)
            total = total + loss.detach()
        return {"loss": total, **({"choice": choices} if self.chooses else {})}


def mixer_error(
    block: DecoderLayer,
    x_BTC: Tensor,
    y_BTC: Tensor,
    context: SequenceContext,
    keep_BT: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Error of one visit: ``x_BTC`` went into the teacher's mixer, ``y_BTC`` came out.

    And the loss of what chooses the mixer's keys, over all of them; None where nothing does.
    """
    with torch.no_grad():
        target_BTC = block.mixer_contribution(y_BTC, context.loop)
    own_BTC, choice = block.mixer.forward_with_loss(x_BTC, context, "all")
    guess_BTC = block.mixer_contribution(own_BTC, context.loop)
    return contribution_loss(guess_BTC, target_BTC, keep_BT), choice


def is_converted(student: LT2ForCausalLM, layer: int) -> bool:
    """Whether the layer's mixer stands for the teacher's attention."""
    return bool(student.model.layers[layer].mixer.converted)


def run(settings: AlignSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Align the mixers of ``inputs.student`` in place; resumes from ``stage_dir`` by itself.

    With ``layers_at_once`` the layers train in groups, one after the other, each over the same
    data: mixers, gradients and optimiser state stand in memory for one group, the other mixers
    wait on disk. The teacher stops after the group's last layer.
    """
    student = inputs.student
    layers = [i for i in range(len(student.model.layers)) if is_converted(student, i)]
    for layer in layers:
        student.model.layers[layer].mixer.float()
    size = settings.layers_at_once or max(len(layers), 1)
    groups = [layers[i : i + size] for i in range(0, len(layers), size)]
    if len(groups) < 2:
        results = [_train_group(settings, inputs, group, stage_dir, "align") for group in groups]
    else:
        results = list(_in_turn(settings, inputs, groups, stage_dir))
    facts = {
        "tokens": max((result.tokens for result in results), default=0),
        "steps": sum(result.steps for result in results),
        "seconds": sum(result.seconds for result in results),
        "groups": len(groups),
    }
    return StageResult(student.requires_grad_(False), facts=facts)


def _in_turn(
    settings: AlignSettings, inputs: StageInputs, groups: Sequence[list[int]], stage_dir: Path
) -> Iterator[TrainResult]:
    """Train one group of layers after the other; all others wait on disk."""
    parking = Parking(inputs.student, stage_dir / PARKED_FOLDER, inputs.device)
    parking.leave(layer for group in groups for layer in group)
    for group in groups:
        parking.fetch(group)
        span = f"{group[0]}-{group[-1]}"
        yield _train_group(settings, inputs, group, stage_dir / f"layers_{span}", f"align {span}")
        parking.leave(group)
    parking.close()


def _train_group(
    settings: AlignSettings, inputs: StageInputs, layers: Sequence[int], folder: Path, name: str
) -> TrainResult:
    """Calibrate and train the mixers of some layers over the whole token budget."""
    objective = AlignObjective(
        inputs.teacher.model,
        inputs.student,
        layers,
        lr=settings.lr,
        choice_weight=settings.choice_weight,
    )
    # A checkpoint holds what calibration changed.
    if settings.calibrate and not clean_up(folder):
        # The same rows in every process, so that all start from the same mixers.
        rows = islice(inputs.stream(settings, own=False), CALIBRATION_BATCHES)
        batches = [batch.to(inputs.device) for batch in rows]
        with inputs.autocast():
            calibrate(inputs.teacher.model, inputs.student, batches, layers)
    with rehearsing(objective, settings, inputs):
        return inputs.train(objective, settings, folder, name)
