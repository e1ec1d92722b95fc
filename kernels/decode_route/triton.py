"""``decode_route`` in Triton: two launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_route import Routed
from ltconvert.kernels.decode_route.kernels import choice_kernel, logits_kernel

WARPS = 4


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
    (rows, channels), every, experts = h_BC.shape, len(keys_XC), len(balance_E)
    h_BC, x_BC = h_BC.contiguous(), h_BC.new_empty(rows, channels)
    logits_BX = h_BC.new_empty(rows, every, dtype=torch.float32)
    found = Routed(
        x_BC,
        h_BC.new_empty(rows, top, dtype=torch.int64),
        h_BC.new_empty(rows, top, dtype=torch.float32),
        h_BC.new_empty(rows, dtype=torch.float32),
    )
    early = overlap.options(h_BC.device, keys_XC, bias_X, balance_E)
    with torch.cuda.device_of(h_BC):
        logits_kernel[(every, rows)](
            h_BC, keys_XC.contiguous(), bias_X.contiguous(), x_BC, logits_BX, eps,
            X=every, C=channels, BC=triton.next_power_of_2(channels), num_warps=WARPS, **early,
        )  # fmt: skip
        choice_kernel[(rows,)](
            logits_BX, balance_E.contiguous(), *found[1:], total,
            E=experts, X=every, K=top, BY_SCORES=by_scores,
            BX=max(64, triton.next_power_of_2(every)), BK=triton.next_power_of_2(top),
            num_warps=1, **early,
        )  # fmt: skip
    return found
