"""Numbers of finished steps, read so late that a GPU has always more work queued behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Steps that numbers are read after their own. A CPU has computed them anyway.
STEPS_LATE = {"cuda": 1}


@dataclass(frozen=True)
class Reading:
    """Numbers of one step (from 0), by name; ``lr`` was known without reading."""

    step: int
    lr: float
    values: dict[str, float]


@dataclass(frozen=True)
class _Coming:
    step: int
    lr: float
    names: tuple[str, ...]
    values: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> Reading:
        if self.copied is not None:
            self.copied.synchronize()
        return Reading(self.step, self.lr, dict(zip(self.names, self.values.tolist(), strict=True)))


class Readings:
    """Steps whose numbers are on their way from ``device``, oldest first."""

    def __init__(self, device: torch.device) -> None:
        self.late = STEPS_LATE.get(device.type, 0)
        self._coming: deque[_Coming] = deque()

    def put(self, step: int, lr: float, names: Sequence[str], values: Tensor) -> None:
        """Send for the numbers of a step, a tensor [len(names)]."""
        host, copied = values.to("cpu", non_blocking=values.is_cuda), None
        if values.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(values.device))
        self._coming.append(_Coming(step, lr, tuple(names), host, copied))

    def take(self, *, everything: bool = False) -> list[Reading]:
        """The steps that it is time to read, or all there are: those are waited for."""
        left = 0 if everything else self.late
        return [self._coming.popleft().read() for _ in range(len(self._coming) - left)]
