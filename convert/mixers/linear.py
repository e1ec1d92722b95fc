"""What linear mixers share: projections, short convolution, cache, decoding, norm and gate.

B rows, T tokens, C hidden width, H heads, D head width, M = H D, W taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers.attention import Projections
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.convolution import ShortConv, convolve, convolve_step
from ltconvert.convert.mixers.joint import project_together
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.norm_gate import norm_gate


@dataclass(frozen=True)
class Place:
    """Where one decoded token of each row stands.

    Attributes:
        rope: (cos, sin), each [B or 1, D], by RoPE name.
        positions_B: real tokens of the row before it, [B or 1].
    """

    rope: dict[str, tuple[Tensor, Tensor]]
    positions_B: Tensor

    def turn(self, rope_name: str | None) -> dict[str, Any]:
        """Its cosines and sines as the keywords of kernels; None for both without RoPE."""
        cos, sin = (None, None) if rope_name is None else self.rope[rope_name]
        return {"cos_BD": cos, "sin_BD": sin}


class LinearMixer(Projections):
    """``o = recurrence(conv(q, k, v))``, ``y = norm(o) * gate``, per head; a state, no keys.

    From the teacher's attention, tensor by tensor: ``q_proj``, ``k_proj`` and ``v_proj`` with their
    biases and ``q_norm``/``k_norm``, kv heads repeated as whole heads; ``o_proj`` with its bias.
    New, and neutral at the start: ``conv`` is the identity, ``gate_proj`` is 0 and the gate
    ``2 * sigmoid(0) = 1``, ``out_norm_weight`` (a head and channel) is 1 until calibration sets it
    to the size of the teacher's head outputs. What else is new is the subclass's: it says what is
    between the convolution and the norm. Positions (RoPE) do not enter unless it says so.

    Norm and gate bound what a head hands on by ``2 sqrt(D) |out_norm_weight|``, whatever is in the
    state.

    Attributes:
        RATES: projections of the input beside q, k, v and the gate.
        BESIDE: further ones, to few channels, which ``mixed`` reads and ``mix`` does not.
        decays: whether the state is forgotten with time, so that heads have half-lives.
    """

    keeps_keys, keeps_state, uses_rope = False, True, False
    RATES: ClassVar[tuple[str, ...]] = ()
    BESIDE: ClassVar[tuple[str, ...]] = ()
    decays: ClassVar[bool] = False
    MIN_HALF_LIFE, MAX_HALF_LIFE = 8.0, 2048.0  # of the neutral start, in tokens

    def __init__(self, spec: TeacherSpec, layer: int, *, conv_size: int | None) -> None:
        super().__init__(spec, layer, spec.num_attention_heads)
        self.rope_name = spec.layer_rope[layer]
        width = self.num_heads * self.head_dim
        self.make_rates()
        self.gate_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.out_norm_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.conv = ShortConv(3 * width, conv_size) if conv_size else None
        self.reset_parameters()

    def make_rates(self) -> None:
        """Make the parameters of the recurrence; ``RATES`` names the projections among them."""

    def reset_parameters(self) -> None:
        """Neutral start of everything that the teacher does not have."""
        if hasattr(self, "gate_proj"):  # a core has none
            self.reset_projections()
        nn.init.ones_(self.out_norm_weight)
        if self.decays:
            shortest, longest = self.MIN_HALF_LIFE, self.MAX_HALF_LIFE
            self.set_half_lives(spread_half_lives(self.num_heads, shortest, longest))

    def reset_projections(self) -> None:
        """That of the projections among them."""
        for name in (*self.RATES, "gate_proj"):
            nn.init.zeros_(getattr(self, name).weight)

    @classmethod
    def projections(cls) -> tuple[str, ...]:
        """Names of all projections of the input, in the order in which ``mixed`` reads them."""
        return "q_proj", "k_proj", "v_proj", *cls.RATES, "gate_proj", *cls.BESIDE

    def core(self) -> Self:
        """This mixer without projections and their norms; only ``mixed`` works then."""
        for name in (*self.projections(), "o_proj", "q_norm", "k_norm"):
            if hasattr(self, name):
                delattr(self, name)
        return self

    def set_half_lives(self, half_lives_H: Tensor) -> None:
        """Start with heads that forget half of what they hold in so many tokens."""
        raise NotImplementedError(f"a {self.kind} mixer has no decays")

    def inherit(self, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """The teacher's projections with every kv head repeated as a whole, head by head."""
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        expanded = ("k_proj.", "v_proj.") + (("k_norm.",) if self.spec.qk_norm == "full" else ())
        return {
            name: _expand_heads(value, group, self.head_dim, name)
            if name.startswith(expanded) and not name.endswith("lora_a")  # on the input's side
            else value
            for name, value in teacher.items()
        }

    def forward(
        self,
        x_BTC: Tensor,
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None = None,
    ) -> Tensor:
        """x [B, T, C] (after the pre norm) -> [B, T, C] (after the output projection)."""
        narrow = [getattr(self, name) for name in (*self.RATES, *self.BESIDE)]
        narrow = project_together(x_BTC, *narrow)
        rates, beside = narrow[: len(self.RATES)], narrow[len(self.RATES) :]
        projected = [*self.project(x_BTC, context.loop), *rates, self.gate_proj(x_BTC), *beside]
        context.keep(self, projected)
        o_BTM = self.mixed(projected, context, cache_layer).to(x_BTC.dtype)
        return self.o_proj(o_BTM, context.loop)

    def mixed(
        self,
        projected: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> Tensor:
        """All between the projections of the input and the output projection, [B, T, M].

        Args:
            projected: as ``mix`` reads it, then what the projections in ``BESIDE`` give.
        """
        return self.mix(projected, context, cache_layer)

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
        """Outputs of the heads, [B, T, M].

        Args:
            projected: q, k, v [B, T, H, D] without positions, then what the projections in
                ``RATES`` [B, T, ...] and ``gate_proj`` [B, T, M] give.
        """
        q, k, v, *rates, gate_BTM = projected
        if cache_layer is not None and _decodes(q, context, cache_layer):
            y_BHD = self.step(
                torch.cat([y.flatten(1) for y in (q, k, v)], dim=-1),
                gate_BTM[:, 0],
                [rate[:, 0] for rate in rates],
                cache_layer,
                context.remembered("place", lambda: _place(context)),
            )
            return y_BHD.flatten(1)[:, None]
        if self.conv is not None:
            q, k, v = convolve(self.conv, (q, k, v), context, cache_layer)
        state = None
        if cache_layer is not None and cache_layer.is_recurrent_states_initialized[0]:
            state = cache_layer.recurrent_states[0]
        o_BTHD, state = self.recur(q, k, v, rates, state, context)
        if cache_layer is not None:
            cache_layer.update_recurrent_state(state.detach())
        return self._close(o_BTHD, gate_BTM).flatten(2)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rates: Sequence[Tensor],
        state_BHDD: Tensor | None,
        context: SequenceContext,
    ) -> tuple[Tensor, Tensor]:
        """The recurrence over a sequence.

        Args:
            q, k, v: [B, T, H, D] each.
            rates: what the projections in ``RATES`` gave, [B, T, ...].
            state_BHDD: of the tokens before; None for none.

        Returns:
            Outputs [B, T, H, D] and the new state.
        """
        raise NotImplementedError

    def recur_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rates: Sequence[Tensor],
        state_BHDD: Tensor,
        place: Place,
    ) -> tuple[Tensor, Tensor]:
        """One token of ``recur``: everything without the axis T; the old state is not changed."""
        raise NotImplementedError

    def step(
        self,
        qkv_BM: Tensor,
        gate_BM: Tensor,
        rates: Sequence[Tensor],
        cache_layer: LinearAttentionCacheLayerMixin,
        place: Place,
    ) -> Tensor:
        """One decoded token from its projections, y [B, H, D]; the cache changes in place."""
        if self.conv is not None:
            qkv_BM = convolve_step(self.conv, qkv_BM, cache_layer)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in qkv_BM.chunk(3, dim=-1))
        state_BHDD = cache_layer.recurrent_states[0]
        assert state_BHDD is not None
        o_BHD, state_BHDD = self.recur_step(q, k, v, rates, state_BHDD, place)
        cache_layer.update_recurrent_state(state_BHDD)
        return self._close(o_BHD, gate_BM)

    def _close(self, o: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate: o [..., H, D], gate [..., M] -> [..., H, D]."""
        gate = gate.unflatten(-1, (self.num_heads, self.head_dim))
        eps = self.spec.rms_norm_eps
        return norm_gate(o, self.out_norm_weight, gate, eps=eps, gate_fn="2sigmoid")


def spread_half_lives(count: int, shortest: float, longest: float) -> Tensor:
    """Half-lives in tokens, evenly spread on a logarithmic scale, [count]."""
    return torch.logspace(math.log10(shortest), math.log10(longest), count)


def inverse_softplus(rates: Tensor) -> Tensor:
    """x with ``softplus(x) = rates``."""
    return torch.log(torch.expm1(rates))


def unit_rms(x: Tensor) -> Tensor:
    """x over its root mean square along the last axis (0 stays 0), in x's dtype."""
    work = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(work), x.shape[-1:], eps=1e-6).to(x.dtype)


def _expand_heads(value: Tensor, group: int, head_dim: int, name: str) -> Tensor:
    """Repeat whole kv heads, never row by row: an axis of G * D becomes one of G * group * D.

    It is the last axis of vectors and the last but one of matrices; loops may stand before it.
    """
    axis = -1 if name.endswith("bias") or "norm" in name else -2
    heads = value.movedim(axis, 0).unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(group, dim=0).flatten(0, 1).movedim(0, axis)


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


def _place(context: SequenceContext) -> Place:
    """Of a pass of one token."""
    rope = {name: (cos[:, 0], sin[:, 0]) for name, (cos, sin) in context.rope.items()}
    return Place(rope, context.positions_BT[:, 0])
