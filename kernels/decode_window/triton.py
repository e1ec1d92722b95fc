"""``decode_window`` in Triton: one launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_window.kernels import window_kernel

TILE = 4096  # keys times channels of a block: 32 keys of 128
STAGES = 5  # blocks on their way, the one at work counted: a window of 128 tokens whole
WARPS = 8


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
    """See ``ltconvert.kernels.decode_window.decode_window``."""
    batch, heads, width = q_BHD.shape
    groups, slots = k_BGSD.shape[1:3]
    y_BHD = q_BHD.new_empty(q_BHD.shape)
    block = max(16, triton.next_power_of_2(width))
    # The kernel's exponentials are of 2, its scores in that unit.
    factor = scale * math.log2(math.e) if soft_cap is None else scale / soft_cap
    cap = 1.0 if soft_cap is None else soft_cap * math.log2(math.e)
    with torch.cuda.device_of(q_BHD):
        window_kernel[(batch * heads,)](
            q_BHD.contiguous(), k_BGSD, v_BGSD, lengths_B.contiguous(), other_BHD.contiguous(),
            rest_BH, outside_B.contiguous(), y_BHD, factor, cap, slots, *k_BGSD.stride()[:3],
            *v_BGSD.stride()[:3], *rest_BH.stride(), H=heads, GROUP=heads // groups,
            CAPPED=soft_cap is not None, D=width, BD=block,
            BN=max(16, min(TILE // block, triton.next_power_of_2(slots))),
            STAGES=STAGES, FETCH=k_BGSD.stride(2) == v_BGSD.stride(2) == width, num_warps=WARPS,
            **overlap.options(q_BHD.device),
        )  # fmt: skip
    return y_BHD
