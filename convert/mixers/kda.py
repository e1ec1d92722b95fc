"""Kimi Delta Attention (arXiv 2510.26692) that starts from an attention layer's own projections.

H heads, D head width, M = H D; ... are [B, T], or [B] of one decoded token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.convert.mixers.deltanet import DeltaNet
from ltconvert.convert.mixers.linear import inverse_softplus, spread_half_lives


class KimiDeltaAttention(DeltaNet):
    """``S_t = A_t S_{t-1} + b_t k_t (v_t - (A_t S_{t-1})^T k_t)^T``, ``o_t = S_t^T q_t`` per head.

    DeltaNet with a decay for each key channel: ``A = diag(a)``, ``log a = -exp(log_rate) *
    softplus(decay_up a_proj x + rate_bias)``, ``decay_up a_proj`` of rank D. New beside what
    DeltaNet has: ``a_proj`` [D, C], random, and ``decay_up`` [M, D], 0, so that the decays do not
    depend on the token at the start and both matrices learn; ``log_rate``, a number a head, 0;
    ``rate_bias``, a number a channel, which spreads the half-lives as in Gated DeltaNet, from head
    to head, and within a head over a factor of ``SPREAD`` on each side, from channel to channel.
    Differs from the paper as DeltaNet does, and in a gate of full rank.
    """

    kind = "kda"
    RATES = ("b_proj", "a_proj")
    MIN_HALF_LIFE, MAX_HALF_LIFE, SPREAD = 8.0, 2048.0, 4.0

    def make_rates(self) -> None:
        """How fast the channels forget."""
        width = self.num_heads * self.head_dim
        self.a_proj = nn.Linear(self.spec.hidden_size, self.head_dim, bias=False)
        super().make_rates()
        self.decay_up = nn.Linear(self.head_dim, width, bias=False)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads))
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    def reset_parameters(self) -> None:
        """Neutral start of everything that the teacher does not have."""
        super().reset_parameters()
        nn.init.normal_(self.a_proj.weight, std=self.spec.hidden_size**-0.5)
        nn.init.zeros_(self.decay_up.weight)
        nn.init.zeros_(self.log_rate)
        half_lives_H1 = spread_half_lives(self.num_heads, self.MIN_HALF_LIFE, self.MAX_HALF_LIFE)[
            :, None
        ]
        around_D = spread_half_lives(self.head_dim, 1 / self.SPREAD, self.SPREAD)
        with torch.no_grad():
            self.rate_bias.copy_(inverse_softplus(math.log(2.0) / (half_lives_H1 * around_D)))

    def log_decay(self, rates: Sequence[Tensor]) -> Tensor:
        """Log decays [..., H, D]."""
        raw = self.decay_up(rates[1]).unflatten(-1, (self.num_heads, self.head_dim))
        work = torch.promote_types(raw.dtype, torch.float32)
        rate = F.softplus(raw.to(work) + self.rate_bias.to(work))
        return -self.log_rate.to(work).exp()[:, None] * rate
