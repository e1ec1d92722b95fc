"""Gated DeltaNet (arXiv 2412.06464) that starts from an attention layer's own projections.

B rows, T tokens, H heads, D head width, M = H D; ... are [B, T], or [B] of one decoded token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers.deltanet import DeltaNet
from ltconvert.convert.mixers.linear import Place, inverse_softplus
from ltconvert.kernels.gdn_step import gdn_step
from ltconvert.kernels.gdn_window_step import Ring, gdn_window_step


class GatedDeltaNet(DeltaNet):
    """``S_t = a_t S_{t-1} + b_t k_t (v_t - (a_t S_{t-1})^T k_t)^T``, ``o_t = S_t^T q_t`` per head.

    DeltaNet with ``a = exp(-exp(log_rate) * softplus(a_proj x + rate_bias))``. New beside what it
    has: ``a_proj``, 0 at the start; ``log_rate`` and ``rate_bias``, a number a head, so that the
    decays of the heads have half-lives spread from ``MIN_HALF_LIFE`` to ``MAX_HALF_LIFE`` tokens.
    Differs from the paper as DeltaNet does.
    """

    kind = "gdn"
    RATES = ("b_proj", "a_proj")
    decays = True

    def make_rates(self) -> None:
        """How fast the heads forget."""
        self.a_proj = nn.Linear(self.spec.hidden_size, self.num_heads, bias=False)
        super().make_rates()
        self.log_rate = nn.Parameter(torch.empty(self.num_heads))
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def set_half_lives(self, half_lives_H: Tensor) -> None:
        """See ``LinearMixer``."""
        self.log_rate.zero_()
        self.rate_bias.copy_(inverse_softplus(math.log(2.0) / half_lives_H))

    def log_decay(self, rates: Sequence[Tensor]) -> Tensor:
        """Log decays [..., H]."""
        # A decay of 1 - 1/2048 needs fp32.
        work = torch.promote_types(rates[1].dtype, torch.float32)
        rate = F.softplus(rates[1].to(work) + self.rate_bias.to(work))
        return -self.log_rate.to(work).exp() * rate

    def step(
        self,
        qkv_BM: Tensor,
        gate_BM: Tensor,
        rates: Sequence[Tensor],
        cache_layer: LinearAttentionCacheLayerMixin,
        place: Place,
        ring: Ring | None = None,
    ) -> Tensor:
        """See ``LinearMixer``; one launch, also with a window under one softmax."""
        state = cache_layer.recurrent_states[0]
        assert state is not None
        beta_BH, decay_BH = rates
        step = gdn_step if ring is None else partial(gdn_window_step, ring)
        y_BHD: Tensor = step(
            qkv_BM,
            beta_BH,
            decay_BH,
            self.log_rate,
            self.rate_bias,
            state,
            self.out_norm_weight,
            gate_BM.unflatten(-1, (self.num_heads, self.head_dim)),
            eps=self.spec.rms_norm_eps,
            gate_fn="2sigmoid",
            conv_weight_CW=None if self.conv is None else self.conv.weight,
            conv_history_BCP=None if self.conv is None else cache_layer.conv_states[0],
        )
        if self.conv is not None:
            cache_layer.has_previous_state[0] = True
        return y_BHD
