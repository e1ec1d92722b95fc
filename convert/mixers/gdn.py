"""Gated DeltaNet (arXiv 2412.06464) that starts from an attention layer's own projections.

Shape letters: B rows, T tokens, C hidden width, H heads, D head width, W taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers.attention import Projections
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.joint import project_together
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.delta_rule import delta_rule
from ltconvert.kernels.gdn_step import gdn_step
from ltconvert.kernels.norm_gate import norm_gate
from ltconvert.kernels.short_conv import short_conv


class ShortConv(nn.Module):
    """Depthwise causal convolution over q, k and v together; starts as the identity."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The current token alone: weight 1 on the last tap."""
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[:, -1])


class GatedDeltaNet(Projections):
    """``S_t = a_t S_{t-1} + b_t k_t (v_t - (a_t S_{t-1})^T k_t)^T``, ``o_t = S_t^T q_t`` per head.

    q, k, v and the output projection are the teacher's, kv heads expanded head by head; biases and
    q/k norms stay; positions (RoPE) do not enter. What is new starts neutral: the convolution is
    the identity, the output gate is ``2 * sigmoid(0) = 1``, the decays of the heads have half-lives
    spread from ``MIN_HALF_LIFE`` to ``MAX_HALF_LIFE`` tokens, and each token writes with
    ``b = 1/2``. Differs from the paper: no SiLU on q, k, v (the teacher's q.k must survive), and a
    norm weight per head and channel.
    """

    kind = "gdn"
    MIN_HALF_LIFE, MAX_HALF_LIFE = 8.0, 2048.0

    def __init__(self, spec: TeacherSpec, layer: int, *, conv_size: int | None) -> None:
        super().__init__(spec, spec.num_attention_heads)
        width = self.num_heads * self.head_dim
        self.a_proj = nn.Linear(spec.hidden_size, self.num_heads, bias=False)
        self.b_proj = nn.Linear(spec.hidden_size, self.num_heads, bias=False)
        self.gate_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads))
        self.rate_bias = nn.Parameter(torch.empty(self.num_heads))
        self.out_norm_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.conv = ShortConv(3 * width, conv_size) if conv_size else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Neutral start of everything that the teacher does not have."""
        for projection in (self.a_proj, self.b_proj, self.gate_proj):
            nn.init.zeros_(projection.weight)
        nn.init.ones_(self.out_norm_weight)
        nn.init.zeros_(self.log_rate)
        half_lives = torch.logspace(
            math.log10(self.MIN_HALF_LIFE), math.log10(self.MAX_HALF_LIFE), self.num_heads
        )
        rates = math.log(2.0) / half_lives
        with torch.no_grad():
            self.rate_bias.copy_(torch.log(torch.expm1(rates)))  # softplus(rate_bias) = rates

    def inherit(self, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """The teacher's projections with every kv head repeated as a whole, head by head."""
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        expanded = ("k_proj.", "v_proj.") + (("k_norm.",) if self.spec.qk_norm == "full" else ())
        return {
            name: _expand_heads(value, group, self.head_dim) if name.startswith(expanded) else value
            for name, value in teacher.items()
        }

    def forward(
        self,
        x_BTC: Tensor,
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None = None,
    ) -> Tensor:
        """x [B, T, C] (after the pre norm) -> [B, T, C] (after the output projection)."""
        heads = project_together(x_BTC, self.b_proj, self.a_proj)
        projected = [*self.project(x_BTC), *heads, self.gate_proj(x_BTC)]
        context.keep(self, projected)
        return self.o_proj(self.mix(projected, context, cache_layer).to(x_BTC.dtype))

    def take_in(
        self,
        kept: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin,
    ) -> None:
        """Update the state in ``cache_layer`` with what another visit of this layer projected."""
        self.mix(kept, context, cache_layer)

    def mix(
        self,
        projected: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> Tensor:
        """Outputs of the heads, [B, T, H * D].

        Args:
            projected: q, k, v [B, T, H, D] without positions, then what ``b_proj`` and ``a_proj``
                [B, T, H] and ``gate_proj`` [B, T, H * D] give.
        """
        q, k, v, b_BTH, a_BTH, gate_BTM = projected
        if cache_layer is not None and _decodes(q, context, cache_layer):
            return self._step(projected, cache_layer)
        if self.conv is not None:
            q, k, v = self._convolve(q, k, v, context, cache_layer)
        work = torch.promote_types(a_BTH.dtype, torch.float32)  # a decay of 1 - 1/2048 needs it
        beta_BTH = torch.sigmoid(b_BTH.to(work))
        rate_BTH = F.softplus(a_BTH.to(work) + self.rate_bias.to(work))
        log_decay_BTH = -self.log_rate.to(work).exp() * rate_BTH
        o_BTHD = self._recur(q, k, v, beta_BTH, log_decay_BTH, context, cache_layer)
        gate_BTHD = gate_BTM.unflatten(-1, (self.num_heads, self.head_dim))
        y_BTHD = norm_gate(
            o_BTHD, self.out_norm_weight, gate_BTHD, eps=self.spec.rms_norm_eps, gate_fn="2sigmoid"
        )
        return y_BTHD.flatten(2)

    def _step(
        self, projected: Sequence[Tensor], cache_layer: LinearAttentionCacheLayerMixin
    ) -> Tensor:
        """What ``mix`` gives for one token, [B, 1, H * D]; the cache in place."""
        q, k, v, b_B1H, a_B1H, gate_B1M = projected
        state = cache_layer.recurrent_states[0]
        assert state is not None
        y_BHD = gdn_step(
            torch.cat([y.flatten(1) for y in (q, k, v)], dim=-1),
            b_B1H[:, 0],
            a_B1H[:, 0],
            self.log_rate,
            self.rate_bias,
            state,
            self.out_norm_weight,
            gate_B1M.view(-1, self.num_heads, self.head_dim),
            eps=self.spec.rms_norm_eps,
            gate_fn="2sigmoid",
            conv_weight_CW=None if self.conv is None else self.conv.weight,
            conv_history_BCP=None if self.conv is None else cache_layer.conv_states[0],
        )
        if self.conv is not None:
            cache_layer.has_previous_state[0] = True
        return y_BHD.flatten(1)[:, None]

    def _convolve(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> list[Tensor]:
        assert self.conv is not None
        x_BTM = torch.cat([y.flatten(2) for y in (q, k, v)], dim=-1)
        history = None
        if cache_layer is not None and cache_layer.has_previous_state[0]:
            history = cache_layer.conv_states[0]
        y_BTM, new_history = short_conv(
            x_BTM,
            self.conv.weight,
            history_BDH=history,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
            activation=None,
        )
        if cache_layer is not None:
            _store_conv(cache_layer, new_history)
        return [y.unflatten(-1, (self.num_heads, self.head_dim)) for y in y_BTM.chunk(3, dim=-1)]

    def _recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta_BTH: Tensor,
        log_decay_BTH: Tensor,
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> Tensor:
        state = None
        if cache_layer is not None and cache_layer.is_recurrent_states_initialized[0]:
            state = cache_layer.recurrent_states[0]
        o_BTHD, state = delta_rule(
            q,
            k,
            v,
            beta_BTH,
            log_decay_BTH,
            initial_state_BHKV=state,
            segment_ids_BT=context.segment_ids_BT,
            keep_BT=context.keep_BT,
        )
        if cache_layer is not None:
            cache_layer.update_recurrent_state(state.detach())
        return o_BTHD


def _expand_heads(value: Tensor, group: int, head_dim: int) -> Tensor:
    """Repeat whole kv heads: [G * D, ...] -> [G * group * D, ...], never row by row."""
    heads = value.unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(group, dim=0).flatten(0, 1)


def _decodes(
    q_BTHD: Tensor, context: SequenceContext, cache_layer: LinearAttentionCacheLayerMixin
) -> bool:
    """Whether this is one more token of sequences in the cache, with no gradient to come."""
    return (
        q_BTHD.shape[1] == 1
        and context.keep_BT is None
        and cache_layer.is_recurrent_states_initialized[0]
        and not torch.is_grad_enabled()
    )


def _store_conv(cache_layer: LinearAttentionCacheLayerMixin, history_BDH: Tensor) -> None:
    """Put the convolution's history where transformers' cache layers keep it."""
    if not cache_layer.is_conv_states_initialized[0]:
        cache_layer.lazy_initialization(conv_states=history_BDH)
    stored = cache_layer.conv_states[0]
    assert stored is not None
    stored.copy_(history_BDH)
    cache_layer.has_previous_state[0] = True
