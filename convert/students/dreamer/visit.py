"""What a Dreamer's layer knows and asks for at one depth of a pass.

B rows, T tokens, N = B T, C hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.students.dreamer import grouped
from ltconvert.convert.students.dreamer.banks import Stacks
from ltconvert.convert.students.dreamer.depth import DepthAttention, Slot
from ltconvert.convert.students.dreamer.pools import AttentionPool, Depth, SharedExpert, unit_rms
from ltconvert.convert.students.dreamer.router import Router, Routes
from ltconvert.convert.students.dreamer.rows import (
    ChosenRows,
    Mixture,
    OwnRows,
    PickedRows,
    Rows,
)
from ltconvert.kernels.depth_attention import DepthSlots


class Left(NamedTuple):
    """What a visit leaves: routes of both pools (None where all is forced, or a branch is skipped),
    and a depth slot.
    """

    entries: Routes | None
    experts: Routes | None
    slot: Slot | None


@dataclass(frozen=True)
class Visit:
    """One depth. How its parts are computed is a subclass's: for whole rows, or for one token.

    Attributes:
        layer: of the teacher, whose place this depth takes.
        attends, thinks: whether there is attention at this depth, and whether there are experts.
        forced, learned: whether the layer's own experts count, and those that tokens choose.
        release: share of the latter, on the device.
    """

    depth: int
    layer: int
    attends: bool
    thinks: bool
    forced: bool
    learned: bool
    release: Tensor

    def look_back(self, attention: DepthAttention, h_BTC: Tensor) -> tuple[Tensor, Slot | None]:
        """The stream with depth attention, and what that leaves, see there."""
        raise NotImplementedError

    def route(self, router: Router, h_BTC: Tensor, eps: float) -> tuple[Tensor, Routes]:
        """The normed stream [B, T, C], and what its tokens choose."""
        raise NotImplementedError

    def heads(self, y_BTO: Tensor, mixture: Mixture, pool: AttentionPool, at: Depth) -> Tensor:
        """What is between the projections of the stream and ``o``, [B, T, M]; see the pool."""
        raise NotImplementedError

    def share(self, expert: SharedExpert, h_NC: Tensor, x_NC: Tensor, top_N: Tensor) -> Tensor:
        """The stream h with what the shared expert adds, [N, C]."""
        y_NC: Tensor = expert(x_NC)
        return h_NC + top_N[:, None].to(y_NC.dtype) * y_NC

    def own_rows(self, router: Router) -> Rows:
        """Tokens through the layer's own experts."""
        raise NotImplementedError

    def chosen_rows(self, routes: Routes, router: Router) -> ChosenRows | PickedRows:
        """Tokens through those that they chose."""
        raise NotImplementedError

    def mixture(self, routes: Routes | None, router: Router) -> Mixture:
        """The experts that count."""
        own = self.own_rows(router) if self.forced else None
        chosen = None
        if self.learned:
            assert routes is not None
            chosen = self.chosen_rows(routes, router)
        return Mixture(own, chosen, self.release)


@dataclass(frozen=True)
class PassVisit(Visit):
    """Of a forward pass: rows of any length, with gradients, with or without a cache that grows.

    Attributes:
        slots: keys and values of earlier depths; None at the first, and without depth attention.
        cache_layer: of this depth; None where nothing is kept.
    """

    stacks: Stacks
    slots: DepthSlots | None
    context: SequenceContext
    cache_layer: Any

    def look_back(self, attention: DepthAttention, h_BTC: Tensor) -> tuple[Tensor, Slot | None]:
        """See ``Visit``."""
        seen_BTC, slot = attention(h_BTC, self.depth, self.slots)
        return h_BTC if seen_BTC is None else h_BTC + seen_BTC, slot

    def route(self, router: Router, h_BTC: Tensor, eps: float) -> tuple[Tensor, Routes]:
        """See ``Visit``."""
        x_BTC = unit_rms(h_BTC, eps)
        return x_BTC, router(x_BTC.flatten(0, 1), self.depth)

    def heads(self, y_BTO: Tensor, mixture: Mixture, pool: AttentionPool, at: Depth) -> Tensor:
        """See ``Visit``."""
        return pool.mixed(pool.split(y_BTO, mixture), self.context, self.cache_layer, at)

    def own_rows(self, router: Router) -> OwnRows:
        """See ``Visit``."""
        return OwnRows(self.layer, router.slices, self.stacks)

    def chosen_rows(self, routes: Routes, router: Router) -> ChosenRows:
        """See ``Visit``."""
        grouping = grouped.group(routes.chosen_NK, router.experts)
        return ChosenRows(
            routes.chosen_NK, routes.weights_NK, router.experts, router.nulls, grouping, self.stacks
        )
