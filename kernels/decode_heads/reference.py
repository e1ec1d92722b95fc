"""``decode_heads`` in plain PyTorch, rounding where the layer itself rounds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_heads(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    out_BHD: Tensor,
    cos_BD: Tensor | None,
    sin_BD: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    norm_offset: float,
) -> None:
    """See ``ltconvert.kernels.decode_heads.decode_heads``; the queries go into ``out_BHD``."""
    (rows, heads, width), kv_heads = out_BHD.shape, keys_BGSD.shape[1]
    q, k, v = qkv_BM.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = _norm(q, q_norm_weight, norm_eps, norm_offset)
        k = _norm(k, k_norm_weight, norm_eps, norm_offset)
    q_BHD, k_BGD = q.unflatten(-1, (heads, width)), k.unflatten(-1, (kv_heads, width))
    if cos_BD is not None and sin_BD is not None:
        cos_B1D, sin_B1D = (table[:, None].to(q.dtype) for table in (cos_BD, sin_BD))
        q_BHD, k_BGD = (
            x * cos_B1D + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin_B1D
            for x in (q_BHD, k_BGD)
        )
    out_BHD.copy_(q_BHD)
    row_B, slots_B = torch.arange(rows, device=qkv_BM.device), slots_B.long()
    keys_BGSD[row_B, :, slots_B] = k_BGD.to(keys_BGSD.dtype)
    values_BGSD[row_B, :, slots_B] = v.unflatten(-1, (kv_heads, width)).to(values_BGSD.dtype)


def _norm(x_BN: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over as many entries as the weight has."""
    work = torch.promote_types(x_BN.dtype, torch.float32)
    groups = x_BN.to(work).unflatten(-1, (-1, weight.numel()))
    weight = weight.to(work) + offset
    return F.rms_norm(groups, weight.shape, weight, eps).flatten(-2).to(x_BN.dtype)
