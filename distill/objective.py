"""What the training loop asks of a stage and of its data, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from ltconvert.distill.data import Batch

F = TypeVar("F", bound=Callable[..., Any])


class Wrap(Protocol):
    """Gives back a function that computes the same, faster."""

    def __call__(self, function: F, /) -> F: ...


class Objective(Protocol):
    """What a stage trains."""

    @property
    def module(self) -> nn.Module:
        """Its parameters with `requires_grad` are trained and checkpointed."""
        ...

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Groups {"params", "lr" (peak), "name"}, all parameters that are trained."""
        ...

    def compile_with(self, wrap: Wrap) -> None:
        """Call from now on what ``wrap`` makes of the functions that a step spends its time in.

        With the identity all is as before. Values of a GPU are not looked at inside a step.
        """
        ...

    def work(self, progress: float) -> Hashable | None:
        """What a step does beyond its batch: steps of equal answers launch the same, and look at no
        value of a GPU, so that one may be recorded for all. None: not to be recorded.
        """
        ...

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        """Losses of one micro-batch; calls `backward` on each part of the loss itself.

        Args:
            progress: share of the stage's steps that are done, in [0, 1).

        Returns:
            detached scalars, the same names every time, "loss" among them.
        """
        ...


class Stream(Protocol):
    """Endless micro-batches of this process, with a position that can be saved."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainResult:
    """Steps, tokens and seconds of a whole stage (all resumes); metrics of its last step."""

    steps: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
