"""DeepSeek sparse attention (arXiv 2512.02556): a light indexer chooses the keys of every query.

B rows, T new tokens, S keys, C hidden width, H query heads, G key/value heads, D head width,
I index heads, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import DynamicIndexedLayer

from ltconvert.convert.mixers.attention import Attention, LossOver, ZeroLinear
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.rope import rotated
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.index_kl import index_kl
from ltconvert.kernels.index_topk import index_topk
from ltconvert.kernels.sparse_attention import sparse_attention


class Index(NamedTuple):
    """What the indexer makes of the new tokens: queries [B, T, I, D], keys [B, T, D], weights."""

    q_BTID: Tensor
    k_BTD: Tensor
    weight_BTI: Tensor


class SparseAttention(Attention):
    """The teacher's attention over the ``top_k`` keys that an indexer scores highest.

    ``score[t, s] = sum_i w_i(x_t) relu(q_i(x_t) . k(x_s))``, with one key for all index heads. Up
    to ``top_k`` tokens the layer is the teacher's, whatever the indexer says. The indexer starts
    with weights of 0, and of equal scores the later key wins: it begins as a window of ``top_k``
    tokens. Its heads are as wide as the teacher's, so that they share its positions.

    Choosing has no gradient. The indexer learns by its divergence from the attention distribution
    of the layer (``loss``), which reaches nothing but the indexer: over all keys while mixers are
    aligned, over the chosen ones from then on. Its input is not trained either.
    """

    kind = "dsa"
    converted = True
    chooses = True

    def __init__(self, spec: TeacherSpec, layer: int, *, top_k: int, index_heads: int) -> None:
        super().__init__(spec, layer, window=spec.layer_windows[layer], sdpa_gate=False)
        self.top_k, self.index_heads = top_k, index_heads
        width = self.head_dim
        self.index_q_proj = nn.Linear(spec.hidden_size, index_heads * width, bias=False)
        self.index_k_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.index_weight_proj = ZeroLinear(spec.hidden_size, index_heads, bias=False)
        self.index_k_norm = nn.LayerNorm(width)

    def forward(
        self,
        x_BTC: Tensor,
        context: SequenceContext,
        cache_layer: Any = None,
    ) -> Tensor:
        """x [B, T, C] (after the pre norm) -> [B, T, C] (after the output projection)."""
        return self._run(x_BTC, context, cache_layer, None)[0]

    def take_in(self, kept: Sequence[Tensor], context: SequenceContext, cache_layer: Any) -> None:
        """Put the keys and values of another visit into ``cache_layer``, the indexer's too."""
        k_BGTD, v_BGTD, index_k_BTD = kept
        cache_layer.update(k_BGTD, v_BGTD)
        cache_layer.update_indexer(index_k_BTD)

    def aligned_parameters(self) -> list[nn.Parameter]:
        """The indexer: the rest is the teacher's and right."""
        return [parameter for name, parameter in self.named_parameters() if "index_" in name]

    def forward_with_loss(
        self, x_BTC: Tensor, context: SequenceContext, over: LossOver
    ) -> tuple[Tensor, Tensor | None]:
        """The same without a cache, and the indexer's loss in nats a token."""
        return self._run(x_BTC, context, None, over)

    def _run(
        self,
        x_BTC: Tensor,
        context: SequenceContext,
        cache_layer: DynamicIndexedLayer | None,
        over: LossOver | None,
    ) -> tuple[Tensor, Tensor | None]:
        q_BHTD, k_BGSD, v_BGSD = (y.transpose(1, 2) for y in self.project(x_BTC, context.loop))
        q_BHTD, k_BGSD = rotated(q_BHTD, k_BGSD, context.rope, self.rope_name)
        index = self.index(x_BTC.detach(), context)
        context.keep(self, (k_BGSD, v_BGSD, index.k_BTD))
        if cache_layer is not None:
            k_BGSD, v_BGSD = cache_layer.update(k_BGSD, v_BGSD)
            index = index._replace(k_BTD=cache_layer.update_indexer(index.k_BTD))
        bits_BJTW = None
        if k_BGSD.shape[2] > self.top_k:
            bits_BJTW = index_topk(*index, self.top_k, **self._reach(context, k_BGSD.shape[2]))
        o_BHTD = self._attend_to(q_BHTD, k_BGSD, v_BGSD, bits_BJTW, context)
        loss = None
        if over is not None:
            loss = self._loss(
                index, q_BHTD, k_BGSD, bits_BJTW if over == "chosen" else None, context
            )
        return self.o_proj(o_BHTD.transpose(1, 2).flatten(2), context.loop), loss

    def index(self, x_BTC: Tensor, context: SequenceContext) -> Index:
        """What the indexer makes of its input."""
        q_BTID = self.index_q_proj(x_BTC).unflatten(-1, (self.index_heads, self.head_dim))
        k_BT1D = self.index_k_norm(self.index_k_proj(x_BTC)).unsqueeze(2)
        q, k = (y.transpose(1, 2) for y in (q_BTID, k_BT1D))
        q, k = rotated(q, k, context.rope, self.rope_name)
        k = k.to(q.dtype)  # autocast leaves the norm in fp32
        return Index(q.transpose(1, 2), k[:, 0], self.scaled(self.index_weight_proj(x_BTC)))

    def scaled(self, weight: Tensor) -> Tensor:
        """Weights of the index heads, times what keeps scores near 1 at any width and number."""
        return weight * (self.head_dim * self.index_heads) ** -0.5

    def _reach(self, context: SequenceContext, keys: int) -> dict[str, Any]:
        """Which keys take part, as the ops ask for it."""
        keep_BS = None if context.keep_BS is None else context.keep_BS[:, -keys:]
        return {"first_BT": context.first_seen(self.window, keys), "keep_BS": keep_BS}

    def _attend_to(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        bits_BJTW: Tensor | None,
        context: SequenceContext,
    ) -> Tensor:
        if bits_BJTW is None:
            return self.attend(q_BHTD, k_BGSD, v_BGSD, context)
        o_BHTD, _ = sparse_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            bits_BJTW=bits_BJTW,
            scale=self.spec.attention_scale,
            soft_cap=self.spec.attention_softcap,
        )
        return o_BHTD

    def _loss(
        self,
        index: Index,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        bits_BJTW: Tensor | None,
        context: SequenceContext,
    ) -> Tensor:
        return index_kl(
            *index,
            q_BHTD,
            k_BGSD,
            bits_BJTW=bits_BJTW,
            scale=self.spec.attention_scale,
            soft_cap=self.spec.attention_softcap,
            **self._reach(context, k_BGSD.shape[2]),
        )
