"""Sequence attention and expert attention over pools that start as the teacher's layers.

What differs from layer to layer belongs to the experts: matrices and biases, whose outputs are
mixed, and gains of norms. Gains of a norm in front of matrices are multiplied into these, so that
all experts read the same; a norm behind a mixture norms the mixture, with the mixture of the gains.
What nulls have of a token's weights they take from what the branch adds, not from its queries and
keys: where all is null a branch is left out, in every layout of norms.
Windows and positions belong to the depth: a key has one position for all who read it, and a cache
slot one length.

B rows, T tokens, N = B T, C hidden width, H query heads, G key/value heads, D head width, M = H D,
I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.attention import ZeroLinear, softmax_attention
from ltconvert.convert.mixers.rope import rotated
from ltconvert.convert.students.dreamer.banks import Bank, Gains
from ltconvert.convert.students.dreamer.rows import Expert, Mixture, Rows
from ltconvert.convert.teachers.spec import TeacherSpec


class Pool(nn.Module):
    """What both pools share: how a branch joins the stream, normed where the family does.

    Args:
        total: what the weights of a token add up to.
    """

    def __init__(self, spec: TeacherSpec, experts: int, total: int) -> None:
        super().__init__()
        self.spec, self.total = spec, total
        behind = spec.norm_layout != "pre"
        self.post_norm = Gains(experts, spec.hidden_size, spec.norm_offset) if behind else None

    def parts(self) -> Iterator[Bank | Gains]:
        """All that holds tensors of each expert."""
        return (module for module in self.modules() if isinstance(module, Bank | Gains))

    def joined(self, h_BTC: Tensor, mixture: Mixture, expert: Expert) -> Tensor:
        """The stream with what a branch's experts give, [B, T, C].

        Gains of nulls are 0. Where the stream itself is normed, nulls let their share of it pass.
        """
        h_NC = h_BTC.flatten(0, 1)
        if self.post_norm is None:
            return mixture.onto(h_NC, expert).view_as(h_BTC)
        outer = self.spec.norm_layout == "outer"
        x_NC = mixture.onto(h_NC, expert) if outer else mixture(expert)
        x_NC = normed(x_NC, self.post_norm, mixture, self.spec.rms_norm_eps, self.total)
        if not outer:
            x_NC = h_NC + x_NC
        elif (nulls_N1 := mixture.of_nulls()) is not None:
            x_NC = x_NC + (nulls_N1 / self.total * h_NC).to(x_NC.dtype)
        return x_NC.view_as(h_BTC)


class Depth(NamedTuple):
    """What belongs to a depth, not to an entry: the teacher's layer, its positions and window."""

    layer: int
    rope_name: str | None
    window: int | None


class AttentionPool(Pool):
    """Causal softmax attention whose projections are mixtures over the pool, by the same weights.

    ``qkv`` is the teacher's q, k and v projections, one below the other.

    Args:
        widths: channels of each of the projections; by default those of the teacher's attention.
        bias: whether any has one.
    """

    def __init__(
        self,
        spec: TeacherSpec,
        entries: int,
        widths: Sequence[int] | None = None,
        *,
        bias: bool | None = None,
    ) -> None:
        super().__init__(spec, entries, 1)
        query = spec.num_attention_heads * spec.head_dim
        kept = spec.num_key_value_heads * spec.head_dim
        self.widths = [query, kept, kept] if widths is None else list(widths)
        key = self.widths[1]
        self.attend = attend  # a compiled one while it trains
        bias = spec.qkv_bias if bias is None else bias
        self.qkv = Bank(entries, spec.hidden_size, sum(self.widths), bias=bias)
        self.o = Bank(entries, query, spec.hidden_size, bias=spec.o_bias)
        if spec.qk_norm is not None:
            sizes = (spec.head_dim,) * 2 if spec.qk_norm == "head" else (query, key)
            self.q_norm, self.k_norm = (Gains(entries, n, spec.norm_offset) for n in sizes)

    def forward(
        self,
        h_BTC: Tensor,
        x_BTC: Tensor,
        mixture: Mixture,
        heads: Callable[[Tensor, Mixture], Tensor],
    ) -> Tensor:
        """The stream h [B, T, C] with the branch, which reads x (normed where the family does).

        Args:
            heads: from what ``qkv`` gives, [B, T, O], and whose mixture it is, to what ``o`` reads,
                [B, T, M]; such as ``split`` and ``mixed``.
        """
        x_NC, read = x_BTC.flatten(0, 1), mixture.without_nulls()
        y_NO = read(lambda rows: rows.out(rows.spread(x_NC), self.qkv))
        o_NM = heads(y_NO.view(*x_BTC.shape[:2], -1), read).flatten(0, 1)
        return self.joined(h_BTC, mixture, lambda rows: rows.out(rows.spread(o_NM), self.o))

    def split(self, y_BTO: Tensor, mixture: Mixture) -> list[Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, G, D], normed as the family does, the rest.

        Args:
            mixture: y's.
        """
        q, k, v, *others = y_BTO.flatten(0, 1).split(self.widths, dim=-1)
        if self.spec.qk_norm == "full":
            q, k = self._qk_normed(q, k, mixture)
        q, k, v = (y.unflatten(-1, (-1, self.spec.head_dim)) for y in (q, k, v))
        if self.spec.qk_norm == "head":
            q, k = self._qk_normed(q, k, mixture)
        return [y.unflatten(0, y_BTO.shape[:2]) for y in (q, k, v, *others)]

    def mixed(
        self, projected: Sequence[Tensor], context: SequenceContext, cache_layer: Any, at: Depth
    ) -> Tensor:
        """What is between what was ``split`` and what ``o`` reads, [B, T, M]."""
        q_BHTD, k_BGSD, v_BGSD = (y.transpose(1, 2) for y in projected)
        if cache_layer is None:
            o_BHTD = self.attend(self, q_BHTD, k_BGSD, v_BGSD, context, at.rope_name, at.window)
        else:
            q_BHTD, k_BGSD = rotated(q_BHTD, k_BGSD, context.rope, at.rope_name)
            k_BGSD, v_BGSD = cache_layer.update(k_BGSD, v_BGSD)
            o_BHTD = softmax_attention(q_BHTD, k_BGSD, v_BGSD, context, self.spec, at.window)
        return o_BHTD.transpose(1, 2).flatten(2)

    def core_parameters(self) -> int:
        """Values that belong to a depth, beside those of its entries."""
        return 0

    def _qk_normed(self, q: Tensor, k: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
        eps = self.spec.rms_norm_eps
        return normed(q, self.q_norm, mixture, eps), normed(k, self.k_norm, mixture, eps)


class ExpertPool(Pool):
    """Gated MLPs ``down(act(gate x) * up x)``, each a slice of a layer's: their sum is the layer's.

    ``gate_up`` is an expert's gate and up projections, one below the other.
    """

    def __init__(self, spec: TeacherSpec, experts: int, slices: int) -> None:
        super().__init__(spec, experts, slices)
        inner = spec.intermediate_size // slices
        self.gate_up = Bank(experts, spec.hidden_size, 2 * inner, bias=spec.mlp_bias)
        self.down = Bank(experts, inner, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = ACT2FN[spec.hidden_act]
        self.gated = gated  # a compiled one while it trains

    def forward(self, h_BTC: Tensor, x_BTC: Tensor, mixture: Mixture) -> Tensor:
        """The stream h [B, T, C] with the branch, which reads x (normed where the family does)."""
        x_NC, gate = x_BTC.flatten(0, 1), partial(self.gated, self)

        def expert(rows: Rows) -> Tensor:
            return rows.out(rows.gated(rows.spread(x_NC), self.gate_up, gate), self.down)

        return self.joined(h_BTC, mixture, expert)


# Functions of a pool, not bound to one: what compiles them tells pools apart.
def attend(
    pool: AttentionPool,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    context: SequenceContext,
    rope_name: str | None,
    window: int | None,
) -> Tensor:
    """Attention without a cache from what has no positions yet, [B, H, T, D]."""
    q_BHTD, k_BGTD = rotated(q_BHTD, k_BGTD, context.rope, rope_name)
    return softmax_attention(q_BHTD, k_BGTD, v_BGTD, context, pool.spec, window)


def gated(pool: ExpertPool, gate_up: Tensor) -> Tensor:
    """``act(gate) * up`` of [..., 2 I], [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    y: Tensor = pool.activation(gate) * up
    return y


class SharedExpert(nn.Module):
    """A gated MLP that all tokens use at all depths; gives 0 at the start."""

    def __init__(self, spec: TeacherSpec, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, size, bias=False)
        self.down_proj = ZeroLinear(size, spec.hidden_size, bias=False)
        self.activation = ACT2FN[spec.hidden_act]

    def forward(self, x_NC: Tensor) -> Tensor:
        """Normalised hidden states [N, C] -> [N, C]."""
        y_NC: Tensor = self.down_proj(self.activation(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return y_NC


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last axis, in x's dtype (in fp32 at least inside)."""
    work = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(work), x.shape[-1:], eps=eps).to(x.dtype)


def normed(y: Tensor, gains: Gains, mixture: Mixture, eps: float, total: int = 1) -> Tensor:
    """RMSNorm of mixtures [N, O] or [N, heads, D], with the mixture of the gains."""
    mixed = mixture(lambda rows: rows.gains(gains)) / total
    if y.dim() == 3 and mixed.dim() == 2:  # each token's own, the same for its heads
        mixed = mixed[:, None]
    work = torch.promote_types(y.dtype, torch.float32)
    return (unit_rms(y.to(work), eps) * mixed.to(work)).to(y.dtype)
