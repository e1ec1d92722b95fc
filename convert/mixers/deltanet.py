"""DeltaNet (arXiv 2406.06484) that starts from an attention layer's own projections.

B rows, T tokens, H heads, D head width; ... are [B, T], or [B] of one decoded token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.linear import LinearMixer, Place
from ltconvert.kernels.delta_rule import delta_rule, delta_rule_step


class DeltaNet(LinearMixer):
    """``S_t = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T``, ``o_t = S_t^T q_t`` per head.

    q and k have length 1; ``b = sigmoid(b_proj x)``. New beside what ``LinearMixer`` has:
    ``b_proj``, which starts at 0, so that each token writes with ``b = 1/2``. Nothing is forgotten
    but what a later token writes over. Differs from the paper: no SiLU on q, k, v (the teacher's
    q.k must survive), an output gate, and a norm weight per head and channel.
    """

    kind = "deltanet"
    RATES: ClassVar[tuple[str, ...]] = ("b_proj",)

    def make_rates(self) -> None:
        """How much a token writes."""
        self.b_proj = nn.Linear(self.spec.hidden_size, self.num_heads, bias=False)

    def log_decay(self, rates: Sequence[Tensor]) -> Tensor | None:
        """Log decays [..., H] or [..., H, D] from the projections in ``RATES``; None for none."""
        return None

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
        return delta_rule(
            q,
            k,
            v,
            _write_share(rates[0]),
            self.log_decay(rates),
            initial_state_BHKV=state_BHDD,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
        )

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
        return delta_rule_step(q, k, v, _write_share(rates[0]), self.log_decay(rates), state_BHDD)


def _write_share(beta: Tensor) -> Tensor:
    return torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32)))
