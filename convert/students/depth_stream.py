"""The depth stream of one forward pass: keys and values of the same token from earlier sublayers.

Slots are written in place into storage that is made once a pass (``kernels/depth_attention``):
laying them side by side anew for every reader would cost memory and traffic that grow with the
square of the depth.

B rows, T tokens, N slots, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ltconvert.convert.mixers.context import DepthView
from ltconvert.convert.mixers.moda import Slot
from ltconvert.convert.mixers.rope import apply_rope
from ltconvert.convert.students.depth_plan import ATTENTION, FFN, DepthPlan, DepthVisit
from ltconvert.kernels.depth_attention import DepthSlots, new_slots, write_slot

Tables = Mapping[str, tuple[Tensor, Tensor]]


class DepthStream:
    """Slots in the order in which they are written, once for each kind of positions.

    Keys come without positions. A reader whose queries are rotated sees them rotated by the same
    angle, so that their product is that of relative distance 0; where layers differ in RoPE, slots
    are kept for each.

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
        self.written = 0
        self.slots: dict[str | None, DepthSlots] = {}
        self._open: dict[str, list[Slot]] = {ATTENTION: [], FFN: []}

    def view(self, visit: DepthVisit) -> DepthView:
        """What a visit reads, if anything, and what it is to write."""
        if not visit.reads:
            return DepthView({}, 0, self.schedule, visit.writes)
        assert visit.stop == self.written
        seen = {name: _since(slots, visit.first) for name, slots in self.slots.items()}
        return DepthView(seen, visit.stop - visit.first, self.schedule, visit.writes)

    def write(self, visit: DepthVisit, left: Mapping[str, Slot]) -> None:
        """Take in what a visit left: a key and a value [B, T, G, D] of each of its sublayers."""
        assert set(left) == set(visit.writes)
        for kind, slot in left.items():
            self._open[kind].append(slot)
        for kind, waiting in self._open.items():
            if visit.closes and waiting:
                self._put(*(_mean(parts) for parts in zip(*waiting, strict=True)))
                self._open[kind] = []

    def _put(self, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
        for name in self.names:
            if name not in self.slots:
                training = torch.is_grad_enabled()
                self.slots[name] = new_slots(self.plan.slots, k_BTGD, gradients=training)
            placed_BTGD = self._placed(k_BTGD, name)
            self.slots[name] = write_slot(self.slots[name], self.written, placed_BTGD, v_BTGD)
        self.written += 1

    def _placed(self, k_BTGD: Tensor, name: str | None) -> Tensor:
        """Keys at the positions of one kind."""
        if name is None:
            return k_BTGD
        return apply_rope(k_BTGD.transpose(1, 2), *self.rope[name]).transpose(1, 2)


def _since(slots: DepthSlots, first: int) -> DepthSlots:
    """The same storage from one slot on."""
    if not first:
        return slots
    gradients = slots.gradients
    if gradients is not None:
        dk_NBTGD, dv_NBTGD, order = gradients
        gradients = type(gradients)(dk_NBTGD[first:], dv_NBTGD[first:], order)
    return DepthSlots(slots.k_NBTGD[first:], slots.v_NBTGD[first:], gradients)


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).mean(0)
