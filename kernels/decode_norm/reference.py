"""Norms of a decoded token in plain PyTorch, rounding where the layer itself rounds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_norm(
    x_BC: Tensor, weight_C: Tensor, residual_BC: Tensor | None, *, eps: float, offset: float
) -> Tensor:
    """See ``ltconvert.kernels.decode_norm.decode_norm``."""
    work = torch.promote_types(x_BC.dtype, torch.float32)
    weight_C = weight_C.to(work) + offset
    y_BC = F.rms_norm(x_BC.to(work), weight_C.shape, weight_C, eps).to(x_BC.dtype)
    return y_BC if residual_BC is None else residual_BC + y_BC


@torch.no_grad()
def decode_norms(
    x_BC: Tensor,
    weight_C: Tensor,
    residual_BC: Tensor | None,
    next_weight_C: Tensor,
    *,
    eps: float,
    offset: float,
    next_eps: float,
    next_offset: float,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.decode_norm.decode_norms``."""
    y_BC = decode_norm(x_BC, weight_C, residual_BC, eps=eps, offset=offset)
    return y_BC, decode_norm(y_BC, next_weight_C, None, eps=next_eps, offset=next_offset)
