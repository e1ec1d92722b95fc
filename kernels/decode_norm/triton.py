"""``decode_norm`` and ``decode_norms`` in Triton: one launch, a program for each row."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_norm.kernels import norm_kernel

CHANNELS = 256  # of a warp, up to 16


def decode_norm(
    x_BC: Tensor, weight_C: Tensor, residual_BC: Tensor | None, *, eps: float, offset: float
) -> Tensor:
    """See ``ltconvert.kernels.decode_norm.decode_norm``."""
    return decode_norms(
        x_BC, weight_C, residual_BC, None, eps=eps, offset=offset, next_eps=0.0, next_offset=0.0
    )[0]


def decode_norms(
    x_BC: Tensor,
    weight_C: Tensor,
    residual_BC: Tensor | None,
    next_weight_C: Tensor | None,
    *,
    eps: float,
    offset: float,
    next_eps: float,
    next_offset: float,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.decode_norm.decode_norms``; without a next norm, y twice."""
    x_BC = x_BC.contiguous()
    rows, channels = x_BC.shape
    block = triton.next_power_of_2(channels)
    y_BC = torch.empty_like(x_BC)
    z_BC = y_BC if next_weight_C is None else torch.empty_like(x_BC)
    given = (residual_BC, next_weight_C)
    residual_BC, next_C = (x if x is None else x.contiguous() for x in given)
    with torch.cuda.device_of(x_BC):
        norm_kernel[(rows,)](
            x_BC, weight_C.contiguous(), residual_BC, y_BC, next_C, z_BC,
            eps, offset, next_eps, next_offset, C=channels, BC=block,
            num_warps=max(1, min(16, block // CHANNELS)),
            **overlap.options(x_BC.device, weight_C, next_weight_C),
        )  # fmt: skip
    return y_BC, z_BC
