"""The routing of a Dreamer while it learns: released step by step, and balanced.

B rows, T tokens, N = B T, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ltconvert.convert.students.dreamer.layer import DreamerLayer
from ltconvert.convert.students.dreamer.router import Router, Routes
from ltconvert.distill.processes import sum_of_processes


class Release:
    """Moves what no gradient moves: the share of learned routing, and the balancing biases.

    The share r goes from 0, the teacher's layers in their order, to 1, what the routers choose,
    steadily over ``share`` of the steps. After each step an expert's bias moves by ``rate``: up if
    it was chosen less often than the mean, down if more often (arXiv 2412.19437, section 2.1.2).
    Loads are counted over all depths, since one pool serves them all; nulls have neither bias nor
    load.

    Args:
        share: of the steps; 0 for r = 1 at once.
        rate: of the biases, a step.
    """

    def __init__(self, layer: DreamerLayer, share: float, rate: float) -> None:
        self.layer, self.share, self.rate = layer, share, rate
        self._progress: float | None = None

    @property
    def routers(self) -> tuple[Router, Router]:
        """Of attention and of MLPs."""
        return self.layer.attention_router, self.layer.expert_router

    def begin(self, progress: float) -> None:
        """Before each micro-batch; the first one of a step settles the step before."""
        if progress == self._progress:
            return
        self._progress = progress
        self.layer.set_release(min(1.0, progress / self.share) if self.share else 1.0)
        for router in self.routers:
            router.balance += self.rate * (router.load.mean() - router.load).sign()
            router.load.zero_()

    def count(
        self, routes: Sequence[tuple[Routes, Routes]], keep_BT: Tensor | None
    ) -> dict[str, Tensor]:
        """Take in what a micro-batch chose, of all processes.

        Returns:
            ``max_load``: of the most used expert of the MLPs, over the mean; 1 while all is forced,
            0 where nulls are all that is chosen.
        """
        top = torch.ones((), device=self.layer.release.device)
        for router, visits in zip(self.routers, zip(*routes, strict=True), strict=bool(routes)):
            load_E = torch.zeros_like(router.load)
            for visit in visits:
                load_E += loads(visit, keep_BT, len(load_E))
            load_E = sum_of_processes(load_E)
            router.load += load_E
            top = load_E.max() / load_E.mean().clamp(min=1e-12)
        return {"max_load": top}


def loads(routes: Routes, keep_BT: Tensor | None, experts: int) -> Tensor:
    """How often each expert [E] was chosen by tokens that are no padding; nulls do not count."""
    chosen_NK = routes.chosen_NK.clamp(max=experts)
    counted = chosen_NK.new_ones(chosen_NK.shape, dtype=torch.float32)
    if keep_BT is not None:
        counted = counted * keep_BT.flatten()[:, None]
    empty = counted.new_zeros(experts + 1)  # the last one's are all nulls'
    return empty.scatter_add(0, chosen_NK.flatten(), counted.flatten())[:experts]
