"""``decode_route`` in plain PyTorch.

B rows, C channels, E experts, Z nulls, X = E + Z, K choices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.decode_route import Routed


def decode_route(
    h_BC: Tensor,
    keys_XC: Tensor,
    bias_X: Tensor,
    balance_E: Tensor,
    *,
    top: int,
    total: float,
    by_scores: bool,
    eps: float,
) -> Routed:
    """See ``ltconvert.kernels.decode_route.decode_route``."""
    work, experts = torch.promote_types(h_BC.dtype, torch.float32), len(balance_E)
    x_BC = F.rms_norm(h_BC.to(work), h_BC.shape[-1:], eps=eps).to(h_BC.dtype)
    logits_BX = F.linear(x_BC.to(work), keys_XC.to(work), bias_X.to(work))
    scores_BX = logits_BX.sigmoid()
    plain_BX = scores_BX if by_scores else logits_BX
    ranked_BX = plain_BX.clone()
    ranked_BX[:, :experts] += balance_E
    if experts < len(bias_X):
        least_B1 = plain_BX.topk(top).values[:, -1:]
        taken_BZ = plain_BX[:, experts:] >= least_B1
        ranked_BX[:, experts:] = torch.where(taken_BZ, math.inf, -math.inf)
    chosen_BK = ranked_BX.topk(top).indices
    weights_BK = scores_BX.gather(-1, chosen_BK)
    shares_BK = weights_BK / (weights_BK.sum(-1, keepdim=True) / total)
    return Routed(x_BC, chosen_BK, shares_BK, weights_BK.amax(-1))
