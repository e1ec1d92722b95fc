"""The decoder layer of every family: a mixer branch and an MLP branch with their norms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers import Projections, SequenceContext
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.teachers.spec import TeacherSpec


class GatedMLP(nn.Module):
    """``down(act(gate x) * up x)``."""

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = ACT2FN[spec.hidden_act]

    def forward(self, x_BTC: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        return self.down_proj(self.activation(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class DecoderLayer(nn.Module):
    """``h += mixer branch; h += MLP branch``, norms before, after or around each branch.

    The branches are methods, since the alignment of a mixer needs what goes into it and what it
    adds to the residual stream.
    """

    def __init__(self, spec: TeacherSpec, mixer: Projections) -> None:
        super().__init__()

        def norm(wanted: bool) -> nn.Module:
            if not wanted:
                return nn.Identity()
            return RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_offset)

        before, after = spec.norm_layout != "post", spec.norm_layout != "pre"
        self.pre_mixer_norm = norm(before)
        self.mixer = mixer
        self.post_mixer_norm = norm(after)
        self.pre_mlp_norm = norm(before)
        self.mlp = GatedMLP(spec)
        self.post_mlp_norm = norm(after)

    def mixer_input(self, h_BTC: Tensor) -> Tensor:
        """What the mixer reads."""
        return self.pre_mixer_norm(h_BTC)

    def mixer_contribution(self, y_BTC: Tensor) -> Tensor:
        """What a mixer's output adds to the residual stream."""
        return self.post_mixer_norm(y_BTC)

    def mlp_branch(self, h_BTC: Tensor) -> Tensor:
        """The MLP's contribution to the residual stream, [B, T, C]."""
        return self.post_mlp_norm(self.mlp(self.pre_mlp_norm(h_BTC)))

    def forward(
        self,
        h_BTC: Tensor,
        context: SequenceContext,
        cache_layer: CacheLayerMixin | LinearAttentionCacheLayerMixin | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """h [B, T, C] -> [B, T, C]; ``seen`` gets what the mixer read and what it gave."""
        x_BTC = self.mixer_input(h_BTC)
        y_BTC = self.mixer(x_BTC, context, cache_layer)
        if seen is not None:
            seen += [x_BTC, y_BTC]
        return self.after_mixer(h_BTC, y_BTC)

    def after_mixer(self, h_BTC: Tensor, y_BTC: Tensor) -> Tensor:
        """The stream with the mixer's output and the MLP branch, [B, T, C]."""
        h_BTC = h_BTC + self.mixer_contribution(y_BTC)
        return h_BTC + self.mlp_branch(h_BTC)


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
    y_BTC, loss = layer.mixer.forward_with_loss(layer.mixer_input(h_BTC), context, "chosen")
    return layer.after_mixer(h_BTC, y_BTC), loss


def show_layer(
    layer: DecoderLayer, h_BTC: Tensor, context: SequenceContext
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer without a cache: (its output, what its mixer read, what its mixer gave)."""
    seen: list[Tensor] = []
    h_BTC = layer(h_BTC, context, None, seen)
    x_BTC, y_BTC = seen
    return h_BTC, x_BTC, y_BTC
