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
from ltconvert.convert.mixers.linear import LinearMixer, Place, inverse_softplus, unit_rms
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step


class Mamba2(LinearMixer):
    """``S_t = a_t S_{t-1} + d_t k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(D) + skip * v_t`` per head.

    The step ``d = softplus(a_proj x + rate_bias)`` writes and forgets alike, ``a = exp(-A d)`` with
    ``A = exp(log_rate)``. In the paper's letters q is C, k is B, v is x and ``skip`` is D. q and k
    have a root mean square of 1 (the paper's have none; queries and keys of a trained softmax reach
    lengths at which half precision has no digits left for a sum).

    New beside what ``LinearMixer`` has: ``a_proj``, 0 at the start; ``rate_bias`` and ``log_rate``,
    a number a head, which start with ``d = A = sqrt(log 2 / half-life)``, so that the outputs of a
    head are of one size whatever its half-life (writes that come at random add up to a variance of
    ``d / 2A``), half-lives spread from ``MIN_HALF_LIFE`` to ``MAX_HALF_LIFE`` tokens; ``skip``, a
    number a head, 0. Differs from the paper in that and as DeltaNet does: no SiLU on q, k, v, gate
    behind the norm.

    The state is bounded: ``sum_s d_s exp(-A sum_{r>s} d_r) <= max d + 1/A``.
    """

    kind = "mamba2"
    RATES = ("a_proj",)
    decays = True

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

    @torch.no_grad()
    def set_half_lives(self, half_lives_H: Tensor) -> None:
        """See ``LinearMixer``."""
        steps_H = (math.log(2.0) / half_lives_H).sqrt()
        self.log_rate.copy_(steps_H.log())
        self.rate_bias.copy_(inverse_softplus(steps_H))

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
        return self._past(o, v), state

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
        return self._past(o, v), state

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, rates: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and log decays [..., H] as ``decay_attention`` reads them."""
        work = torch.promote_types(v.dtype, torch.float32)
        step = F.softplus(rates[0].to(work) + self.rate_bias.to(work))
        log_decay = -self.log_rate.to(work).exp() * step
        return unit_rms(q), unit_rms(k), v * step[..., None].to(v.dtype), log_decay

    def _past(self, o: Tensor, v: Tensor) -> Tensor:
        """With what goes past the state."""
        return o + self.skip.to(v.dtype)[:, None] * v
