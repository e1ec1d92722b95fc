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
from ltconvert.convert.mixers.linear import inverse_softplus


class KimiDeltaAttention(DeltaNet):
    """``S_t = A_t S_{t-1} + b_t k_t (v_t - (A_t S_{t-1})^T k_t)^T``, ``o_t = S_t^T q_t`` per head.

    DeltaNet with a decay for each key channel: ``A = diag(a)``, ``log a = -exp(log_rate) *
    softplus(decay_up a_proj x + rate_bias)``, ``decay_up a_proj`` of rank D. New beside what
    DeltaNet has: ``a_proj`` [D, C], random, and ``decay_up`` [M, D], 0, so that the decays do not
    depend on the token at the start and both matrices learn; ``log_rate``, a number a head, 0;
    ``rate_bias``, a number a channel, the same over a head, so that the heads' half-lives are those
    of Gated DeltaNet. Differs from the paper as DeltaNet does, and in a gate of full rank.
    """

    kind = "kda"
    RATES = ("b_proj", "a_proj")
    decays = True

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
        nn.init.zeros_(self.decay_up.weight)

    def reset_projections(self) -> None:
        """See ``LinearMixer``; one factor of the decays is random, so that both learn."""
        super().reset_projections()
        nn.init.normal_(self.a_proj.weight, std=self.spec.hidden_size**-0.5)

    @torch.no_grad()
    def set_half_lives(self, half_lives_H: Tensor) -> None:
        """See ``LinearMixer``; the channels of a head alike."""
        self.log_rate.zero_()
        self.rate_bias.copy_(inverse_softplus(math.log(2.0) / half_lives_H)[:, None])

    def log_decay(self, rates: Sequence[Tensor]) -> Tensor:
        """Log decays [..., H, D]."""
        raw = self.decay_up(rates[1]).unflatten(-1, (self.num_heads, self.head_dim))
        work = torch.promote_types(raw.dtype, torch.float32)
        rate = F.softplus(raw.to(work) + self.rate_bias.to(work))
        return -self.log_rate.to(work).exp()[:, None] * rate
