"""Linear layers whose matrix several loops share, each with a correction of its own.

L loops, R rank, I input channels, O output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """``y = x (W + B_t A_t)^T + b_t`` in loop t; with one loop a plain linear layer.

    Relaxed recursive transformers (arXiv 2410.20672, section 2.3): W is one for all loops, the
    low-rank factors and the bias are a loop's own.

    Args:
        loops: how many loops have a correction and a bias of their own.
        rank: R of the corrections; 0 for none.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, loops: int = 1, rank: int = 0
    ) -> None:
        self.loops, self.rank = loops, rank if loops > 1 else 0
        super().__init__(in_features, out_features, bias=bias)
        if bias and loops > 1:
            self.bias = nn.Parameter(torch.zeros(loops, out_features))
        if self.rank:
            self.lora_a = nn.Parameter(torch.empty(loops, rank, in_features))
            self.lora_b = nn.Parameter(torch.empty(loops, out_features, rank))
        self.reset_corrections()

    def reset_corrections(self) -> None:
        """Corrections that are 0 and can be learnt: ``B = 0``."""
        if self.rank:
            nn.init.normal_(self.lora_a, std=self.in_features**-0.5)
            nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor, loop: int | None = None) -> Tensor:
        """x [..., I] -> [..., O] as in one loop, which has to be said where loops differ."""
        if self.loops == 1:
            return F.linear(x, self.weight, self.bias)
        assert loop is not None
        y = F.linear(x, self.weight, self.bias_in(loop))
        if not self.rank:
            return y
        return y + F.linear(F.linear(x, self.lora_a[loop]), self.lora_b[loop])

    def weight_in(self, loop: int) -> Tensor:
        """The matrix of one loop, [O, I]."""
        if not self.rank:
            return self.weight
        return self.weight + self.lora_b[loop] @ self.lora_a[loop]

    def bias_in(self, loop: int) -> Tensor | None:
        """The bias of one loop, [O]."""
        return self.bias if self.bias is None or self.loops == 1 else self.bias[loop]
