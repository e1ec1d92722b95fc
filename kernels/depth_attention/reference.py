"""``depth_attention`` in plain PyTorch: two softmaxes, merged by the logs of their sums.

B batch, T queries, S keys, N slots, H query heads, G key/value heads, R query heads of each, D head
width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.depth_attention.slots import SlotGradients, read_slots
from ltconvert.kernels.segments import Bounds
from ltconvert.kernels.window_attention import reference as sequence


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
    bounds: Bounds | None,
    keep_BS: Tensor | None,
    gradients: SlotGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ltconvert.kernels.depth_attention.depth_attention``."""
    o_BTHD, log_sum_BTH = sequence.window_attention(
        q_BTHD, k_BSGD, v_BSGD, window=window or k_BSGD.shape[1], scale=scale, soft_cap=soft_cap,
        bounds=bounds, keep_BS=keep_BS,
    )  # fmt: skip
    if not slots:
        log_sum_BTH = log_sum_BTH.detach()
        return o_BTHD, log_sum_BTH, torch.zeros_like(log_sum_BTH)
    depth_o_BTHD, depth_sum_BTH = depth_only_attention(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, slots=slots, scale=scale, soft_cap=soft_cap,
        gradients=gradients,
    )  # fmt: skip
    return merge(o_BTHD, log_sum_BTH, depth_o_BTHD, depth_sum_BTH, schedule, bias_H)


def merge(
    o_BTHD: Tensor,
    log_sum_BTH: Tensor,
    depth_o_BTHD: Tensor,
    depth_sum_BTH: Tensor,
    schedule: float | Tensor,
    bias_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, log sums and depth shares of two softmaxes put together."""
    work = log_sum_BTH.dtype
    ahead_BTH = depth_sum_BTH - log_sum_BTH
    if bias_H is not None:
        ahead_BTH = ahead_BTH + bias_H.to(work)
    if isinstance(schedule, Tensor):
        schedule = schedule.detach().to(ahead_BTH.device, work).reshape(())
    else:
        schedule = torch.full((), schedule, dtype=work, device=ahead_BTH.device)
    share_BTH = schedule * torch.sigmoid(ahead_BTH)
    # log(1 - share) from 1 - schedule + schedule * sigmoid(-ahead): nothing cancels, or underflows
    inside_BTH = schedule.log() + F.logsigmoid(-ahead_BTH.detach())
    rest_BTH = torch.logaddexp((1 - schedule).log(), inside_BTH)
    gap_BTHD = depth_o_BTHD.to(work) - o_BTHD.to(work)
    merged_BTHD = (o_BTHD.to(work) + share_BTH[..., None] * gap_BTHD).to(o_BTHD.dtype)
    return merged_BTHD, log_sum_BTH.detach() - rest_BTH, share_BTH.detach()


def depth_only_attention(
    q_BTHD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    soft_cap: float | None,
    gradients: SlotGradients | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.depth_attention.depth_only_attention``.

    Scores and weights are fp32, autocast or not.
    """
    if gradients is not None:
        depth_k_BTNGD, depth_v_BTNGD = read_slots(depth_k_BTNGD, depth_v_BTNGD, gradients, slots)
    with torch.autocast(q_BTHD.device.type, enabled=False):
        work = torch.promote_types(q_BTHD.dtype, torch.float32)
        q_BTGRD = q_BTHD.to(work).unflatten(2, (depth_k_BTNGD.shape[3], -1))
        k_BTGND, v_BTGND = (
            x[:, :, :slots].to(work).transpose(2, 3) for x in (depth_k_BTNGD, depth_v_BTNGD)
        )
        scores = q_BTGRD @ k_BTGND.transpose(-1, -2) * scale
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        log_sum_BTGR = scores.logsumexp(-1)
        o_BTGRD = (scores - log_sum_BTGR[..., None]).exp() @ v_BTGND
        return o_BTGRD.flatten(2, 3).to(q_BTHD.dtype), log_sum_BTGR.flatten(2)
