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
from ltconvert.convert.mixers.linear import LinearMixer, Place, inverse_softplus, unit_rms
from ltconvert.convert.mixers.rope import rotated
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step


class Retention(LinearMixer):
    """``S_t = g S_{t-1} + (1 - g) k_t v_t^T``, ``o_t = S_t^T q_t / (sqrt(D) (1 - g^n))`` per head.

    n is the number of tokens so far, g in (0, 1) the decay, the same at every token. q and k have
    the teacher's positions (RoPE), as the paper's have xPos, and a root mean square of 1.

    New beside what ``LinearMixer`` has: ``rate_bias``, a number a head, ``g =
    exp(-softplus(rate_bias))``, half-lives spread from ``MIN_HALF_LIFE`` to ``MAX_HALF_LIFE``
    tokens at the start. Differs from the paper: decays learn, and what makes it stable where layers
    are visited again and again (plain retention is reported to diverge in loops):

    - The weights ``(1 - g) g^(t-s) / (1 - g^n)`` add up to 1: outputs are a weighted mean, as those
      of softmax attention are, where plain retention adds up to ``1 / (1 - g)`` tokens.
    - Scores ``q.k / sqrt(D)`` lie in ``[-sqrt(D), sqrt(D)]``, so ``|o| <= sqrt(D) max |v|`` and
      the state's entries stay below ``sqrt(D) max |v|``, for any weights and any length (times f^2
      and f with YaRN, whose tables are f times as large).
    - The gate is ``2 * sigmoid``, at most 2, where swish grows with its input; the norm of each
      head comes before it.

    So one visit adds at most ``2 sqrt(D) |out_norm_weight|`` a head before the output projection,
    whatever its input: over T loops what the mixers add to the residual stream grows with T and
    not with a power of the stream.
    """

    kind = "retnet"
    uses_rope = decays = True

    def make_rates(self) -> None:
        """How fast the heads forget."""
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def set_half_lives(self, half_lives_H: Tensor) -> None:
        """See ``LinearMixer``."""
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
        log_decay_H = self._log_decay(v.dtype)
        o_BTHD, state_BHDD = decay_attention(
            q_BHTD.transpose(1, 2),
            k_BHTD.transpose(1, 2),
            _share(v, log_decay_H),
            log_decay_H,
            initial_state_BHKV=state_BHDD,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
        )
        return _mean(o_BTHD, log_decay_H, context.positions_BT), state_BHDD

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
        log_decay_H = self._log_decay(v.dtype)
        o_BHD, state_BHDD = decay_attention_step(
            q_BH1D[:, :, 0], k_BH1D[:, :, 0], _share(v, log_decay_H), log_decay_H, state_BHDD
        )
        return _mean(o_BHD, log_decay_H, place.positions_B), state_BHDD

    def _log_decay(self, dtype: torch.dtype) -> Tensor:
        """log g [H], in at least fp32."""
        return -F.softplus(self.rate_bias.to(torch.promote_types(dtype, torch.float32)))

    def _placed(
        self, q_BHTD: Tensor, k_BHTD: Tensor, rope: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        return rotated(unit_rms(q_BHTD), unit_rms(k_BHTD), rope, self.rope_name)


def _share(v: Tensor, log_decay_H: Tensor) -> Tensor:
    """(1 - g) v, [..., H, D]."""
    return v * -torch.expm1(log_decay_H)[:, None].to(v.dtype)


def _mean(o: Tensor, log_decay_H: Tensor, positions: Tensor) -> Tensor:
    """o over 1 - g^n, [..., H, D]; positions [...] count the tokens before."""
    seen = -torch.expm1((positions + 1)[..., None].to(log_decay_H.dtype) * log_decay_H)
    return o / seen[..., None].to(o.dtype)
