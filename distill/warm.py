"""Compiling the Triton kernels of a stage while its first step gets under way.

A step on fake tensors, in a thread: shapes, dtypes and strides are those of the stage, values and
memory there are none. `kernels.ahead` compiles what such a step would launch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.objective import Objective
from ltconvert.distill.precision import autocast
from ltconvert.distill.processes import rank_and_world
from ltconvert.errors import first_line
from ltconvert.kernels import dispatch
from ltconvert.kernels.ahead import compiling_ahead

if TYPE_CHECKING:
    from ltconvert.convert.students.loop import Step
    from ltconvert.convert.students.lt2_model import LT2Model


@contextmanager
def warming(
    objective: Objective,
    shape_BT: tuple[int, int],
    device: torch.device,
    precision: str,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Compile the kernels of an objective's steps in the background, on a GPU.

    What it misses is compiled where it is first launched, as without it. Not where processes train
    together: a step may talk to the others.

    Args:
        objective: not yet compiled; nothing of it is touched.
        shape_BT: rows of a forward pass, tokens of a row.
        say: told in a line what went wrong, if anything.
    """
    with ExitStack() as stack:
        if device.type == "cuda" and dispatch.TRITON_INSTALLED and rank_and_world()[1] == 1:
            with _saying_what_fails(say):
                step = FakeStep(objective, shape_BT)
                thread = Thread(target=_warm, args=(step, precision, say), daemon=True)
                thread.start()
                stack.callback(thread.join)
        yield


def _warm(step: FakeStep, precision: str, say: Callable[[str], None]) -> None:
    with _saying_what_fails(say):
        step.run(precision)


@contextmanager
def _saying_what_fails(say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        say(f"kernels are compiled one after the other: {first_line(error)}")


class FakeStep:
    """A step of an objective whose parameters and batch are fake."""

    def __init__(self, objective: Objective, shape_BT: tuple[int, int]) -> None:
        self.device = next(objective.module.parameters()).device  # numbered, for other threads
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo: dict[int, Any] = {}
        for model in _models(objective):
            memo |= {id(x): self._parameter(x) for x in model.parameters()}
            memo |= {id(x): self._like(x) for x in model.buffers()}
        self.objective = copy.deepcopy(objective, memo)
        self.batch = self._batch(*shape_BT)
        _shorten([x.model for x in _models(self.objective) if isinstance(x, LT2ForCausalLM)])

    def run(self, precision: str) -> None:
        """Forwards and backwards; every kernel of it is compiled afterwards."""
        with self.mode, compiling_ahead(self.device), autocast(self.device, precision):
            self.objective.train_step(self.batch, lambda loss: loss.backward(), 0.0)

    def _like(self, real: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device=real.device
            )

    def _parameter(self, real: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._like(real), requires_grad=real.requires_grad)

    def _batch(self, rows: int, length: int) -> Batch:
        with self.mode, self.device:
            ids_BT = torch.empty(rows, length, dtype=torch.int64)
            segments_BT = torch.empty(rows, length, dtype=torch.int32)
            keep_BT = torch.empty(rows, length, dtype=torch.bool)
        return Batch(ids_BT, segments_BT, ids_BT, keep_BT, padded=False)


def _models(objective: Objective) -> list[nn.Module]:
    return [x for x in vars(objective).values() if isinstance(x, nn.Module)]


def _shorten(models: Sequence[LT2Model]) -> None:
    """Leave out visits of layers that are like earlier ones, and neither open nor close a loop.

    Not where layers read what all before them left: the kernels may depend on how much it is.
    """
    if any(x.schedule != models[0].schedule or x.dreamer or x.depth_plan for x in models):
        return
    kept, seen = [], set()
    for step in models[0].schedule:
        makes = tuple(_make(x, step) for x in models)
        if makes not in seen or step.opens_loop or step.closes_loop:
            kept.append(step)
        seen.add(makes)
    for model in models:
        model.schedule = (*kept,)


def _make(model: LT2Model, step: Step) -> tuple[Hashable, ...]:
    """What tells one make of layer from the other: what it is made of, and how far it sees."""
    layer = model.layers[step.layer]
    parameters = ((x.shape, x.dtype, x.requires_grad) for x in layer.parameters())
    return str(layer), *parameters, model.config.window(step.layer, step.loop)
