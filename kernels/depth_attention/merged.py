"""The merged form as an op of its own, for autograd and ``torch.compile``.

Forward: the sequence's attention, then one kernel that attends to the slots and puts both together.
Backward: the sequence's own backward with another output and log sum, then one kernel for the rest
(docs/kernels.md has the derivation). No atomics but those of the sequence's attention.

B batch, T queries, S keys, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.depth_attention import launch, sequence


@torch.library.custom_op("ltconvert::depth_attention", mutates_args=())
def merged_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    bias_H: Tensor | None,
    dk_NBTGD: Tensor | None,
    dv_NBTGD: Tensor | None,
    order: Tensor | None,
    schedule: Tensor | None,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    slots: int,
    scale: float,
    window: int,
    cap: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, H, D], log sums and depth's shares [B, H, T]; then what the backward needs.

    ``schedule`` None is 1; ``training``: a backward may follow; the rest as in the public function.
    """
    attention = sequence.pick(q_BTHD, k_BSGD, first_BT, keep_BT, window, cap, training)
    inner_BTHD, log_sum_BHT = sequence.forward(
        attention, q_BTHD, k_BSGD, v_BSGD, first_BT, last_BT, keep_BT, window, scale, cap
    )
    joint_BHT, share_BHT, depth_sum_BHT = (torch.empty_like(log_sum_BHT) for _ in range(3))
    merged_BTHD = inner_BTHD if schedule is None else torch.empty_like(inner_BTHD)
    launch.forward(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, inner_BTHD, depth_sum_BHT, slots, scale, cap,
        merge=launch.Merge(log_sum_BHT, schedule, bias_H), merged=merged_BTHD, joint=joint_BHT,
        share=share_BHT,
    )  # fmt: skip
    if schedule is None:  # one tensor is both
        inner_BTHD = q_BTHD.new_empty(0)
    return merged_BTHD, joint_BHT, share_BHT, inner_BTHD, log_sum_BHT, depth_sum_BHT


@merged_attention.register_fake
def _outputs(q_BTHD: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, length, heads, _ = q_BTHD.shape
    sums = [q_BTHD.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(4)]
    inner = q_BTHD.new_empty(0 if others[8] is None else q_BTHD.shape)
    return q_BTHD.new_empty(q_BTHD.shape), *sums[:2], inner, *sums[2:]


@torch.library.custom_op("ltconvert::depth_attention_backward", mutates_args=())
def _backward_op(
    do_BTHD: Tensor,
    o_BTHD: Tensor,
    joint_BHT: Tensor,
    log_sum_BHT: Tensor,
    depth_sum_BHT: Tensor,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    bias_H: Tensor | None,
    dk_NBTGD: Tensor | None,
    dv_NBTGD: Tensor | None,
    order: Tensor | None,
    schedule: Tensor | None,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    slots: int,
    scale: float,
    window: int,
    cap: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    do_BTHD = do_BTHD.contiguous()
    attention = sequence.pick(q_BTHD, k_BSGD, first_BT, keep_BT, window, cap, training)
    dq, dk, dv = sequence.backward(
        attention, do_BTHD, o_BTHD, joint_BHT, q_BTHD, k_BSGD, v_BSGD, first_BT, last_BT, keep_BT,
        window, scale, cap,
    )  # fmt: skip
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    ddepth, stored = launch.places(depth_k_BTNGD, depth_v_BTNGD, dk_NBTGD, dv_NBTGD, slots)
    dbias_BHT = q_BTHD.new_empty(0) if bias_H is None else torch.empty_like(joint_BHT)
    launch.backward(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, o_BTHD, do_BTHD, depth_sum_BHT, dq, *ddepth, slots,
        scale, cap, merge=launch.Merge(log_sum_BHT, schedule, bias_H), dbias=dbias_BHT, add=stored,
    )  # fmt: skip
    dbias = dbias_BHT if bias_H is None else dbias_BHT.sum((0, 2)).to(bias_H.dtype)
    of_depth = launch.returned(ddepth, q_BTHD, stored)
    return dq, dk, dv, *of_depth, dbias, joint_BHT.new_zeros(())


@_backward_op.register_fake
def _gradients(
    do: Tensor, o: Tensor, joint: Tensor, log_sum: Tensor, depth_sum: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    q, k, v, depth_k, depth_v, bias, dk_NBTGD = inputs[:7]
    made = [x.new_empty(x.shape) for x in (q, k, v)]
    if dk_NBTGD is None:
        of_depth = [launch.new_like(depth_k), launch.new_like(depth_v)]
    else:
        of_depth = [q.new_empty(0), q.new_empty(0)]
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return *made, *of_depth, dbias, joint.new_empty(())


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    o, joint, _, inner, log_sum, depth_sum = output
    kept = o if inputs[9] is None else inner
    ctx.save_for_backward(kept, joint, log_sum, depth_sum, *inputs[:13])
    ctx.options = inputs[13:]


def _backward(ctx: Any, do: Tensor, *others: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # checkpoints allow one look
    dq, dk, dv, ddepth_k, ddepth_v, dbias, dorder = _backward_op(do, *kept, *ctx.options)
    bias, stored = kept[9] is not None, kept[10] is not None
    of_depth = (None, None) if stored else (ddepth_k, ddepth_v)
    of_others = dbias if bias else None, None, None, dorder if stored else None
    return dq, dk, dv, *of_depth, *of_others, *[None] * 9


merged_attention.register_autograd(_backward, setup_context=_keep_inputs)
