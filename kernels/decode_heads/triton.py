"""``decode_heads`` in Triton: one launch, a program for each head of q, k and v."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_heads.kernels import heads_kernel


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
    by_name = {"qkv": qkv_BM, "keys": keys_BGSD, "values": values_BGSD, "out": out_BHD}
    for name, tensor in by_name.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last axis of {name} has to be contiguous")
    norm = norm_kind(q_norm_weight, width)
    with torch.cuda.device_of(qkv_BM):
        heads_kernel[(rows * (heads + 2 * kv_heads),)](
            qkv_BM, dense(cos_BD), dense(sin_BD), dense(q_norm_weight), dense(k_norm_weight),
            slots_B.contiguous(), out_BHD, keys_BGSD, values_BGSD, norm_eps, norm_offset,
            keys_BGSD.shape[2], qkv_BM.stride(0),
            *out_BHD.stride()[:2], *keys_BGSD.stride()[:3], *values_BGSD.stride()[:3],
            H=heads, G=kv_heads, D=width, BD=triton.next_power_of_2(width),
            BW=triton.next_power_of_2(max(heads, kv_heads) * width),
            NORM=norm, num_warps=4 if norm == "full" else 1, **overlap.options(qkv_BM.device),
        )  # fmt: skip


def norm_kind(q_norm_weight: Tensor | None, width: int) -> str:
    """What ``heads_of`` takes as NORM: a norm over each head, over the projection, or none."""
    if q_norm_weight is None:
        return "none"
    return "head" if q_norm_weight.numel() == width else "full"


def dense(tensor: Tensor | None) -> Tensor | None:
    """As the kernels read it."""
    return None if tensor is None else tensor.contiguous()
