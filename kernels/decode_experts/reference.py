"""``decode_experts`` in plain PyTorch: a token's experts are copied side by side.

N tokens, K choices a token, E experts, C channels, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_experts(
    x: Tensor,
    weight_EOC: Tensor,
    bias_EO: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_experts.decode_experts``; token by token, to save memory."""
    experts, outputs, _ = weight_EOC.shape
    tokens, choices = chosen_NK.shape
    at_NK = chosen_NK.clamp(max=experts - 1)
    x_NKC = x.unsqueeze(1).expand(-1, choices, -1) if x.dim() == 2 else x
    y_NKO = x.new_empty(tokens, choices, outputs)
    for y_KO, x_KC, at_K in zip(y_NKO, x_NKC, at_NK, strict=True):
        y_KO.copy_((weight_EOC[at_K] @ x_KC[..., None])[..., 0])
    if bias_EO is not None:
        y_NKO += bias_EO[at_NK]
    y_NKO = y_NKO.where((chosen_NK < experts)[..., None], 0.0)
    if weights_NK is None:
        return y_NKO
    work = torch.promote_types(x.dtype, torch.float32)
    y_NO: Tensor = (weights_NK.to(work)[:, None] @ y_NKO.to(work))[:, 0]
    return y_NO.to(x.dtype)
