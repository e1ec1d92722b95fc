"""Whether and how the layers of a training step are compiled.

Regions, not the model: a function of a layer is compiled once for every make of layer, however many
layers there are, so that the first step is not long in coming. Nothing of a module changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any, cast

import torch

from ltconvert.distill.objective import F, Objective
from ltconvert.errors import first_line
from ltconvert.kernels import dispatch
from ltconvert.recipes.runtime import CompileSetting

LEAST_STEPS = 200  # compiling takes about as long as so many steps of a small model save
# Makes of layers, times models, times what a stage changes in between; PyTorch's own 8 are few.
_MOST_VARIANTS = 64


@dataclass(frozen=True)
class Choice:
    """Whether layers are compiled, and why."""

    compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"layers {'' if self.compiled else 'not '}compiled ({self.reason})"


def choose(setting: CompileSetting, device: torch.device, steps: int) -> Choice:
    """What a setting means on a device for so many steps; those of the whole stage, so that a run
    which is resumed near its end goes on as it began.
    """
    if setting != "auto":
        return Choice(setting == "layers", "as asked")
    if device.type != "cuda":
        return Choice(False, f"it is for GPUs, this is {device.type}")
    if find_spec("triton") is None:
        return Choice(False, "triton is not installed")
    if torch.cuda.get_device_capability(device) < (7, 0):
        return Choice(False, "the GPU is older than what triton compiles for")
    if steps < LEAST_STEPS:
        return Choice(False, f"{steps} steps are too few")
    return Choice(True, f"{steps} steps on a GPU")


@cache
def importing() -> Thread:
    """A thread that imports what compiling needs, which takes seconds; the same one every time."""
    thread = Thread(target=_import, daemon=True)
    thread.start()
    return thread


def _import() -> None:
    with suppress(ImportError):  # compiling says what is missing, and is done without
        import_module("torch._inductor.compile_fx")
        import_module("torch._dynamo.repro.after_dynamo")


class Region:
    """A function of a layer, compiled; once that fails, plain for layers it had not worked for yet.

    A layer that ran compiled goes on so: where activations are computed again in the backward pass,
    both passes have to run the same way.

    Args:
        failed: told in a line what went wrong.
        options: of ``torch.compile``.
    """

    def __init__(
        self, function: Callable[..., Any], failed: Callable[[str], None], **options: Any
    ) -> None:
        self._plain, self._say_failed = function, failed
        self._compiled = torch.compile(function, dynamic=False, **options)
        self._works_for: set[int] = set()  # ids of layers
        self._failed = False

    def __call__(self, layer: torch.nn.Module, *arguments: Any) -> Any:
        if self._failed and id(layer) not in self._works_for:
            return self._plain(layer, *arguments)
        try:
            result = self._compiled(layer, *arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._failed = True
            self._works_for.discard(id(layer))
            self._say_failed(_reason(error))
            return self._plain(layer, *arguments)
        self._works_for.add(id(layer))
        return result


def _reason(error: Exception) -> str:
    """The first line of what went wrong; of an error in tracing also what it was about."""
    error = getattr(error, "inner_exception", error)
    context = [x.strip() for x in str(error).splitlines() if "Developer debug context:" in x]
    return "; ".join([first_line(error), *context[:1]])


@contextmanager
def compiled(
    objective: Objective, choice: Choice, say: Callable[[str], None], **options: Any
) -> Iterator[None]:
    """Let an objective run compiled, if that was chosen, and as before afterwards."""
    if not choice.compiled:
        yield
        return
    importing().join()  # two threads must not import modules that need each other

    said: list[str] = []

    def failed(reason: str) -> None:
        if not said:
            said.append(reason)
            say(f"compiling failed, going on without: {reason}")

    def region(function: F, /) -> F:
        return cast(F, Region(function, failed, **options))

    torch._dynamo.reset()  # what an earlier stage compiled is of no use to this one
    dispatch.preload()
    with torch._dynamo.config.patch(recompile_limit=_MOST_VARIANTS), _backward_at_once():
        objective.compile_with(region)
        try:
            yield
        finally:
            objective.compile_with(_as_it_is)


def _backward_at_once() -> AbstractContextManager[Any]:
    """Compile backward passes with the forward ones, where their failures are met, too."""
    import torch._functorch.config as config

    if not hasattr(config, "force_non_lazy_backward_lowering"):  # before some release of PyTorch
        return nullcontext()
    return config.patch(force_non_lazy_backward_lowering=True)


def _as_it_is(function: F, /) -> F:
    return function
