"""``depth_attention`` in Triton: an op for the merged form, one for depth alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels.depth_attention.alone import depth_only
from ltconvert.kernels.depth_attention.merged import merged_attention
from ltconvert.kernels.depth_attention.slots import SlotGradients
from ltconvert.kernels.segments import Bounds


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
    gradients: SlotGradients | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ltconvert.kernels.depth_attention.depth_attention``."""
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BTHD, k_BSGD, v_BSGD))
    o_BTHD, log_sum_BHT, share_BHT, *_ = merged_attention(
        q_BTHD, k_BSGD, v_BSGD, depth_k_BTNGD, depth_v_BTNGD, bias_H,
        *(gradients or (None, None, None)), _number(schedule, q_BTHD.device),
        *(bounds or (None, None)), keep_BS, slots, scale, window or k_BSGD.shape[1],
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
    o_BTHD, log_sum_BHT = depth_only(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, *(gradients or (None, None, None)), slots, scale,
        soft_cap or 0.0,
    )  # fmt: skip
    return o_BTHD, log_sum_BHT.transpose(1, 2)


def _number(schedule: float | Tensor, device: torch.device) -> Tensor | None:
    """The schedule on its device; None for 1, of which the kernels have a shorter form."""
    if isinstance(schedule, Tensor):
        return schedule.detach().to(device, torch.float32)
    return None if schedule == 1.0 else torch.full((), schedule, device=device)
