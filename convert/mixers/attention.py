"""Projections shared by all mixers, and softmax attention, full or windowed.

B rows, T new tokens, S keys, C hidden width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.mixers.rope import rotated
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels import limits
from ltconvert.kernels.window_attention import window_attention

LossOver = Literal["all", "chosen"]


class Projections(nn.Module):
    """q, k, v and output projections with the biases and q/k norms that a family has.

    Where the loops of a layer have tensors of their own (``TeacherSpec.tied_rank``), these have.

    Attributes:
        keeps_keys, keeps_state: what a cache holds for it: keys and values, a recurrent state.
        uses_rope: whether the layer's positions enter.
        converted: it stands for the teacher's attention; else it starts as that.

    Args:
        spec: the architecture.
        layer: the physical layer.
        num_key_value_heads: G; the teacher's own count, or H once the heads are expanded.
    """

    kind: str
    keeps_keys: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False
    uses_rope: ClassVar[bool] = True
    chooses: ClassVar[bool] = False  # keys, by something that learns from a loss of its own
    converted: ClassVar[bool] = True

    def __init__(self, spec: TeacherSpec, layer: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.spec = spec
        loops, rank = spec.own_tensors(layer)
        self.num_heads, self.head_dim = spec.num_attention_heads, spec.head_dim
        self.num_key_value_heads = num_key_value_heads
        query_width = self.num_heads * self.head_dim
        key_width = num_key_value_heads * self.head_dim
        # Expanding heads adds no rank.
        key_rank = spec.num_key_value_heads * spec.head_dim

        def linear(inputs: int, outputs: int, most: int, bias: bool) -> Linear:
            own_rank = min(rank, spec.hidden_size, most)
            return Linear(inputs, outputs, bias=bias, loops=loops, rank=own_rank)

        self.q_proj = linear(spec.hidden_size, query_width, query_width, spec.qkv_bias)
        self.k_proj = linear(spec.hidden_size, key_width, key_rank, spec.qkv_bias)
        self.v_proj = linear(spec.hidden_size, key_width, key_rank, spec.qkv_bias)
        self.o_proj = linear(query_width, spec.hidden_size, query_width, spec.o_bias)
        if spec.qk_norm is not None:
            per_head = spec.qk_norm == "head"
            sizes = (self.head_dim, self.head_dim) if per_head else (query_width, key_width)
            self.q_norm, self.k_norm = (
                RMSNorm(size, spec.rms_norm_eps, spec.norm_offset, loops=loops) for size in sizes
            )

    def inherit(self, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """This mixer's tensors that come from the teacher's attention: all, as they are."""
        return teacher

    def aligned_parameters(self) -> list[nn.Parameter]:
        """What trains while the mixer learns to do what the teacher's does: everything."""
        return list(self.parameters())

    def forward_with_loss(
        self, x_BTC: Tensor, context: SequenceContext, over: LossOver
    ) -> tuple[Tensor, Tensor | None]:
        """``forward`` without a cache, and the loss that teaches which keys to choose.

        None where nothing is chosen.

        Args:
            over: the keys that the loss runs over.
        """
        return self(x_BTC, context), None

    def project(self, x_BTC: Tensor, loop: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, G, D], before any position."""
        q, k, v = (proj(x_BTC, loop) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.spec.qk_norm == "full":
            q, k = self.q_norm(q, loop), self.k_norm(k, loop)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q, loop), self.k_norm(k, loop)
        return q, k, v


class ZeroLinear(nn.Linear):
    """A linear layer that starts at 0, in a model made from scratch too."""

    def reset_parameters(self) -> None:
        """All weights 0."""
        nn.init.zeros_(self.weight)


class Attention(Projections):
    """Causal softmax attention with the teacher's own window, positions and soft cap.

    With ``sdpa_gate`` the head outputs are multiplied by ``2 * sigmoid(W_g x)``, ``W_g = 0`` at the
    start: the identity (arXiv 2605.20670 uses ``sigmoid``, which starts at 0.5 and is not).
    """

    kind = "full"
    converted = False

    def __init__(
        self, spec: TeacherSpec, layer: int, *, window: int | None, sdpa_gate: bool
    ) -> None:
        super().__init__(spec, layer, spec.num_key_value_heads)
        self.rope_name = spec.layer_rope[layer]
        self.window = window
        if sdpa_gate:
            width = self.num_heads * self.head_dim
            self.gate_proj = ZeroLinear(spec.hidden_size, width, bias=False)

    def forward(
        self, x_BTC: Tensor, context: SequenceContext, cache_layer: CacheLayerMixin | None = None
    ) -> Tensor:
        """x [B, T, C] (after the pre norm) -> [B, T, C] (after the output projection)."""
        q_BHTD, k_BGSD, v_BGSD = self.placed(
            self.project(x_BTC, context.loop), context, cache_layer
        )
        o_BHTD = self.attend(q_BHTD, k_BGSD, v_BGSD, context)
        return self.output(x_BTC, o_BHTD, context)

    def placed(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        context: SequenceContext,
        cache_layer: CacheLayerMixin | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What ``project`` gives at its positions, behind what is cached; heads come first."""
        q_BHTD, k_BGSD, v_BGSD = (y.transpose(1, 2) for y in projected)
        q_BHTD, k_BGSD = rotated(q_BHTD, k_BGSD, context.rope, self.rope_name)
        context.keep(self, (k_BGSD, v_BGSD))
        if cache_layer is not None:
            k_BGSD, v_BGSD = cache_layer.update(k_BGSD, v_BGSD)
        return q_BHTD, k_BGSD, v_BGSD

    def output(self, x_BTC: Tensor, o_BHTD: Tensor, context: SequenceContext) -> Tensor:
        """Outputs of the heads -> [B, T, C]."""
        o_BTM = o_BHTD.transpose(1, 2).flatten(2)
        if hasattr(self, "gate_proj"):
            o_BTM = o_BTM * (2.0 * torch.sigmoid(self.gate_proj(x_BTC)))
        return self.o_proj(o_BTM, context.loop)

    def window_in(self, loop: int) -> int | None:
        """Tokens that a query sees in one loop, itself counted; None for all."""
        return self.window

    def take_in(
        self, kept: Sequence[Tensor], context: SequenceContext, cache_layer: CacheLayerMixin
    ) -> None:
        """Put the keys and values of another visit of this layer into ``cache_layer``."""
        cache_layer.update(*kept)

    def attend(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, context: SequenceContext
    ) -> Tensor:
        """softmax(q.k) v for every query, [B, H, T, D]."""
        window = self.window_in(context.loop)
        return softmax_attention(q_BHTD, k_BGSD, v_BGSD, context, self.spec, window)

    def scores(
        self, x_BTC: Tensor, context: SequenceContext, at_n: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the softmax of queries ``at_n`` runs over, masks aside, and the values.

        Returns:
            Scores [B, H, n, T] in fp32, values [B, H, T, D].
        """
        q_BHTD, k_BGTD, v_BGTD = (y.transpose(1, 2) for y in self.project(x_BTC, context.loop))
        q_BHTD, k_BGTD = rotated(q_BHTD, k_BGTD, context.rope, self.rope_name)
        group = self.num_heads // self.num_key_value_heads
        k_BHTD, v_BHTD = (y.repeat_interleave(group, dim=1) for y in (k_BGTD, v_BGTD))
        with torch.autocast(x_BTC.device.type, enabled=False):
            scores = exact_scores(
                q_BHTD[:, :, at_n], k_BHTD, self.spec.attention_scale, self.spec.attention_softcap
            )
        return scores, v_BHTD


class WindowAttention(Attention):
    """Softmax attention over the last tokens, the token itself counted.

    Args:
        windows: how many, one for all loops or one a loop.
    """

    kind = "window"
    converted = True

    def __init__(self, spec: TeacherSpec, layer: int, *, windows: Sequence[int]) -> None:
        super().__init__(spec, layer, window=max(windows), sdpa_gate=False)
        self.windows = tuple(windows)

    def window_in(self, loop: int) -> int:
        """See ``Attention``."""
        return self.windows[0] if len(self.windows) == 1 else self.windows[loop]


def softmax_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    context: SequenceContext,
    spec: TeacherSpec,
    window: int | None,
) -> Tensor:
    """softmax(q.k) v for every query, [B, H, T, D], with the scale and soft cap of ``spec``.

    PyTorch's attention wants a mask in memory where anything but the order of tokens limits what a
    query sees, and knows no soft cap; there ``window_attention`` is faster where it has a kernel.
    """
    plain = context.is_plain(window) and spec.attention_softcap is None
    if not plain and context.has_kernel:
        q_BTHD, k_BSGD, v_BSGD = (x.transpose(1, 2) for x in (q_BHTD, k_BGSD, v_BGSD))
        if limits.of_window_attention(q_BTHD, k_BSGD, v_BSGD) is None:
            o_BTHD, _ = window_attention(
                q_BTHD,
                k_BSGD,
                v_BSGD,
                window=window or context.num_tokens,
                scale=spec.attention_scale,
                soft_cap=spec.attention_softcap,
                bounds=context.bounds(),
                keep_BS=context.keep_BT,
            )
            return o_BTHD.transpose(1, 2)
    group = q_BHTD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (y.repeat_interleave(group, dim=1) for y in (k_BGSD, v_BGSD))
    mask = context.attention_mask(window, k_BHSD.shape[2])
    scale = spec.attention_scale
    if spec.attention_softcap is None:
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BHSD,
            v_BHSD,
            attn_mask=mask,
            is_causal=mask is None and q_BHTD.shape[2] > 1,
            scale=scale,
        )
    return _capped_attention(q_BHTD, k_BHSD, v_BHSD, mask, scale, spec.attention_softcap)


def exact_scores(q: Tensor, k: Tensor, scale: float, cap: float | None) -> Tensor:
    """``scale * q.k`` of [..., T, D] and [..., S, D], capped where there is a cap, in fp32."""
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(work) @ k.to(work).transpose(-1, -2)) * scale
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _capped_attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention whose scores pass through ``cap * tanh(s / cap)``; SDPA has no such hook."""
    scores = q_BHTD @ k_BHSD.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = cap * torch.tanh(scores / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.to(v_BHSD.dtype) @ v_BHSD
