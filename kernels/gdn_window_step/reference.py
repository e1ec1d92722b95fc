"""``gdn_window_step`` in plain PyTorch: the references of its parts, over all slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.decode_attention.reference import decode_attention_with_sum
from ltconvert.kernels.decode_heads.reference import decode_heads
from ltconvert.kernels.gdn_step.reference import gdn_step
from ltconvert.kernels.gdn_window_step import Ring


@torch.no_grad()
def gdn_window_step(
    ring: Ring, qkv_BC: Tensor, beta_BH: Tensor, *recurrence: Tensor, **options: Any
) -> Tensor:
    """See ``ltconvert.kernels.gdn_window_step.gdn_window_step``."""
    other_BHD = gdn_step(qkv_BC, beta_BH, *recurrence, **options)
    q_BHD = torch.empty_like(other_BHD)
    decode_heads(
        qkv_BC, ring.keys_BHSD, ring.values_BHSD, ring.slots_B, q_BHD, ring.cos_BD, ring.sin_BD,
        None, None, 0.0, 0.0,
    )  # fmt: skip
    work = torch.promote_types(q_BHD.dtype, torch.float32)
    local_BHD, log_sum_BH = decode_attention_with_sum(
        q_BHD.to(work), ring.keys_BHSD, ring.values_BHSD, ring.lengths_B,
        scale=ring.scale, soft_cap=ring.soft_cap,
    )  # fmt: skip
    share_BH = torch.sigmoid(log_sum_BH - ring.rest_BH.to(log_sum_BH.dtype))
    share_BH1 = torch.where(ring.outside_B[:, None], share_BH, 1.0)[..., None]
    y_BHD = share_BH1 * local_BHD + (1 - share_BH1) * other_BHD.to(local_BHD.dtype)
    return y_BHD.to(qkv_BC.dtype)
