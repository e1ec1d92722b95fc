"""``decode_experts`` in plain PyTorch.

N tokens, K choices a token, E experts, C channels, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_experts(
    x: Tensor,
    weight_EOC: Tensor,
    bias_EO: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_experts.decode_experts``."""
    x_NKC = x.unsqueeze(1).expand(-1, chosen_NK.shape[1], -1) if x.dim() == 2 else x
    products = _one_by_one if x.device.type == "cpu" else _side_by_side
    y_NKO = products(x_NKC, weight_EOC, bias_EO, chosen_NK)
    if weights_NK is None:
        return y_NKO
    work = torch.promote_types(x.dtype, torch.float32)
    y_NO: Tensor = (weights_NK.to(work)[:, None] @ y_NKO.to(work))[:, 0]
    return y_NO.to(x.dtype)


def _one_by_one(
    x_NKC: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None, chosen_NK: Tensor
) -> Tensor:
    """Experts where they stand, which the host has to know."""
    experts, outputs, _ = weight_EOC.shape
    y_NKO = x_NKC.new_zeros(*chosen_NK.shape, outputs)
    for y_KO, x_KC, at_K in zip(y_NKO, x_NKC, chosen_NK.tolist(), strict=True):
        for k, expert in enumerate(at_K):
            if expert < experts:
                bias_O = None if bias_EO is None else bias_EO[expert]
                y_KO[k] = F.linear(x_KC[k], weight_EOC[expert], bias_O)
    return y_NKO


def _side_by_side(
    x_NKC: Tensor, weight_EOC: Tensor, bias_EO: Tensor | None, chosen_NK: Tensor
) -> Tensor:
    """Copies of a token's experts, token by token to save memory; the host need not know which."""
    experts, outputs, _ = weight_EOC.shape
    at_NK = chosen_NK.clamp(max=experts - 1)
    y_NKO = x_NKC.new_empty(*chosen_NK.shape, outputs)
    for y_KO, x_KC, at_K in zip(y_NKO, x_NKC, at_NK, strict=True):
        y_KO.copy_((weight_EOC[at_K] @ x_KC[..., None])[..., 0])
    if bias_EO is not None:
        y_NKO += bias_EO[at_NK]
    return y_NKO.where((chosen_NK < experts)[..., None], 0.0)
