"""Attention to depth alone as an op of its own, for autograd and ``torch.compile``.

B batch, T tokens, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.depth_attention import launch


@torch.library.custom_op("ltconvert::depth_only_attention", mutates_args=())
def depth_only(
    q_BTHD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    dk_NBTGD: Tensor | None,
    dv_NBTGD: Tensor | None,
    order: Tensor | None,
    slots: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] and log sums [B, H, T]."""
    o_BTHD, log_sum_BHT = _outputs(q_BTHD)
    launch.forward(q_BTHD, depth_k_BTNGD, depth_v_BTNGD, o_BTHD, log_sum_BHT, slots, scale, cap)
    return o_BTHD, log_sum_BHT


@depth_only.register_fake
def _outputs(q_BTHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q_BTHD.shape
    log_sum_BHT = q_BTHD.new_empty(batch, heads, length, dtype=torch.float32)
    return q_BTHD.new_empty(q_BTHD.shape), log_sum_BHT


@torch.library.custom_op("ltconvert::depth_only_attention_backward", mutates_args=())
def _backward_op(
    do_BTHD: Tensor,
    dlog_sum_BHT: Tensor,
    o_BTHD: Tensor,
    log_sum_BHT: Tensor,
    q_BTHD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    dk_NBTGD: Tensor | None,
    dv_NBTGD: Tensor | None,
    order: Tensor | None,
    slots: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq = q_BTHD.new_empty(q_BTHD.shape)
    ddepth, stored = launch.places(depth_k_BTNGD, depth_v_BTNGD, dk_NBTGD, dv_NBTGD, slots)
    launch.backward(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, o_BTHD, do_BTHD.contiguous(), log_sum_BHT, dq,
        *ddepth, slots, scale, cap, dsum=dlog_sum_BHT.contiguous(), add=stored,
    )  # fmt: skip
    return dq, *launch.returned(ddepth, q_BTHD, stored), log_sum_BHT.new_zeros(())


@_backward_op.register_fake
def _gradients(
    do: Tensor, dlog_sum: Tensor, o: Tensor, log_sum: Tensor, q: Tensor, depth_k: Tensor,
    depth_v: Tensor, dk_NBTGD: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_depth = [
        launch.new_like(x) if dk_NBTGD is None else q.new_empty(0) for x in (depth_k, depth_v)
    ]
    return q.new_empty(q.shape), *of_depth, log_sum.new_empty(())


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, do: Tensor, dlog_sum: Tensor) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    dq, ddepth_k, ddepth_v, dorder = _backward_op(do, dlog_sum, *kept, *ctx.options)
    if kept[5] is None:
        return dq, ddepth_k, ddepth_v, None, None, None, None, None, None
    return dq, None, None, None, None, dorder, None, None, None


depth_only.register_autograd(_backward, setup_context=_keep_inputs)
