"""The gradients of a step: averaged, limited, and kept from the weights when not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ltconvert.distill.processes import average_over_processes
from ltconvert.errors import UserError

NORM, BAD = "grad_norm", "first bad gradient"


class NotFinite(UserError):
    """A loss or gradient that is no number.

    Args:
        happened: where, what, and what is kept.
        stage: whose settings may mend it.
    """

    def __init__(self, happened: str, stage: str) -> None:
        super().__init__(
            f"{happened}; try a lower {stage}.lr, a longer {stage}.warmup_share, a smaller "
            f"{stage}.clip_norm or --precision fp32"
        )
        self.happened = happened


class Gradients:
    """Of the parameters that are trained, by name. Nothing here waits for a GPU."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._names: list[str] = []
        self._broken: Tensor | None = None  # 1 from the first step on that was not finite

    def average(self) -> None:
        """Their means over the processes of a run; 0 for what the step has not used.

        Alone too: Adam counts the steps of a parameter that has a gradient, and the processes of a
        run have to take part for every parameter.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_over_processes([p.grad for p in self._parameters.values() if p.grad is not None])

    def clip(self, limit: float) -> dict[str, Tensor]:
        """Limit their norm: the norm before, and the number of the first not finite (-1: none)."""
        found = {name: p for name, p in self._parameters.items() if p.grad is not None}
        self._names = list(found)
        grads = [p.grad for p in found.values() if p.grad is not None]
        norms_P = torch.stack(torch._foreach_norm(grads))
        norm = torch.linalg.vector_norm(norms_P)
        nn.utils.clip_grads_with_norm_(found.values(), limit, norm)
        bad_P = ~torch.isfinite(norms_P)
        return {NORM: norm, BAD: torch.where(bad_P.any(), bad_P.int().argmax(), -1).float()}

    def first_bad(self, number: float) -> str | None:
        """Name of what ``clip`` found."""
        return self._names[int(number)] if number >= 0 else None

    def guard(self, loss: Tensor, norm: Tensor) -> None:
        """Let the optimiser do nothing from the first step on whose numbers are not finite.

        For numbers that are read later than this step's update: weights stay those before it.
        """
        bad = 1.0 - (torch.isfinite(loss) & torch.isfinite(norm)).float()
        self._broken = bad if self._broken is None else torch.maximum(self._broken, bad)
        self._optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # as GradScaler does
