"""RMSNorm as every family here uses it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """``x / rms(x) * (weight + offset)`` over the last axis, in fp32 or fp64
    inside (arXiv 1910.07467).

    Args:
        size: length of the last axis.
        eps: added to the mean square.
        offset: 1.0 where the checkpoint stores ``weight - 1`` (Gemma), else 0.0.
        loops: how many loops have a weight of their own; the weight is [loops, size] above one.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0, *, loops: int = 1) -> None:
        super().__init__()
        shape = (size,) if loops == 1 else (loops, size)
        self.weight = nn.Parameter(torch.full(shape, 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def reset_parameters(self) -> None:
        """Start as a plain normalisation."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def weight_in(self, loop: int | None) -> Tensor:
        """The weight of one loop, [size]."""
        if self.weight.dim() == 1:
            return self.weight
        assert loop is not None
        return self.weight[loop]

    def forward(self, x: Tensor, loop: int | None = None) -> Tensor:
        """x [..., size] -> the same shape and dtype, as in one loop (said where loops differ)."""
        work = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight_in(loop).to(work) + self.offset
        return F.rms_norm(x.to(work), weight.shape, weight, self.eps).to(x.dtype)
