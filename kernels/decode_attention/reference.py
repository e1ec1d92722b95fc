"""``decode_attention`` in plain PyTorch, over all slots of the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels.decode_heads.reference import decode_heads


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    arrivals_BH: Tensor | None = None,
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


@torch.no_grad()
def decode_self_attention(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float | None,
    cos_BD: Tensor | None,
    sin_BD: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    arrivals_BH: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_attention.decode_self_attention``."""
    q_BHD = qkv_BM.new_empty(len(qkv_BM), num_heads, keys_BGSD.shape[-1])
    decode_heads(
        qkv_BM, keys_BGSD, values_BGSD, slots_B, q_BHD, cos_BD, sin_BD, q_norm_weight,
        k_norm_weight, norm_eps, norm_offset,
    )  # fmt: skip
    return decode_attention(
        q_BHD, keys_BGSD, values_BGSD, lengths_B, scale=scale, soft_cap=soft_cap
    )
