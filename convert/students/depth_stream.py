"""The depth stream of one forward pass: keys and values of the same token from earlier sublayers.

All slots lie in one buffer that is written in place, since stacking them anew for every reader
would cost memory and traffic that grow with the square of the depth. Autograd cannot follow that
by itself: reads and writes are therefore nodes of its graph, strung on a chain. A read adds its
gradient to a second buffer; a write takes its slot's from there, and the chain makes sure that all
reads of later visits have been there before. What was saved for the backward pass stays good, as no
slot is written twice.

B rows, T tokens, N slots, n slots read, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.convert.mixers.context import DepthView
from ltconvert.convert.mixers.moda import Slot
from ltconvert.convert.mixers.rope import apply_rope
from ltconvert.convert.students.depth_plan import ATTENTION, FFN, DepthPlan, DepthVisit

Tables = Mapping[str, tuple[Tensor, Tensor]]


class DepthStream:
    """Slots in the order in which they are written, keys once for each kind of positions.

    Keys come without positions. A reader whose queries are rotated sees them rotated by the same
    angle, so that their product is that of relative distance 0; layers may differ in RoPE, and
    keys are kept for each.

    Args:
        plan: see ``depth_plan``.
        rope: (cos, sin), each [B or 1, T, D], by name.
        names: of the positions of all readers; None: as they come.
        schedule: scalar s of the merge, see ``MixtureOfDepths``.
    """

    def __init__(
        self, plan: DepthPlan, rope: Tables, names: Sequence[str | None], schedule: Tensor
    ) -> None:
        self.plan, self.rope, self.names, self.schedule = plan, rope, list(names), schedule
        self.slots = 0
        self._buffers = _Buffers(plan.slots)
        self._chain: Tensor | None = None
        self._open: dict[str, list[Slot]] = {ATTENTION: [], FFN: []}

    def view(self, visit: DepthVisit) -> DepthView:
        """What a visit reads, if anything, and what it is to write."""
        assert not visit.reads or visit.stop == self.slots
        parts: tuple[Tensor, ...] = ()
        if visit.reads:
            parts = _Read.apply(self._buffers, visit.first, visit.stop, self._chain)
        keys = dict(zip(self.names, parts, strict=False))
        return DepthView(keys, parts[-1] if parts else None, self.schedule, visit.writes)

    def write(self, visit: DepthVisit, slots: Mapping[str, Slot]) -> None:
        """Take in what a visit wrote: a key and a value [B, T, G, D] of each of its sublayers."""
        assert set(slots) == set(visit.writes)
        for kind, slot in slots.items():
            self._open[kind].append(slot)
        for kind, waiting in self._open.items():
            if visit.closes and waiting:
                self._put(*(_mean(parts) for parts in zip(*waiting, strict=True)))
                self._open[kind] = []

    def _put(self, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
        parts = [self._positioned(k_BTGD, name) for name in self.names]
        if self._chain is None:
            self._chain = torch.zeros((), device=k_BTGD.device)
        self._chain = _Write.apply(self._buffers, self.slots, self._chain, *parts, v_BTGD)
        self.slots += 1

    def _positioned(self, k_BTGD: Tensor, name: str | None) -> Tensor:
        if name is None:
            return k_BTGD
        return apply_rope(k_BTGD.transpose(1, 2), *self.rope[name]).transpose(1, 2)


class _Buffers:
    """Memory of the slots' parts (keys of each kind, values) and of their gradients."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def put(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Copy one slot's parts [B, T, G, D] to their place."""
        if not self.values:
            self.values = [_laid_out(self.slots, part) for part in parts]
        for buffer, part in zip(self.values, parts, strict=True):
            # Not seen by autograd's versions: slots that were read stay as they are.
            buffer.data[:, :, slot].copy_(part)

    def add_gradients(self, first: int, stop: int, parts: Sequence[Tensor | None]) -> None:
        """Add what a reader passes back, [B, T, n, G, D] each."""
        if not self.gradients:
            self.gradients = [torch.zeros_like(buffer) for buffer in self.values]
        for buffer, part in zip(self.gradients, parts, strict=True):
            if part is not None:
                buffer[:, :, first:stop] += part

    def take_gradients(self, slot: int) -> list[Tensor | None]:
        """The sum over all readers of one slot; it is 0 again for another backward pass."""
        taken = [buffer[:, :, slot].clone() for buffer in self.gradients]
        for buffer in self.gradients:
            buffer[:, :, slot] = 0
        return [*taken] if taken else [None] * len(self.values)


class _Write(torch.autograd.Function):
    """Put parts into a slot; the chain goes on."""

    @staticmethod
    def forward(ctx: Any, buffers: _Buffers, slot: int, chain: Tensor, *parts: Tensor) -> Tensor:
        ctx.buffers, ctx.slot = buffers, slot
        buffers.put(slot, parts)
        return chain.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, grad, *ctx.buffers.take_gradients(ctx.slot)


class _Read(torch.autograd.Function):
    """The parts of the slots from ``first`` to before ``stop``, [B, T, n, G, D] each."""

    @staticmethod
    def forward(
        ctx: Any, buffers: _Buffers, first: int, stop: int, chain: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.buffers, ctx.span = buffers, (first, stop)
        ctx.save_for_backward(chain)
        ctx.set_materialize_grads(False)
        return tuple(buffer.detach()[:, :, first:stop] for buffer in buffers.values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.buffers.add_gradients(*ctx.span, grads)
        (chain,) = ctx.saved_tensors
        return None, None, None, torch.zeros_like(chain)


def _laid_out(slots: int, part_BTGD: Tensor) -> Tensor:
    """An empty buffer [B, T, N, G, D], in memory slot by slot: so they are written, and read."""
    return part_BTGD.new_empty(slots, *part_BTGD.shape).permute(1, 2, 0, 3, 4)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).mean(0)
