"""``decode_norm`` in Triton: one launch, a program for each row."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_norm.kernels import norm_kernel


def decode_norm(
    x_BC: Tensor, weight_C: Tensor, residual_BC: Tensor | None, *, eps: float, offset: float
) -> Tensor:
    """See ``ltconvert.kernels.decode_norm.decode_norm``."""
    x_BC = x_BC.contiguous()
    rows, channels = x_BC.shape
    block = triton.next_power_of_2(channels)
    y_BC = torch.empty_like(x_BC)
    with torch.cuda.device_of(x_BC):
        norm_kernel[(rows,)](
            x_BC, weight_C.contiguous(), None if residual_BC is None else residual_BC.contiguous(),
            y_BC, eps, offset, C=channels, BC=block, num_warps=max(1, min(16, block // 512)),
            **overlap.options(x_BC.device, weight_C),
        )  # fmt: skip
    return y_BC
