"""Stage `align`: every student mixer learns what the teacher's attention adds to the residual stream.

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
from ltconvert.distill.data import Batch
from ltconvert.distill.losses import contribution_loss, kept_squares
from ltconvert.distill.resume import clean_up
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.distill.trainer import TrainResult
from ltconvert.recipes.schema import AlignSettings

CALIBRATION_BATCHES = 4


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
        """One pass of the teacher; ``backward`` is called once a visit. ``progress`` is not used."""
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
        """Error of one visit: ``inputs`` are what the teacher's mixer got, ``output`` its answer."""
        block = self.module.model.layers[layer]
        x_BTC, context, *_ = inputs
        with torch.no_grad():
            target_BTC = block.mixer_contribution(output)
        return contribution_loss(block.mixer_contribution(block.mixer(x_BTC, context)), target_BTC, keep_BT)


def is_converted(student: LT2ForCausalLM, layer: int) -> bool:
    """Whether the layer's mixer is not the teacher's own attention."""
    return student.config.mixers[layer] != "full"


@torch.no_grad()
def run_teacher(teacher: LT2ForCausalLM, batch: Batch, end_slot: int) -> None:
    """Run the first ``end_slot`` visits of the teacher, for its hooks alone."""
    model = teacher.model
    padded = not bool(batch.keep_BT.all())
    h_BTC = model.embed(batch.input_ids_BT)
    context = model.context(
        h_BTC,
        attention_mask=batch.keep_BT if padded else None,
        segment_ids=batch.segment_ids_BT,
    )
    model.run(model.start(h_BTC), context, last_slot=end_slot)


@contextmanager
def _watching(
    teacher: LT2ForCausalLM, layers: Sequence[int], visit: Callable[[int, tuple[Any, ...], Tensor], None]
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


@torch.no_grad()
def calibrate(
    teacher: LT2ForCausalLM, student: LT2ForCausalLM, batches: Sequence[Batch], layers: Sequence[int]
) -> None:
    """Start output norms at the size of the teacher's heads.

    A `gdn` mixer normalises every head before the output projection, so that at its start a head
    that hardly speaks in the teacher would shout. The norm's weight, channel by channel, becomes
    the root mean square of the teacher's attention output before the output projection, over all
    kept tokens and loops. Mixers without such a norm stay as they are.
    """
    wanted = [i for i in layers if hasattr(student.model.layers[i].mixer, "out_norm_weight")]
    squares: dict[int, Tensor] = {}
    counts = dict.fromkeys(wanted, 0)
    with ExitStack() as stack:
        for layer in wanted:

            def hook(module: nn.Module, inputs: tuple[Any, ...], layer: int = layer) -> None:
                squares[layer] = squares.get(layer, 0.0) + kept_squares(inputs[0], batch.keep_BT)
                counts[layer] += int(batch.keep_BT.sum())

            handle = teacher.model.layers[layer].mixer.o_proj.register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        for batch in batches:
            run_teacher(teacher, batch, len(teacher.model.schedule))
    for layer in wanted:
        weight = student.model.layers[layer].mixer.out_norm_weight
        rms = (squares[layer] / max(counts[layer], 1)).sqrt()
        weight.copy_(rms.view_as(weight))


def run(settings: AlignSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Align the mixers of ``inputs.student``, which is changed; resumes from ``stage_dir`` by itself.

    With ``layers_at_once`` the layers train in groups, one after the other, each over the same data:
    gradients and optimiser state exist for one group, and on a GPU the other groups' mixers wait in
    the host's memory. The teacher stops after the group's last layer.
    """
    student = inputs.student
    layers = [i for i in range(len(student.model.layers)) if is_converted(student, i)]
    size = settings.layers_at_once or max(len(layers), 1)
    groups = [layers[i : i + size] for i in range(0, len(layers), size)]
    facts: dict[str, Any] = {"tokens": 0, "steps": 0, "seconds": 0.0}
    for layer in layers:
        _park(student, layer, inputs, active=len(groups) == 1)
    for group in groups:
        whole = len(groups) == 1
        folder = stage_dir if whole else stage_dir / f"layers_{group[0]}_{group[-1]}"
        name = "align" if whole else f"align {group[0]}-{group[-1]}"
        for layer in group:
            _park(student, layer, inputs, active=True)
        trained = _run_group(settings, inputs, group, folder, name)
        for layer in group:
            _park(student, layer, inputs, active=whole)
        facts = {
            "tokens": max(facts["tokens"], trained.tokens),
            "steps": facts["steps"] + trained.steps,
            "seconds": facts["seconds"] + trained.seconds,
        }
    student.to(inputs.device)
    return StageResult(student.requires_grad_(False), facts=facts | {"groups": len(groups)})


def _run_group(
    settings: AlignSettings, inputs: StageInputs, layers: Sequence[int], folder: Path, name: str
) -> TrainResult:
    """Calibrate and train the mixers of some layers over the whole token budget."""
    objective = AlignObjective(inputs.teacher.model, inputs.student, layers, lr=settings.lr)
    # A checkpoint holds what calibration changed.
    if settings.calibrate and not clean_up(folder):
        batches = [batch.to(inputs.device) for batch in islice(inputs.stream(settings), CALIBRATION_BATCHES)]
        with inputs.autocast():
            calibrate(inputs.teacher.model, inputs.student, batches, layers)
    return inputs.train(objective, settings, folder, name)


def _park(student: LT2ForCausalLM, layer: int, inputs: StageInputs, *, active: bool) -> None:
    """A mixer that trains is in fp32 on the device; one that waits is in the host's memory."""
    mixer = student.model.layers[layer].mixer
    if active:
        mixer.to(device=inputs.device, dtype=torch.float32)
    else:
        mixer.to("cpu")
