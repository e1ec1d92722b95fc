"""``decode_experts`` in plain PyTorch.

N tokens, K choices a token, E experts, C channels, O outputs, R rows of an expert's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.decode_linear.reference import gated


def decode_experts(
    x: Tensor,
    weight_ERC: Tensor,
    bias_ER: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None,
    *,
    residual_NO: Tensor | None,
    swiglu: bool,
    activation: str,
) -> Tensor:
    """See ``ltconvert.kernels.decode_experts.decode_experts``."""
    x_NKC = x.unsqueeze(1).expand(-1, chosen_NK.shape[1], -1) if x.dim() == 2 else x
    products = _one_by_one if x.device.type == "cpu" else _side_by_side
    y_NKR = products(x_NKC, weight_ERC, bias_ER, chosen_NK)
    if weights_NK is None:
        return gated(y_NKR, activation) if swiglu else y_NKR
    work = torch.promote_types(x.dtype, torch.float32)
    y_NO = (weights_NK.to(work)[:, None] @ y_NKR.to(work))[:, 0].to(x.dtype)
    return y_NO if residual_NO is None else residual_NO + y_NO


def _one_by_one(
    x_NKC: Tensor, weight_ERC: Tensor, bias_ER: Tensor | None, chosen_NK: Tensor
) -> Tensor:
    """Experts where they stand, which the host has to know."""
    experts, rows, _ = weight_ERC.shape
    y_NKR = x_NKC.new_zeros(*chosen_NK.shape, rows)
    for y_KR, x_KC, at_K in zip(y_NKR, x_NKC, chosen_NK.tolist(), strict=True):
        for k, expert in enumerate(at_K):
            if expert < experts:
                bias_R = None if bias_ER is None else bias_ER[expert]
                y_KR[k] = F.linear(x_KC[k], weight_ERC[expert], bias_R)
    return y_NKR


def _side_by_side(
    x_NKC: Tensor, weight_ERC: Tensor, bias_ER: Tensor | None, chosen_NK: Tensor
) -> Tensor:
    """Copies of a token's experts, token by token to save memory; the host need not know which."""
    experts, rows, _ = weight_ERC.shape
    at_NK = chosen_NK.clamp(max=experts - 1)
    y_NKR = x_NKC.new_empty(*chosen_NK.shape, rows)
    for y_KR, x_KC, at_K in zip(y_NKR, x_NKC, at_NK, strict=True):
        y_KR.copy_((weight_ERC[at_K] @ x_KC[..., None])[..., 0])
    if bias_ER is not None:
        y_NKR += bias_ER[at_NK]
    return y_NKR.where((chosen_NK < experts)[..., None], 0.0)
