"""Native sparse attention (arXiv 2502.11089): a window, chosen blocks, and the rest in outline.

B rows, T new tokens, S keys, C hidden width, H query heads, G key/value heads, D head width,
M blocks of L tokens, n blocks that are compressed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.convert.mixers.attention import Attention, ZeroLinear
from ltconvert.convert.mixers.blocks import Blocks, blocks_of, row_starts
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.rope import rotated
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.block_topk import block_topk
from ltconvert.kernels.sparse_attention import sparse_attention

if TYPE_CHECKING:
    from ltconvert.convert.students.block_cache import BlockKeys

BRANCHES = 3  # window, chosen blocks, the rest


class BlockSparseAttention(Attention):
    """The teacher's softmax, of which a window and chosen blocks are exact and the rest is guessed.

    A softmax over all tokens is a mixture of softmaxes over parts of them, each weighed by the sum
    of its exponentiated scores. The parts here:

    - the last ``window`` tokens and up to L - 1 before them, back to where a block ends;
    - of the blocks before, ``chosen`` a key/value head: the document's first, where attention sinks
      lie, and those to whose compressed keys the query heads give most weight;
    - the other blocks. For each of them stands one key and one value, learned means over its
      tokens that start as plain means, with the weight of L tokens.

    So where a row has no more blocks than are chosen the mixer is its teacher, and elsewhere what
    is lost is the scores' spread inside of blocks that hardly matter. Each part's weight is
    multiplied by a gate ``2 sigmoid(W x)``, W = 0 at the start. The paper's branches overlap and
    have a softmax each, summed by gates alone; no gates make that the teacher.

    Tokens of padding inside a block count in its weight but not in its mean.
    """

    kind = "nsa"
    converted = True

    def __init__(
        self, spec: TeacherSpec, layer: int, *, window: int, block: int, chosen: int
    ) -> None:
        super().__init__(spec, layer, window=None, sdpa_gate=False)
        self.local, self.block, self.chosen = window, block, chosen
        self.branch_proj = ZeroLinear(spec.hidden_size, BRANCHES * self.num_heads, bias=False)
        size = self.num_key_value_heads, block, self.head_dim
        self.key_weight = nn.Parameter(torch.empty(size))
        self.value_weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Plain means."""
        nn.init.constant_(self.key_weight, 1.0 / self.block)
        nn.init.constant_(self.value_weight, 1.0 / self.block)

    def aligned_parameters(self) -> list[nn.Parameter]:
        """What is new: the rest is the teacher's and right."""
        return [*self.branch_proj.parameters(), self.key_weight, self.value_weight]

    def forward(self, x_BTC: Tensor, context: SequenceContext, cache_layer: Any = None) -> Tensor:
        """x [B, T, C] (after the pre norm) -> [B, T, C] (after the output projection)."""
        q_BHTD, k_BGSD, v_BGSD = (y.transpose(1, 2) for y in self.project(x_BTC, context.loop))
        q_BHTD, k_BGSD = rotated(q_BHTD, k_BGSD, context.rope, self.rope_name)
        context.keep(self, (k_BGSD, v_BGSD))
        if cache_layer is not None:
            k_BGSD, v_BGSD = cache_layer.update(k_BGSD, v_BGSD)
        keys = k_BGSD.shape[2]
        blocks = blocks_of(context, keys, self.block, self.local)
        if cache_layer is None:
            compressed = self._compress(k_BGSD, v_BGSD, blocks.end_BM, context)
        else:
            compressed = self._compress_new(k_BGSD, v_BGSD, context, cache_layer)
        if keys <= self.local:  # all are in the window
            o_BHTD = self.attend(q_BHTD, k_BGSD, v_BGSD, context)
        else:
            gates_BHT = self.log_gates(self.branch_proj(x_BTC))
            o_BHTD = self._mix(q_BHTD, k_BGSD, v_BGSD, compressed, blocks, gates_BHT, context)
        return self.o_proj(o_BHTD.transpose(1, 2).flatten(2), context.loop)

    def take_in(self, kept: Sequence[Tensor], context: SequenceContext, cache_layer: Any) -> None:
        """Put the keys and values of another visit into ``cache_layer``, and the block they end."""
        k_BGSD, v_BGSD = cache_layer.update(*kept)
        self._compress_new(k_BGSD, v_BGSD, context, cache_layer)

    @staticmethod
    def log_gates(gates: Tensor) -> Tensor:
        """Logs of the branches' gates, [3, B, H, T], of what ``branch_proj`` gives."""
        gates = F.logsigmoid(gates.to(_wide(gates.dtype)))
        return (gates + math.log(2.0)).unflatten(-1, (BRANCHES, -1)).permute(2, 0, 3, 1)

    def _mix(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        compressed: tuple[Tensor, Tensor],
        blocks: Blocks,
        gates_BHT: Tensor,
        context: SequenceContext,
    ) -> Tensor:
        spec = self.spec
        scores: dict[str, Any] = {"scale": spec.attention_scale, "soft_cap": spec.attention_softcap}
        keep_BS = None if context.keep_BS is None else context.keep_BS[:, -k_BGSD.shape[2] :]
        parts = [
            sparse_attention(
                q_BHTD, k_BGSD, v_BGSD, first_BT=blocks.local_BT, keep_BS=keep_BS, **scores
            )
        ]
        if compressed[0].shape[2]:
            chosen_BGTW, rest_BGTW = block_topk(
                q_BHTD, compressed[0], blocks.first_BT, blocks.past_BT, self.chosen, **scores
            )
            block_BS = blocks.block_BS.expand(len(q_BHTD), -1)
            parts += [
                sparse_attention(
                    q_BHTD, k_BGSD, v_BGSD, bits_BJTW=chosen_BGTW, block_BS=block_BS,
                    keep_BS=keep_BS, **scores,
                ),
                sparse_attention(
                    q_BHTD, *compressed, bits_BJTW=rest_BGTW, causal=False, **scores
                ),
            ]  # fmt: skip
        outputs, log_sums = zip(*parts, strict=True)
        sizes = [0.0, 0.0, math.log(self.block)]
        logs = [a + b + size for a, b, size in zip(log_sums, gates_BHT, sizes, strict=False)]
        shares = torch.stack(logs).softmax(0)[..., None]
        o_BHTD = sum(share * o for share, o in zip(shares, outputs, strict=True))
        assert isinstance(o_BHTD, Tensor)
        return o_BHTD.to(v_BGSD.dtype)

    def _compress(
        self, k_BGSD: Tensor, v_BGSD: Tensor, end_Bn: Tensor, context: SequenceContext
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks with those ends, [B, G, n, D] each."""
        total = k_BGSD.shape[2]
        at_BnL = end_Bn[..., None] + torch.arange(1 - self.block, 1, device=end_Bn.device)
        at_BN = at_BnL.clamp(0, total - 1).flatten(1).expand(len(k_BGSD), -1)
        share_BnL1 = None
        if context.keep_BS is not None:
            kept_BnL = context.keep_BS[:, -total:].gather(1, at_BN).unflatten(1, (-1, self.block))
            share_BnL = kept_BnL * (self.block / kept_BnL.sum(-1, keepdim=True).clamp(min=1))
            share_BnL1 = share_BnL[..., None].to(k_BGSD.dtype)
        k, v = (gather_tokens(x, at_BN).unflatten(2, (-1, self.block)) for x in (k_BGSD, v_BGSD))
        return self.compress(k, v, share_BnL1)

    def compress(
        self, k_BGnLD: Tensor, v_BGnLD: Tensor, share_BnL1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One key and one value for the tokens of each block, [B, G, n, D] each."""
        results = []
        for x, weight_GLD in ((k_BGnLD, self.key_weight), (v_BGnLD, self.value_weight)):
            x = x if share_BnL1 is None else x * share_BnL1[:, None]
            mean = (x * weight_GLD.to(x.dtype)[:, None]).sum(-2, dtype=_wide(x.dtype))
            results.append(mean.to(x.dtype))
        return results[0], results[1]

    def _compress_new(
        self, k_BGSD: Tensor, v_BGSD: Tensor, context: SequenceContext, cache_layer: BlockKeys
    ) -> tuple[Tensor, Tensor]:
        """The same of all blocks so far; those that end with the new tokens are made and cached."""
        total, new = k_BGSD.shape[2], context.num_tokens
        starts_B1 = row_starts(context, total)
        known_B1 = (total - new - starts_B1).clamp(min=0) // self.block
        number_Bn = known_B1 + torch.arange(new // self.block + 1, device=known_B1.device)
        end_Bn = starts_B1 + (number_Bn + 1) * self.block - 1
        made = self._compress(k_BGSD, v_BGSD, end_Bn, context)
        return cache_layer.update_blocks(*made, number_Bn, end_Bn < total, total // self.block)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def gather_tokens(x_BGSD: Tensor, at_BN: Tensor) -> Tensor:
    """Keys or values at those columns, [B, G, N, D]."""
    batch, groups, _, width = x_BGSD.shape
    return x_BGSD.gather(2, at_BN[:, None, :, None].expand(batch, groups, -1, width))
