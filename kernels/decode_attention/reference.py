"""``decode_attention`` in plain PyTorch, over all slots of the cache."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_attention.decode_attention``."""
    return decode_attention_with_sum(
        q_BHD, k_BGSD, v_BGSD, lengths_B, scale=scale, soft_cap=soft_cap
    )[0]


@torch.no_grad()
def decode_attention_with_sum(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.decode_attention``; R query heads a kv head."""
    groups, slots = k_BGSD.shape[1:3]
    work = torch.promote_types(q_BHD.dtype, torch.float32)
    filled_BS = torch.arange(slots, device=lengths_B.device) < lengths_B[:, None]
    # Weights of 0 do not keep out what was never written: 0 times NaN is NaN.
    v_BGSD = v_BGSD.to(work).masked_fill(~filled_BS[:, None, :, None], 0.0)
    with torch.autocast(q_BHD.device.type, enabled=False):
        q_BGRD = q_BHD.to(work).unflatten(1, (groups, q_BHD.shape[1] // groups))
        scores_BGRS = q_BGRD @ k_BGSD.to(work).mT * scale
        if soft_cap is not None:
            scores_BGRS = soft_cap * torch.tanh(scores_BGRS / soft_cap)
        scores_BGRS = scores_BGRS.masked_fill(~filled_BS[:, None, None], float("-inf"))
        o_BGRD = scores_BGRS.softmax(-1) @ v_BGSD
        log_sum_BH = scores_BGRS.logsumexp(-1).flatten(1)
    return o_BGRD.flatten(1, 2).to(q_BHD.dtype), log_sum_BH
