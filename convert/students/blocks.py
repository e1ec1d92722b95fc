"""The decoder layer of every family: a mixer branch and an MLP branch with their norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers import Projections, SequenceContext
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.teachers.spec import TeacherSpec


class GatedMLP(nn.Module):
    """``down(act(gate x) * up x)``."""

    def __init__(self, spec: TeacherSpec, layer: int) -> None:
        super().__init__()
        width, inner = spec.hidden_size, spec.intermediate_size
        loops, rank = spec.own_tensors(layer)
        own: dict[str, Any] = {"loops": loops, "rank": min(rank, width, inner)}
        self.gate_proj = Linear(width, inner, bias=spec.mlp_bias, **own)
        self.up_proj = Linear(width, inner, bias=spec.mlp_bias, **own)
        self.down_proj = Linear(inner, width, bias=spec.mlp_bias, **own)
        self.activation = ACT2FN[spec.hidden_act]

    def forward(self, x_BTC: Tensor, loop: int | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        gate_BTI = self.activation(self.gate_proj(x_BTC, loop))
        return self.down_proj(gate_BTI * self.up_proj(x_BTC, loop), loop)


class DecoderLayer(nn.Module):
    """``h += mixer branch; h += MLP branch``, norms before, after or around each branch.

    In the layout ``outer`` the second norm of a branch is the stream's: ``h = norm(h + branch)``.

    The branches are methods, since the alignment of a mixer needs what goes into it and what it
    adds to the residual stream.

    Attributes:
        depth_proj: by sublayer, what of its input is left in a depth stream.
    """

    def __init__(self, spec: TeacherSpec, layer: int, mixer: Projections) -> None:
        super().__init__()
        loops, _ = spec.own_tensors(layer)

        def norm(wanted: bool) -> nn.Module:
            if not wanted:
                return nn.Identity()
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_offset, loops=loops)

        self.outer = spec.norm_layout == "outer"
        before, after = spec.norm_layout != "post", spec.norm_layout != "pre"
        self.pre_mixer_norm = norm(before)
        self.mixer = mixer
        self.post_mixer_norm = norm(after)
        self.pre_mlp_norm = norm(before)
        self.mlp = GatedMLP(spec, layer)
        self.post_mlp_norm = norm(after)
        self.depth_proj = nn.ModuleDict()

    def mixer_input(self, h_BTC: Tensor, loop: int | None = None) -> Tensor:
        """What the mixer reads."""
        return _normed(self.pre_mixer_norm, h_BTC, loop)

    def mixer_contribution(self, y_BTC: Tensor, loop: int | None = None) -> Tensor:
        """What a mixer's output adds to the residual stream."""
        return y_BTC if self.outer else _normed(self.post_mixer_norm, y_BTC, loop)

    def mlp_branch(self, h_BTC: Tensor, loop: int | None = None) -> Tensor:
        """The MLP's contribution to the residual stream, [B, T, C]."""
        return self.mlp_contribution(self.mlp_input(h_BTC, loop), loop)

    def mlp_input(self, h_BTC: Tensor, loop: int | None = None) -> Tensor:
        """What the MLP reads."""
        return _normed(self.pre_mlp_norm, h_BTC, loop)

    def mlp_contribution(self, x_BTC: Tensor, loop: int | None = None) -> Tensor:
        """What the MLP makes of its input and adds to the residual stream."""
        y_BTC = self.mlp(x_BTC, loop)
        return y_BTC if self.outer else _normed(self.post_mlp_norm, y_BTC, loop)

    def forward(
        self,
        h_BTC: Tensor,
        context: SequenceContext,
        cache_layer: CacheLayerMixin | LinearAttentionCacheLayerMixin | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """h [B, T, C] -> [B, T, C]; ``seen`` gets what the mixer read and what it gave."""
        loop = context.loop
        x_BTC = self.mixer_input(h_BTC, loop)
        y_BTC = self.mixer(x_BTC, context, cache_layer)
        if seen is not None:
            seen += [x_BTC, y_BTC]
        return self.after_mixer(h_BTC, y_BTC, loop)

    def after_mixer(self, h_BTC: Tensor, y_BTC: Tensor, loop: int | None = None) -> Tensor:
        """The stream with the mixer's output and the MLP branch, [B, T, C]."""
        h_BTC = self.with_mixer(h_BTC, y_BTC, loop)
        return self.with_mlp(h_BTC, self.mlp_branch(h_BTC, loop), loop)

    def with_mixer(self, h_BTC: Tensor, y_BTC: Tensor, loop: int | None = None) -> Tensor:
        """The stream with the mixer's output, [B, T, C]."""
        h_BTC = h_BTC + self.mixer_contribution(y_BTC, loop)
        return _normed(self.post_mixer_norm, h_BTC, loop) if self.outer else h_BTC

    def with_mlp(self, h_BTC: Tensor, y_BTC: Tensor, loop: int | None = None) -> Tensor:
        """The stream with the MLP branch's contribution, [B, T, C]."""
        h_BTC = h_BTC + y_BTC
        return _normed(self.post_mlp_norm, h_BTC, loop) if self.outer else h_BTC


def _normed(norm: nn.Module, x_BTC: Tensor, loop: int | None) -> Tensor:
    """What a norm makes of x in one loop; x itself where the layout has none."""
    return norm(x_BTC, loop) if isinstance(norm, RMSNorm) else x_BTC


LayerCall = Callable[[DecoderLayer, Tensor, SequenceContext], Tensor]
ChoosingCall = Callable[[DecoderLayer, Tensor, SequenceContext], tuple[Tensor, Tensor | None]]


# Functions of the layer, not bound to one: compiled, layers of one make share the result.
def run_layer(layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext) -> Tensor:
    """One layer without a cache."""
    return layer(h_BTC, context)


def run_choosing_layer(
    layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext
) -> tuple[Tensor, Tensor | None]:
    """One layer without a cache: (its output, the loss of what chooses its keys)."""
    loop = context.loop
    x_BTC = layer.mixer_input(h_BTC, loop)
    y_BTC, loss = layer.mixer.forward_with_loss(x_BTC, context, "chosen")
    return layer.after_mixer(h_BTC, y_BTC, loop), loss


def show_layer(
    layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer without a cache: (its output, what its mixer read, what its mixer gave)."""
    seen: list[Tensor] = []
    h_BTC = layer(h_BTC, context, None, seen)
    x_BTC, y_BTC = seen
    return h_BTC, x_BTC, y_BTC
