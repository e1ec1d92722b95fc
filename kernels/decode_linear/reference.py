"""``decode_linear`` in plain PyTorch: the layers one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def decode_linear(
    x_BC: Tensor,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    *,
    norm_weight_C: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    residual_BO: Tensor | None,
    swiglu: bool,
    activation: str,
) -> Tensor:
    """See ``ltconvert.kernels.decode_linear.decode_linear``."""
    if norm_weight_C is not None:
        work = torch.promote_types(x_BC.dtype, torch.float32)
        scale_C = norm_weight_C.to(work) + norm_offset
        x_BC = F.rms_norm(x_BC.to(work), scale_C.shape, scale_C, norm_eps).to(x_BC.dtype)
    with torch.autocast(x_BC.device.type, enabled=False):
        y_BO = F.linear(x_BC, weight_OC, bias_O)
    if swiglu:
        y_BO = gated(y_BO, activation)
    return y_BO if residual_BO is None else residual_BO + y_BO


def gated(y: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of [..., 2 O], [..., O]."""
    gate, up = y.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up
