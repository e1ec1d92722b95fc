"""Storage for depth keys and values: written in place, with one gradient storage beside it.

Every slot is read by all later layers. Left to autograd, each reader would return a gradient for
all slots, and their sums would move three times what the readers do. Here readers add to the
gradient storage, and the writer of a slot takes its gradient from there. ``order``, a number
without meaning that writers pass on to readers, makes autograd run the readers of a slot before its
writer.

The ops do not declare that they write to storage. Declared, autograd would refuse in the backward
what a reader saved, because a later layer has since written another slot; a reader's own slots do
not change. Backward twice works: a writer leaves zeros where it took its gradient. What a backward
adds and no writer takes (only some gradients were asked for, or it broke off) stays: the same graph
gives wrong gradients after that; the next pass, with slots of its own, right ones.

N slots, B batch, T tokens, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SlotGradients(NamedTuple):
    """Where readers of depth slots leave the slots' gradients, and what orders them."""

    dk_NBTGD: Tensor
    dv_NBTGD: Tensor
    order: Tensor


class DepthSlots(NamedTuple):
    """Preallocated slots. A value like any other: writing gives a new one, to be passed on.

    The slots lie outermost in memory: a write is one contiguous copy, and what a reader reads, and
    the gradients it writes, one contiguous stretch.
    """

    k_NBTGD: Tensor
    v_NBTGD: Tensor
    gradients: SlotGradients | None

    @property
    def keys_BTNGD(self) -> Tensor:
        """All slots' keys as ``depth_attention`` takes them."""
        return self.k_NBTGD.permute(1, 2, 0, 3, 4)

    @property
    def values_BTNGD(self) -> Tensor:
        """All slots' values as ``depth_attention`` takes them."""
        return self.v_NBTGD.permute(1, 2, 0, 3, 4)


def new_slots(slots: int, like_BTGD: Tensor, *, gradients: bool) -> DepthSlots:
    """Room for ``slots`` keys and values of ``like_BTGD``'s shape, dtype and device.

    ``gradients``: readers and writers take part in a backward; doubles the memory.
    """
    k, v = (like_BTGD.new_empty(slots, *like_BTGD.shape) for _ in range(2))
    if not gradients:
        return DepthSlots(k, v, None)
    order = torch.zeros((), device=like_BTGD.device)
    return DepthSlots(k, v, SlotGradients(torch.zeros_like(k), torch.zeros_like(v), order))


def write_slot(slots: DepthSlots, at: int, k_BTGD: Tensor, v_BTGD: Tensor) -> DepthSlots:
    """``slots`` with slot ``at`` written; each slot is written once, before it is read.

    Raises:
        ValueError: no such slot, or keys or values of another shape or dtype than the storage's.
    """
    held = slots.k_NBTGD
    if not 0 <= at < len(held):
        raise ValueError(f"there are slots 0 to {len(held) - 1}, got {at}")
    for x in (k_BTGD, v_BTGD):
        if x.shape != held.shape[1:] or x.dtype != held.dtype:
            raise ValueError(
                f"slots hold {list(held.shape[1:])} of {held.dtype}, got {list(x.shape)} of "
                f"{x.dtype}"
            )
    if slots.gradients is None:
        slots.k_NBTGD[at].copy_(k_BTGD)
        slots.v_NBTGD[at].copy_(v_BTGD)
        return slots
    order = _write(k_BTGD, v_BTGD, slots.k_NBTGD, slots.v_NBTGD, *slots.gradients, at)
    return slots._replace(gradients=slots.gradients._replace(order=order))


def read_slots(
    depth_k_BTNGD: Tensor, depth_v_BTNGD: Tensor, gradients: SlotGradients, slots: int
) -> tuple[Tensor, Tensor]:
    """Copies of the first ``slots`` keys and values, whose gradients go to ``gradients``."""
    return _read(depth_k_BTNGD, depth_v_BTNGD, *gradients, slots)


@torch.library.custom_op("ltconvert::depth_write", mutates_args=())
def _write(
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    k_NBTGD: Tensor,
    v_NBTGD: Tensor,
    dk_NBTGD: Tensor,
    dv_NBTGD: Tensor,
    order: Tensor,
    at: int,
) -> Tensor:
    for held, given in ((k_NBTGD, k_BTGD), (v_NBTGD, v_BTGD)):
        held.data[at].copy_(given)  # through data: not counted as a new version
    return torch.zeros_like(order)


@_write.register_fake
def _written(
    k: Tensor,
    v: Tensor,
    ks: Tensor,
    vs: Tensor,
    dk: Tensor,
    dv: Tensor,
    order: Tensor,
    at: int,
) -> Tensor:
    return torch.zeros_like(order)


@torch.library.custom_op("ltconvert::depth_take", mutates_args=())
def _take(
    dk_NBTGD: Tensor, dv_NBTGD: Tensor, dorder: Tensor, at: int
) -> tuple[Tensor, Tensor, Tensor]:
    dk, dv = dk_NBTGD[at].clone(), dv_NBTGD[at].clone()
    dk_NBTGD.data[at].zero_()
    dv_NBTGD.data[at].zero_()
    return dk, dv, torch.zeros_like(dorder)


@_take.register_fake
def _taken(dk: Tensor, dv: Tensor, dorder: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(dk[0]), torch.empty_like(dv[0]), torch.zeros_like(dorder)


def _keep_written(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[4:6])
    ctx.at = inputs[7]


def _write_backward(ctx: Any, dorder: Tensor) -> tuple[Any, ...]:
    dk, dv, dorder = _take(*ctx.saved_tensors, dorder, ctx.at)
    return dk, dv, None, None, None, None, dorder, None


_write.register_autograd(_write_backward, setup_context=_keep_written)


@torch.library.custom_op("ltconvert::depth_read", mutates_args=())
def _read(
    k_BTNGD: Tensor,
    v_BTNGD: Tensor,
    dk_NBTGD: Tensor,
    dv_NBTGD: Tensor,
    order: Tensor,
    slots: int,
) -> tuple[Tensor, Tensor]:
    k, v = (
        x[:, :, :slots].clone(memory_format=torch.contiguous_format) for x in (k_BTNGD, v_BTNGD)
    )
    return k, v


@_read.register_fake
def _copies(
    k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, order: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], slots, *k.shape[3:])
    return k.new_empty(shape), v.new_empty(shape)


@torch.library.custom_op("ltconvert::depth_give", mutates_args=())
def _give(
    dk_BTNGD: Tensor, dv_BTNGD: Tensor, dk_NBTGD: Tensor, dv_NBTGD: Tensor, order: Tensor
) -> Tensor:
    for given, held in ((dk_BTNGD, dk_NBTGD), (dv_BTNGD, dv_NBTGD)):
        held.data[: given.shape[2]].add_(given.permute(2, 0, 1, 3, 4))
    return torch.zeros_like(order)


@_give.register_fake
def _given(dk: Tensor, dv: Tensor, dks: Tensor, dvs: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(order)


def _keep_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:5])


def _read_backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    return None, None, None, None, _give(dk, dv, *ctx.saved_tensors), None


_read.register_autograd(_read_backward, setup_context=_keep_read)
