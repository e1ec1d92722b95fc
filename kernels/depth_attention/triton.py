"""``depth_attention`` in Triton: registration for autograd and ``torch.compile``.

A custom op each for the merged form and for depth alone. Merged, the op runs the sequence's
attention (``sequence.py``), then one kernel that attends to the slots and puts both together; its
backward calls the sequence's own backward with another output and log sum, then one kernel for the
rest. No atomics of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.depth_attention import launch, sequence
from ltconvert.kernels.depth_attention.slots import SlotGradients
from ltconvert.kernels.window_attention import triton as _its_ops  # noqa: F401  (registers them)


def depth_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    schedule: float | Tensor,
    bias_H: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    segment_ids_BT: Tensor | None,
    keep_BS: Tensor | None,
    gradients: SlotGradients | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ltconvert.kernels.depth_attention.depth_attention``."""
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BTHD, k_BSGD, v_BSGD))
    o_BTHD, log_sum_BHT, share_BHT, *_ = _depth_attention(
        q_BTHD, k_BSGD, v_BSGD, depth_k_BTNGD, depth_v_BTNGD, bias_H,
        *(gradients or (None, None, None)), _number(schedule, q_BTHD.device),
        _documents(segment_ids_BT, keep_BS), slots, scale, window or k_BSGD.shape[1],
        soft_cap or 0.0, training,
    )  # fmt: skip
    return o_BTHD, log_sum_BHT.detach().transpose(1, 2), share_BHT.detach().transpose(1, 2)


def depth_only_attention(
    q_BTHD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    soft_cap: float | None,
    gradients: SlotGradients | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.depth_attention.depth_only_attention``."""
    o_BTHD, log_sum_BHT = _depth_only(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, *(gradients or (None, None, None)), slots, scale,
        soft_cap or 0.0,
    )  # fmt: skip
    return o_BTHD, log_sum_BHT.transpose(1, 2)


def _number(schedule: float | Tensor, device: torch.device) -> Tensor | None:
    """The schedule on its device; None for 1, of which the kernels have a shorter form."""
    if isinstance(schedule, Tensor):
        return schedule.detach().to(device, torch.float32)
    return None if schedule == 1.0 else torch.full((), schedule, device=device)


def _documents(ids_BT: Tensor | None, keep_BT: Tensor | None) -> Tensor | None:
    """Documents in which every padded token is one of its own."""
    if keep_BT is None:
        return ids_BT
    alone_T = -1 - torch.arange(keep_BT.shape[1], device=keep_BT.device)
    ids_BT = torch.zeros_like(keep_BT, dtype=torch.int64) if ids_BT is None else ids_BT
    return torch.where(keep_BT.bool(), ids_BT, alone_T)


@torch.library.custom_op("ltconvert::depth_attention", mutates_args=())
def _depth_attention(
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
    ids_BT: Tensor | None,
    slots: int,
    scale: float,
    window: int,
    cap: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    attention = sequence.pick(q_BTHD, k_BSGD, ids_BT, window, cap, training)
    inner_BTHD, log_sum_BHT = sequence.forward(
        attention, q_BTHD, k_BSGD, v_BSGD, ids_BT, window, scale, cap
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


@_depth_attention.register_fake
def _outputs(q_BTHD: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, length, heads, _ = q_BTHD.shape
    sums = [q_BTHD.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(4)]
    inner = q_BTHD.new_empty(0 if others[8] is None else q_BTHD.shape)
    return q_BTHD.new_empty(q_BTHD.shape), *sums[:2], inner, *sums[2:]


@torch.library.custom_op("ltconvert::depth_attention_backward", mutates_args=())
def _depth_attention_backward(
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
    ids_BT: Tensor | None,
    slots: int,
    scale: float,
    window: int,
    cap: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    do_BTHD = do_BTHD.contiguous()
    attention = sequence.pick(q_BTHD, k_BSGD, ids_BT, window, cap, training)
    dq, dk, dv = sequence.backward(
        attention, do_BTHD, o_BTHD, joint_BHT, q_BTHD, k_BSGD, v_BSGD, ids_BT, window, scale, cap
    )
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    ddepth, stored = launch.places(depth_k_BTNGD, depth_v_BTNGD, dk_NBTGD, dv_NBTGD, slots)
    dbias_BHT = q_BTHD.new_empty(0) if bias_H is None else torch.empty_like(joint_BHT)
    launch.backward(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, o_BTHD, do_BTHD, depth_sum_BHT, dq, *ddepth, slots,
        scale, cap, merge=launch.Merge(log_sum_BHT, schedule, bias_H), dbias=dbias_BHT, add=stored,
    )  # fmt: skip
    dbias = dbias_BHT if bias_H is None else dbias_BHT.sum((0, 2)).to(bias_H.dtype)
    return (
        dq,
        dk,
        dv,
        *launch.returned(ddepth, q_BTHD, stored),
        dbias,
        torch.zeros_like(joint_BHT[0, 0, 0]),
    )


@_depth_attention_backward.register_fake
def _gradients(
    do: Tensor, o: Tensor, joint: Tensor, log_sum: Tensor, depth_sum: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    q, k, v, depth_k, depth_v, bias, dk_NBTGD = inputs[:7]
    made = [x.new_empty(x.shape) for x in (q, k, v)]
    if dk_NBTGD is None:
        of_depth = [torch.empty_like(depth_k), torch.empty_like(depth_v)]
    else:
        of_depth = [q.new_empty(0), q.new_empty(0)]
    dbias = q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return *made, *of_depth, dbias, joint.new_empty(())


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    o, joint, _, inner, log_sum, depth_sum = output
    kept = o if inputs[9] is None else inner
    ctx.save_for_backward(kept, joint, log_sum, depth_sum, *inputs[:11])
    ctx.options = inputs[11:]


def _backward(ctx: Any, do: Tensor, *others: Any) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # checkpoints allow one look
    dq, dk, dv, ddepth_k, ddepth_v, dbias, dorder = _depth_attention_backward(
        do, *kept, *ctx.options
    )
    bias, stored = kept[9] is not None, kept[10] is not None
    of_depth = (None, None) if stored else (ddepth_k, ddepth_v)
    of_others = dbias if bias else None, None, None, dorder if stored else None
    return dq, dk, dv, *of_depth, *of_others, *[None] * 7


_depth_attention.register_autograd(_backward, setup_context=_keep_inputs)


@torch.library.custom_op("ltconvert::depth_only_attention", mutates_args=())
def _depth_only(
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
    o_BTHD, log_sum_BHT = _outputs_alone(q_BTHD)
    launch.forward(q_BTHD, depth_k_BTNGD, depth_v_BTNGD, o_BTHD, log_sum_BHT, slots, scale, cap)
    return o_BTHD, log_sum_BHT


@_depth_only.register_fake
def _outputs_alone(q_BTHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q_BTHD.shape
    log_sum_BHT = q_BTHD.new_empty(batch, heads, length, dtype=torch.float32)
    return q_BTHD.new_empty(q_BTHD.shape), log_sum_BHT


@torch.library.custom_op("ltconvert::depth_only_attention_backward", mutates_args=())
def _depth_only_backward(
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


@_depth_only_backward.register_fake
def _gradients_alone(
    do: Tensor, dlog_sum: Tensor, o: Tensor, log_sum: Tensor, q: Tensor, depth_k: Tensor,
    depth_v: Tensor, dk_NBTGD: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_depth = [
        torch.empty_like(x) if dk_NBTGD is None else q.new_empty(0) for x in (depth_k, depth_v)
    ]
    return q.new_empty(q.shape), *of_depth, log_sum.new_empty(())


def _keep_alone(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]


def _backward_alone(ctx: Any, do: Tensor, dlog_sum: Tensor) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    dq, ddepth_k, ddepth_v, dorder = _depth_only_backward(do, dlog_sum, *kept, *ctx.options)
    if kept[5] is None:
        return dq, ddepth_k, ddepth_v, None, None, None, None, None, None
    return dq, None, None, None, None, dorder, None, None, None


_depth_only.register_autograd(_backward_alone, setup_context=_keep_alone)
