"""One token of one layer: few launches, fixed shapes, nothing the host waits for.

What a layer's ``forward`` computes, with the projections of a branch in one matrix and the norms,
activations and sums inside the products (``kernels/decode_*``).

B rows, C hidden width, R rows of a joined weight, M channels of the heads together, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ltconvert.convert.decode_weights import join, linears_of
from ltconvert.convert.mixers.linear import Place
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.students.blocks import DecoderLayer
from ltconvert.convert.students.static_layers import StaticKeys
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.decode_attention import decode_self_attention
from ltconvert.kernels.decode_heads import decode_heads
from ltconvert.kernels.decode_linear import GateActivation, decode_linear
from ltconvert.kernels.decode_norm import decode_norm, decode_norms
from ltconvert.kernels.gdn_window_step import Ring

if TYPE_CHECKING:
    from ltconvert.convert.decode_depth import DepthNow

ACTIVATIONS: dict[str, GateActivation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "b_proj", "a_proj", "rest_proj",
    "index_q_proj", "index_k_proj", "index_weight_proj", "branch_proj",
)  # fmt: skip


@dataclass(frozen=True)
class Now(Place):
    """What all visits of one step share; all of it on the device.

    Attributes:
        slots: by number of slots, where the new token goes, [B].
        used: by number of slots, how many are filled then, [B].
        outside: by window, whether a token of the row lies before it, [B].
        first: the slot of a cache that has one, [B].
        arrivals: room for kernels to count in, [B, H], see ``decode_attention``.
        kept: by layer, the projections of its last visit, [B, R]; None where nobody asks.
        depth: the token's depth stream; None where no layer reads one.
    """

    slots: dict[int, Tensor]
    used: dict[int, Tensor]
    outside: dict[int, Tensor]
    first: Tensor
    arrivals: Tensor
    kept: dict[LayerStep, Tensor] | None = None
    depth: DepthNow | None = None


class Stream(NamedTuple):
    """The residual stream [B, C], and the norm that reads it next where that is made already."""

    h_BC: Tensor
    ready_BC: Tensor | None = None

    def product(
        self,
        weight_RC: Tensor,
        bias_R: Tensor | None,
        norm: nn.Module,
        *,
        swiglu: bool = False,
        activation: GateActivation = "silu",
    ) -> Tensor:
        """linear(norm(stream)), see ``decode_linear``."""
        x_BC, how = (self.h_BC, norm_of(norm)) if self.ready_BC is None else (self.ready_BC, {})
        return decode_linear(
            x_BC, weight_RC, bias_R, swiglu=swiglu, activation=activation, **how
        )  # fmt: skip

    def add(
        self, x_BM: Tensor, linear: nn.Linear, layer: DecoderLayer, norm: nn.Module,
        behind: nn.Module | None,
    ) -> Stream:  # fmt: skip
        """With norm(linear(x)) added, or of an outer norm, norm(stream + linear(x)).

        What ``behind`` makes of it comes out of the same launch as a norm.
        """
        given = x_BM, linear.weight, linear.bias
        if not isinstance(norm, RMSNorm):
            return Stream(decode_linear(*given, residual_BO=self.h_BC))
        y_BC = decode_linear(*given, residual_BO=self.h_BC if layer.outer else None)
        rest_BC = None if layer.outer else self.h_BC
        if not isinstance(behind, RMSNorm):
            return Stream(decode_norm(y_BC, norm.weight, rest_BC, eps=norm.eps, offset=norm.offset))
        return Stream(
            *decode_norms(
                y_BC, norm.weight, rest_BC, behind.weight, eps=norm.eps, offset=norm.offset,
                next_eps=behind.eps, next_offset=behind.offset,
            )
        )  # fmt: skip


class LayerStep:
    """One layer; what differs by mixer is ``mix``."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.layer = layer
        projections = list(linears_of(layer.mixer, _PROJECTIONS))
        self.weight, self.bias = join(projections)
        self.sizes = [linear.out_features for linear in projections]
        self.gate_up = join([layer.mlp.gate_proj, layer.mlp.up_proj])

    def __call__(
        self, stream: Stream, cache_layer: Any, now: Now, behind: nn.Module | None
    ) -> Stream:
        """The residual stream in front of the layer -> behind it, ready for the norm ``behind``."""
        layer, before_BC = self.layer, stream.h_BC
        y_BR = stream.product(self.weight, self.bias, layer.pre_mixer_norm)
        if now.kept is not None:
            now.kept[self] = y_BR
        o_BM, linear = self.mix(y_BR, cache_layer, now), layer.mixer.o_proj
        stream = stream.add(o_BM, linear, layer, layer.post_mixer_norm, layer.pre_mlp_norm)
        if now.depth is not None:
            now.depth.leave(layer, before_BC, stream.h_BC)
        activation = ACTIVATIONS.get(layer.mixer.spec.hidden_act)
        if activation is None:
            return Stream(layer.with_mlp(stream.h_BC, layer.mlp_branch(stream.h_BC)))
        m_BI = stream.product(*self.gate_up, layer.pre_mlp_norm, swiglu=True, activation=activation)
        return stream.add(m_BI, layer.mlp.down_proj, layer, layer.post_mlp_norm, behind)

    def mix(self, y_BR: Tensor, cache_layer: Any, now: Now) -> Tensor:
        """All projections of the token -> what the output projection reads, [B, M]."""
        raise NotImplementedError

    def take_in(self, y_BR: Tensor, cache_layer: Any, now: Now) -> None:
        """Put the projections of another visit into a cache, see ``students/exits.py``."""
        raise NotImplementedError


class AttentionStep(LayerStep):
    """Softmax attention over a slot's keys, full or a ring."""

    def mix(self, y_BR: Tensor, cache_layer: StaticKeys, now: Now) -> Tensor:
        """See ``LayerStep``."""
        width = sum(self.sizes[:3])
        o_BM = self.attend(y_BR[:, :width], cache_layer, now).flatten(1)
        return o_BM if len(self.sizes) == 3 else o_BM * (2.0 * torch.sigmoid(y_BR[:, width:]))

    def attend(self, qkv_BM: Tensor, cache_layer: StaticKeys, now: Now) -> Tensor:
        """q, k and v side by side -> outputs of the heads, [B, H, D]; k and v are kept."""
        mixer: Any = self.layer.mixer
        norms = _head_norms(mixer)
        return attended(qkv_BM, mixer.spec, mixer.rope_name, cache_layer, now, **norms)

    def take_in(self, y_BR: Tensor, cache_layer: StaticKeys, now: Now) -> None:
        """See ``LayerStep``."""
        qkv_BM = y_BR[:, : sum(self.sizes[:3])]
        placed(qkv_BM, self.layer.mixer, cache_layer, now)


class LinearStep(LayerStep):
    """A recurrence, its convolution and its gated norm."""

    def mix(self, y_BR: Tensor, cache_layer: LinearAttentionLayer, now: Now) -> Tensor:
        """See ``LayerStep``."""
        return self.mix_heads(*self.parts(y_BR, now), cache_layer, now).flatten(1)

    def take_in(self, y_BR: Tensor, cache_layer: LinearAttentionLayer, now: Now) -> None:
        """See ``LayerStep``; what the heads give is left."""
        self.mix(y_BR, cache_layer, now)

    def parts(self, y_BR: Tensor, now: Now) -> tuple[Tensor, list[Tensor]]:
        """q, k and v side by side [B, M], normed where the layer does, and the rest."""
        qkv_BM, *others = y_BR.split([sum(self.sizes[:3]), *self.sizes[3:]], dim=-1)
        if self.layer.mixer.spec.qk_norm is not None:
            qkv_BM = _normed_heads(qkv_BM, self.layer.mixer, now)
        return qkv_BM, others

    def mix_heads(self, qkv_BM: Tensor, others: list[Tensor], cache_layer: Any, now: Now) -> Tensor:
        """q, k, v, and the other projections in their order -> outputs of the heads, [B, H, D]."""
        return recurred(qkv_BM, others, self.layer.mixer, cache_layer, now)


class WindowedGatedDeltaNetStep(LinearStep):
    """The recurrence and a ring of keys under one softmax."""

    def mix_heads(self, qkv_BM: Tensor, others: list[Tensor], cache_layer: Any, now: Now) -> Tensor:
        """See ``LinearStep``."""
        return windowed(qkv_BM, others, self.layer.mixer, cache_layer, now)


def normed(x_BC: Tensor, norm: RMSNorm) -> Tensor:
    """A norm by itself, [B, C]."""
    return decode_norm(x_BC, norm.weight, eps=norm.eps, offset=norm.offset)


def norm_of(norm: nn.Module) -> dict[str, Any]:
    """A norm as the keywords of ``decode_linear``."""
    if not isinstance(norm, RMSNorm):
        return {}
    return {"norm_weight_C": norm.weight, "norm_eps": norm.eps, "norm_offset": norm.offset}


def _head_norms(mixer: Any) -> dict[str, Any]:
    """The q/k norms of a mixer as the keywords of ``decode_heads``."""
    if mixer.spec.qk_norm is None:
        return {}
    return {
        "q_norm_weight": mixer.q_norm.weight,
        "k_norm_weight": mixer.k_norm.weight,
        "norm_eps": mixer.q_norm.eps,
        "norm_offset": mixer.q_norm.offset,
    }


def placed(qkv_BM: Tensor, mixer: Any, cache: StaticKeys, now: Now) -> Tensor:
    """Queries [B, H, D] with norms and positions; keys and values go into the cache."""
    return decode_heads(
        qkv_BM, cache.keys, cache.values, now.slots[cache.slots], num_heads=mixer.num_heads,
        **now.turn(mixer.rope_name), **_head_norms(mixer),
    )  # fmt: skip


def attended(
    qkv_BM: Tensor,
    spec: TeacherSpec,
    rope_name: str | None,
    cache: StaticKeys,
    now: Now,
    **norms: Any,
) -> Tensor:
    """Softmax attention over what a slot holds, the token's own key in it, [B, H, D]."""
    return decode_self_attention(
        qkv_BM, cache.keys, cache.values, now.slots[cache.slots], now.used[cache.slots],
        num_heads=spec.num_attention_heads, scale=spec.attention_scale,
        soft_cap=spec.attention_softcap, arrivals_BH=now.arrivals, **now.turn(rope_name), **norms,
    )  # fmt: skip


def recurred(qkv_BM: Tensor, others: list[Tensor], mixer: Any, cache: Any, now: Now) -> Tensor:
    """A linear mixer's outputs of the heads, [B, H, D]; ``others``: gate, rates, what else."""
    gate_BM, *rates = others[: 1 + len(mixer.RATES)]
    y_BHD: Tensor = mixer.step(qkv_BM, gate_BM, rates, cache, now)
    return y_BHD


def windowed(qkv_BM: Tensor, others: list[Tensor], mixer: Any, cache: Any, now: Now) -> Tensor:
    """The same with a window under one softmax; the last of ``others`` is what lies outside."""
    gate_BM, *rates, rest_BH = others
    ring = Ring(
        cache.keys, cache.values, now.slots[cache.slots], now.used[cache.slots],
        now.outside[mixer.window], rest_BH, scale=mixer.spec.attention_scale,
        soft_cap=mixer.spec.attention_softcap, arrivals_BH=now.arrivals,
        **now.turn(mixer.rope_name),
    )  # fmt: skip
    y_BHD: Tensor = mixer.step(qkv_BM, gate_BM, rates, cache, now, ring)
    return y_BHD


def _normed_heads(qkv_BM: Tensor, mixer: Any, now: Now) -> Tensor:
    """q, k and v side by side [B, M], q and k normed, no positions."""
    buffer = qkv_BM.new_empty(len(qkv_BM), 3, mixer.num_heads, mixer.head_dim)
    q_BHD, k_BHD, v_BHD = buffer.unbind(1)
    decode_heads(
        qkv_BM, k_BHD[:, :, None], v_BHD[:, :, None], now.first, num_heads=mixer.num_heads,
        out_BHD=q_BHD, **_head_norms(mixer),
    )  # fmt: skip
    return buffer.flatten(1)
