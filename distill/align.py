"""Stage `align`: student mixers learn what the teacher's attention adds to the residual stream.

The frozen teacher runs once and feeds itself (teacher forcing). Whenever it visits a layer, the
student's mixer reads the same input and its contribution, post norm included where the family has
one, is compared with the teacher's. Each visit runs its own backward at once, so that one mixer's
activations exist at a time, whatever the depth and the number of loops; the gradients of a looped
layer add up over its visits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.calibrate import calibrate, run_teacher
from ltconvert.distill.data import Batch
from ltconvert.distill.losses import contribution_loss
from ltconvert.distill.parking import Parking
from ltconvert.distill.resume import clean_up
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.distill.trainer import TrainResult
from ltconvert.recipes.schema import AlignSettings

CALIBRATION_BATCHES = 4
PARKED_FOLDER = "parked"


class AlignObjective:
    """Loss ``mean over visits of contribution_loss`` with a local backward a visit.

    Args:
        teacher: frozen; all its layers run, up to the last one in ``layers``.
        student: built with ``share=True``; only the mixers of ``layers`` train.
        layers: physical layers whose mixers train; those that are full in the student are left out.
    """

    def __init__(
        self,
        teacher: LT2ForCausalLM,
        student: LT2ForCausalLM,
        layers: Sequence[int] | None = None,
        *,
        lr: float = 1e-3,
    ) -> None:
        self.teacher, self.module, self.lr = teacher, student, lr
        chosen = range(len(student.model.layers)) if layers is None else layers
        self.layers = [i for i in chosen if is_converted(student, i)]
        student.requires_grad_(False)
        for layer in self.layers:
            student.model.layers[layer].mixer.requires_grad_(True)
        schedule = teacher.model.schedule
        visits = [step.slot for step in schedule if step.layer in set(self.layers)]
        self.num_visits = len(visits)
        self.end_slot = max(visits, default=-1) + 1

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All mixers, one learning rate."""
        mixers = [self.module.model.layers[i].mixer for i in self.layers]
        params = [parameter for mixer in mixers for parameter in mixer.parameters()]
        return [{"name": "mixers", "params": params, "lr": self.lr}]

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """One pass of the teacher; ``backward`` is called once a visit of a layer."""
        total = torch.zeros((), device=batch.input_ids_BT.device)

        def visit(layer: int, inputs: tuple[Any, ...], output: Tensor) -> None:
            nonlocal total
            with torch.enable_grad():
                loss = self.visit_loss(layer, inputs, output, batch.keep_BT) / self.num_visits
                backward(loss)
            total = total + loss.detach()

        with _watching(self.teacher, self.layers, visit):
            run_teacher(self.teacher, batch, self.end_slot)
        return {"loss": total}

    def visit_loss(
        self, layer: int, inputs: tuple[Any, ...], output: Tensor, keep_BT: Tensor
    ) -> Tensor:
        """Error of one visit: ``inputs`` went into the teacher's mixer, ``output`` came out."""
        block = self.module.model.layers[layer]
        x_BTC, context, *_ = inputs
        with torch.no_grad():
            target_BTC = block.mixer_contribution(output)
        return contribution_loss(
            block.mixer_contribution(block.mixer(x_BTC, context)), target_BTC, keep_BT
        )


def is_converted(student: LT2ForCausalLM, layer: int) -> bool:
    """Whether the layer's mixer is not the teacher's own attention."""
    return bool(student.model.layers[layer].mixer.kind != "full")


@contextmanager
def _watching(
    teacher: LT2ForCausalLM,
    layers: Sequence[int],
    visit: Callable[[int, tuple[Any, ...], Tensor], None],
) -> Iterator[None]:
    """Call ``visit(layer, inputs of the mixer, output)`` whenever the teacher runs such a mixer."""
    with ExitStack() as stack:
        for layer in layers:

            def hook(
                module: nn.Module, inputs: tuple[Any, ...], output: Tensor, layer: int = layer
            ) -> None:
                visit(layer, inputs, output)

            handle = teacher.model.layers[layer].mixer.register_forward_hook(hook)
            stack.callback(handle.remove)
        yield


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
    objective = AlignObjective(inputs.teacher.model, inputs.student, layers, lr=settings.lr)
    # A checkpoint holds what calibration changed.
    if settings.calibrate and not clean_up(folder):
        # The same rows in every process, so that all start from the same mixers.
        rows = islice(inputs.stream(settings, own=False), CALIBRATION_BATCHES)
        batches = [batch.to(inputs.device) for batch in rows]
        with inputs.autocast():
            calibrate(inputs.teacher.model, inputs.student, batches, layers)
    return inputs.train(objective, settings, folder, name)
