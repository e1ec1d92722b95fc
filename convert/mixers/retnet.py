"""Retention (arXiv 2307.08621) that starts from an attention layer's own projections.

B rows, T tokens, H heads, D head width.
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
from ltconvert.convert.mixers.rope import rotated
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step


class Retention(LinearMixer):
    """placeholder"""

    kind = "retnet"
    uses_rope = True
    MIN_HALF_LIFE, MAX_HALF_LIFE = 8.0, 2048.0
    QKNORM, ROPE = True, True

    def make_rates(self) -> None:
        """How fast the heads forget."""
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads))

    def reset_parameters(self) -> None:
        """Neutral start of everything that the teacher does not have."""
        super().reset_parameters()
        self.set_half_lives(spread_half_lives(self.num_heads, self.MIN_HALF_LIFE, self.MAX_HALF_LIFE))

    @torch.no_grad()
    def set_half_lives(self, half_lives_H):
        self.rate_bias.copy_(inverse_softplus(math.log(2.0) / half_lives_H))

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
        q_BHTD, k_BHTD = q.transpose(1, 2), k.transpose(1, 2)
        q_BHTD, k_BHTD = self._placed(q_BHTD, k_BHTD, context.rope)
        log_decay_H = self.log_decay(v.dtype)
        o_BTHD, state_BHDD = decay_attention(
            q_BHTD.transpose(1, 2),
            k_BHTD.transpose(1, 2),
            self._share(v, log_decay_H),
            log_decay_H,
            initial_state_BHKV=state_BHDD,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
        )
        return self._mean(o_BTHD, log_decay_H, context.positions_BT), state_BHDD

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
        rope = {name: (cos[:, None], sin[:, None]) for name, (cos, sin) in place.rope.items()}
        q_BH1D, k_BH1D = self._placed(q[:, :, None], k[:, :, None], rope)
        log_decay_H = self.log_decay(v.dtype)
        o_BHD, state_BHDD = decay_attention_step(
            q_BH1D[:, :, 0], k_BH1D[:, :, 0], self._share(v, log_decay_H), log_decay_H, state_BHDD
        )
        return self._mean(o_BHD, log_decay_H, place.positions_B), state_BHDD

    def log_decay(self, dtype: torch.dtype) -> Tensor:
        """Log decays [H], in at least fp32."""
        work = torch.promote_types(dtype, torch.float32)
        return -F.softplus(self.rate_bias.to(work))

    def _placed(self, q_BHTD, k_BHTD, rope):
        if self.QKNORM:
            q_BHTD, k_BHTD = unit_rms(q_BHTD), unit_rms(k_BHTD)
        return rotated(q_BHTD, k_BHTD, rope, self.rope_name) if self.ROPE else (q_BHTD, k_BHTD)

    def _share(self, v, log_decay_H):
        return v * -torch.expm1(log_decay_H)[:, None].to(v.dtype)

    def _mean(self, o, log_decay_H, positions):
        seen = (positions + 1).to(log_decay_H.dtype)[..., None] * log_decay_H
        return o * (-1 / torch.expm1(seen))[..., None].to(o.dtype)
