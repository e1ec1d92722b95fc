"""``decode_window`` in plain PyTorch, over all slots of the window."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_window(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    other_BHD: Tensor,
    rest_BH: Tensor,
    outside_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_window.decode_window``; R query heads a kv head."""
    groups, slots = k_BGSD.shape[1:3]
    work = torch.promote_types(q_BHD.dtype, torch.float32)
    filled_BS = torch.arange(slots, device=lengths_B.device) < lengths_B[:, None]
    v_BGSD = v_BGSD.to(work).masked_fill(~filled_BS[:, None, :, None], 0.0)
    with torch.autocast(q_BHD.device.type, enabled=False):
        q_BGRD = q_BHD.to(work).unflatten(1, (groups, -1))
        scores_BGRS = q_BGRD @ k_BGSD.to(work).mT * scale
        if soft_cap is not None:
            scores_BGRS = soft_cap * torch.tanh(scores_BGRS / soft_cap)
        scores_BGRS = scores_BGRS.masked_fill(~filled_BS[:, None, None], float("-inf"))
        log_sum_BGR1 = scores_BGRS.logsumexp(-1, keepdim=True)
        local_BHD = ((scores_BGRS - log_sum_BGR1).exp() @ v_BGSD).flatten(1, 2)
    share_BH = torch.sigmoid(log_sum_BGR1.flatten(1) - rest_BH.to(work))
    share_BH1 = torch.where(outside_B[:, None], share_BH, 1.0)[..., None]
    return (share_BH1 * local_BHD + (1 - share_BH1) * other_BHD.to(work)).to(q_BHD.dtype)
