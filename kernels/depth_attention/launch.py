"""Launches of the kernels of ``depth_attention``, and where their results go.

B batch, T tokens, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ltconvert.kernels.depth_attention.kernels import forward_kernel, gradient_kernel

NARROWEST = 64  # channels; narrower blocks gave wrong numbers on Hopper
MATRIX_ROWS = 16  # a product's least
NARROW_BYTES = (
    256  # of a head; wider ones, and over 16 query heads to a group, take twice the warps
)


class Tiling(NamedTuple):
    """Slots of a block, warps of a program, and blocks on the way at a time."""

    slots: int
    warps: int
    stages: int


FORWARD, BACKWARD = Tiling(16, 2, 3), Tiling(16, 2, 3)


class Merge(NamedTuple):
    """What puts depth together with the sequence; ``schedule`` None is 1."""

    log_sum_BHT: Tensor
    schedule: Tensor | None
    bias_H: Tensor | None


def forward(
    q_BTHD: Tensor,
    k_BTNGD: Tensor,
    v_BTNGD: Tensor,
    o_BTHD: Tensor,
    depth_sum_BHT: Tensor,
    slots: int,
    scale: float,
    cap: float,
    *,
    merge: Merge | None = None,
    merged: Tensor | None = None,
    joint: Tensor | None = None,
    share: Tensor | None = None,
) -> None:
    """Fill ``depth_sum``, ``o`` and, with ``merge``, the rest, as the kernel says."""
    grid, sizes, constants = _plan(q_BTHD, k_BTNGD, merge, cap, FORWARD)
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTNGD, v_BTNGD))
    spare = depth_sum_BHT  # stands where the kernel reads nothing
    log_sum, schedule, bias = _given(merge, spare)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            q, k, v, o_BTHD, log_sum, schedule, bias, o_BTHD if merged is None else merged,
            spare if joint is None else joint, spare if share is None else share, depth_sum_BHT,
            slots, *sizes, scale, *q.stride()[:3], *k.stride()[:4], *v.stride()[:4], **constants,
        )  # fmt: skip


def backward(
    q_BTHD: Tensor,
    k_BTNGD: Tensor,
    v_BTNGD: Tensor,
    o_BTHD: Tensor,
    do_BTHD: Tensor,
    depth_sum_BHT: Tensor,
    dq_BTHD: Tensor,
    dk_BTNGD: Tensor,
    dv_BTNGD: Tensor,
    slots: int,
    scale: float,
    cap: float,
    *,
    merge: Merge | None = None,
    dsum: Tensor | None = None,
    dbias: Tensor | None = None,
    add: bool = False,
) -> None:
    """Fill, or with ``add`` and ``merge`` add to, the gradients, as the kernel says."""
    grid, sizes, constants = _plan(q_BTHD, k_BTNGD, merge, cap, BACKWARD)
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTNGD, v_BTNGD))
    spare = depth_sum_BHT
    log_sum, schedule, bias = _given(merge, spare)
    with torch.cuda.device_of(q):
        gradient_kernel[grid](
            q, k, v, o_BTHD, do_BTHD, log_sum, depth_sum_BHT, spare if dsum is None else dsum,
            schedule, bias, dq_BTHD, dk_BTNGD, dv_BTNGD, spare if dbias is None else dbias,
            slots, *sizes, scale, *q.stride()[:3], *k.stride()[:4], *v.stride()[:4],
            *dq_BTHD.stride()[:3], *dk_BTNGD.stride()[:4], *dv_BTNGD.stride()[:4],
            HAS_SUM=dsum is not None, ADD=add, **constants,
        )  # fmt: skip


def places(
    k_BTNGD: Tensor,
    v_BTNGD: Tensor,
    dk_NBTGD: Tensor | None,
    dv_NBTGD: Tensor | None,
    slots: int,
) -> tuple[tuple[Tensor, Tensor], bool]:
    """Where slots' gradients go, [B, T, N, G, D] each: to storage (then True), or somewhere new."""
    if dk_NBTGD is not None and dv_NBTGD is not None:
        return (dk_NBTGD.permute(1, 2, 0, 3, 4), dv_NBTGD.permute(1, 2, 0, 3, 4)), True
    made = new_like(k_BTNGD), new_like(v_BTNGD)
    for x in made:
        x[:, :, slots:].zero_()
    return made, False


def new_like(x_BTNGD: Tensor) -> Tensor:
    """Room for the gradient of keys or values, in their order where a kernel can write to that."""
    if x_BTNGD.stride(-1) == 1:
        return torch.empty_like(x_BTNGD)
    return x_BTNGD.new_empty(x_BTNGD.shape)


def returned(ddepth: tuple[Tensor, Tensor], like: Tensor, stored: bool) -> tuple[Tensor, Tensor]:
    """What an op returns of them: nothing, in two tensors, of what went to storage."""
    return (like.new_empty(0), like.new_empty(0)) if stored else ddepth


def _plan(
    q: Tensor, k_BTNGD: Tensor, merge: Merge | None, cap: float, tiling: Tiling
) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Programs, sizes and constants of a launch."""
    batch, length, heads, width = q.shape
    groups = k_BTNGD.shape[3]
    filled = max(NARROWEST, triton.next_power_of_2(width))
    rows = max(MATRIX_ROWS, triton.next_power_of_2(heads // groups))
    large = filled * q.itemsize > NARROW_BYTES or rows > MATRIX_ROWS
    exact = "ieee" if torch.version.hip else "tf32x3"
    constants = {
        "MERGE": merge is not None,
        "JOINT": merge is not None and merge.schedule is None,
        "BIAS": merge is not None and merge.bias_H is not None,
        "CAP": cap,
        "PRECISION": exact if q.dtype == torch.float32 else "tf32",
        "D": width,
        "E": filled,
        "R": rows,
        "N": tiling.slots,
        "num_warps": tiling.warps * (2 if large else 1),
        "num_stages": tiling.stages,
    }
    return (batch * length * groups,), (length, heads, groups), constants


def _given(merge: Merge | None, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The merge's tensors, with ``spare`` for what there is not."""
    if merge is None:
        return spare, spare, spare
    log_sum, schedule, bias = merge
    return log_sum, spare if schedule is None else schedule, spare if bias is None else bias


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
