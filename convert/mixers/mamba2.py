"""Mamba-2's state space dual (arXiv 2405.21060) that starts from an attention layer's projections.

H heads, D head width; ... are [B, T], or [B] of one decoded token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.linear import (
    LinearMixer,
    Place,
    inverse_softplus,
    spread_half_lives,
    unit_rms,
)
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step


class Mamba2(LinearMixer):
    """placeholder"""

    kind = "mamba2"
    RATES = ("a_proj",)
    MIN_HALF_LIFE, MAX_HALF_LIFE = 8.0, 2048.0
    QKNORM = True

    def make_rates(self) -> None:
        """The step, how fast the heads forget, and the way past the state."""
        self.a_proj = nn.Linear(self.spec.hidden_size, self.num_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads))
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads))
        self.skip = nn.Parameter(torch.empty(self.num_heads))

    def reset_parameters(self) -> None:
        """Neutral start of everything that the teacher does not have."""
        super().reset_parameters()
        nn.init.zeros_(self.skip)
        half_lives = spread_half_lives(self.num_heads, self.MIN_HALF_LIFE, self.MAX_HALF_LIFE)
        self.set_half_lives(half_lives)

    @torch.no_grad()
    def set_half_lives(self, half_lives_H):
        rates_H = (math.log(2.0) / half_lives_H).sqrt()
        self.rate_bias.copy_(inverse_softplus(rates_H))
        self.log_rate.copy_(rates_H.log())

    def _inputs(self, q, k, v, rates):
        work = torch.promote_types(v.dtype, torch.float32)
        step = F.softplus(rates[0].to(work) + self.rate_bias.to(work))
        log_decay = -self.log_rate.to(work).exp() * step
        v = v * step[..., None].to(v.dtype)
        if self.QKNORM:
            q, k = unit_rms(q), unit_rms(k)
        return q, k, v, log_decay

    def _skip(self, o, v):
        return o + self.skip.to(v.dtype)[:, None] * v

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rates: Sequence[Tensor],
        state_BHDD: Tensor | None,
        context: SequenceContext,
    ) -> tuple[Tensor, Tensor]:
        """See ``LinearMixer``."""
        o, state = decay_attention(
            *self._inputs(q, k, v, rates),
            initial_state_BHKV=state_BHDD,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
        )
        return self._skip(o, v), state

    def recur_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rates: Sequence[Tensor],
        state_BHDD: Tensor,
        place: Place,
    ) -> tuple[Tensor, Tensor]:
        """See ``LinearMixer``."""
        o, state = decay_attention_step(*self._inputs(q, k, v, rates), state_BHDD)
        return self._skip(o, v), state
