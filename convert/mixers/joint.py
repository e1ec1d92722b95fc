"""Several narrow linear maps of one input as one matrix product.

B rows, T tokens, C input channels, R output channels of all maps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 16  # channels; matrix units read 32 bytes at a time, and other widths take slow kernels
FEW_TOKENS = 1024  # below, laying weights side by side costs more than it saves


def project_together(x_BTC: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """What each layer makes of ``x``, [B, T, its width]; one product where there are many tokens.

    For maps to a number a head: a product of a width that is no multiple of ``ALIGNED`` takes a GPU
    ten times as long as its bytes need. Wide maps gain nothing: what autograd has to lay together
    for the joint backward pass costs more than the larger product saves.
    """
    if not linears or x_BTC.shape[:-1].numel() < FEW_TOKENS:
        return [linear(x_BTC) for linear in linears]
    sizes = [linear.out_features for linear in linears]
    rest = -sum(sizes) % ALIGNED
    weight_RC = F.pad(torch.cat([linear.weight for linear in linears]), (0, 0, 0, rest))
    bias_R = None
    if any(linear.bias is not None for linear in linears):
        bias_R = F.pad(torch.cat([_bias(linear) for linear in linears]), (0, rest))
    return list(F.linear(x_BTC, weight_RC, bias_R).split([*sizes, rest], dim=-1)[:-1])


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is not None:
        return linear.bias
    return linear.weight.new_zeros(linear.out_features)
