"""``gdn_window_step`` in plain PyTorch: the references of its parts, over all slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    local_BHD, log_sum_BH = _look_around(ring, q_BHD)
    share_BH = torch.sigmoid(log_sum_BH - ring.rest_BH.to(log_sum_BH.dtype))
    share_BH1 = torch.where(ring.outside_B[:, None], share_BH, 1.0)[..., None]
    y_BHD = share_BH1 * local_BHD + (1 - share_BH1) * other_BHD.to(local_BHD.dtype)
    return y_BHD.to(qkv_BC.dtype)


def _look_around(ring: Ring, q_BHD: Tensor) -> tuple[Tensor, Tensor]:
    """What the window gives [B, H, D], and the log of the sum of its weights [B, H]."""
    work = torch.promote_types(q_BHD.dtype, torch.float32)
    filled_BS = torch.arange(ring.keys_BHSD.shape[2], device=q_BHD.device) < ring.lengths_B[:, None]
    v_BHSD = ring.values_BHSD.to(work).masked_fill(~filled_BS[:, None, :, None], 0.0)
    with torch.autocast(q_BHD.device.type, enabled=False):
        q_BHD1 = q_BHD.to(work)[..., None]
        scores_BHS = (ring.keys_BHSD.to(work) @ q_BHD1).squeeze(-1) * ring.scale
        if ring.soft_cap is not None:
            scores_BHS = ring.soft_cap * torch.tanh(scores_BHS / ring.soft_cap)
        scores_BHS = scores_BHS.masked_fill(~filled_BS[:, None], float("-inf"))
        log_sum_BH = scores_BHS.logsumexp(-1)
        weights_BH1S = (scores_BHS - log_sum_BH[..., None]).exp().unsqueeze(2)
        return (weights_BH1S @ v_BHSD).squeeze(2), log_sum_BH
