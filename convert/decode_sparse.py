"""One token of a layer that chooses its keys: gathered, then attended to.

B rows, R rows of a joined weight, M channels of the heads together, D head width, I index heads,
G key/value heads, S slots of a cache, K chosen ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.decode_layers import LayerStep, Now, placed
from ltconvert.convert.mixers.dsa import SparseAttention
from ltconvert.convert.mixers.rope import apply_rope
from ltconvert.convert.students.static_layers import (
    StaticBlockKeys,
    StaticIndexedKeys,
    StaticKeys,
)
from ltconvert.kernels.block_topk.reference import block_weights
from ltconvert.kernels.decode_attention import decode_attention
from ltconvert.kernels.index_topk import decode_topk
from ltconvert.kernels.index_topk.reference import NEVER, ranks


class SparseAttentionStep(LayerStep):
    """Attention over the keys that an indexer chooses among those of a slot."""

    def mix(self, y_BR: Tensor, cache_layer: StaticIndexedKeys, now: Now) -> Tensor:
        """See ``LayerStep``."""
        mixer: Any = self.layer.mixer
        q_BHD, index_q_BID, weight_BI = self._place(y_BR, cache_layer, now)
        used_B = now.used[cache_layer.slots]
        k_BGSD, v_BGSD = cache_layer.keys, cache_layer.values
        count = min(mixer.top_k, mixer.window or mixer.top_k)
        if cache_layer.slots > count:
            chosen_BK = decode_topk(
                index_q_BID, cache_layer.indexer_keys[:, 0], mixer.scaled(weight_BI), mixer.top_k,
                used_B, mixer.window,
            )  # fmt: skip
            # Ahead of the gathers: decode_attention may read lengths before they have ended.
            used_B = used_B.clamp(max=count)
            k_BGSD, v_BGSD = (gathered(x, chosen_BK[:, None]) for x in (k_BGSD, v_BGSD))
        o_BHD = decode_attention(
            q_BHD, k_BGSD, v_BGSD, used_B,
            scale=mixer.spec.attention_scale, soft_cap=mixer.spec.attention_softcap,
            arrivals_BH=now.arrivals,
        )  # fmt: skip
        return o_BHD.flatten(1)

    def take_in(self, y_BR: Tensor, cache_layer: StaticIndexedKeys, now: Now) -> None:
        """See ``LayerStep``."""
        self._place(y_BR, cache_layer, now)

    def _place(
        self, y_BR: Tensor, cache_layer: StaticIndexedKeys, now: Now
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, the indexer's, and its weights; keys, values and the indexer's key are kept."""
        mixer: Any = self.layer.mixer
        qkv_BM, *index = y_BR.split([sum(self.sizes[:3]), *self.sizes[3:]], dim=-1)
        q_BHD = placed(qkv_BM, mixer, cache_layer, now)
        index_q_BID, index_k_BD = self._index(mixer, index[0], index[1], now)
        at_B1 = now.slots[cache_layer.slots].long()[:, None]
        keys_BSD = cache_layer.indexer_keys[:, 0]
        keys_BSD.scatter_(1, at_B1[..., None].expand(-1, 1, keys_BSD.shape[-1]), index_k_BD)
        return q_BHD, index_q_BID, index[2]

    @staticmethod
    def _index(
        mixer: SparseAttention, q_BM: Tensor, k_BD: Tensor, now: Now
    ) -> tuple[Tensor, Tensor]:
        """The indexer's queries [B, I, D], and its key as the cache takes it, [B, 1, D]."""
        q_BID = q_BM.unflatten(1, (mixer.index_heads, mixer.head_dim))
        k_B1D = mixer.index_k_norm(k_BD)[:, None]
        if mixer.rope_name is not None:
            tables = [table[:, None] for table in now.rope[mixer.rope_name]]  # a token a row
            q_BID, k_B1D = (apply_rope(x.unsqueeze(2), *tables).squeeze(2) for x in (q_BID, k_B1D))
        return q_BID, k_B1D


class BlockSparseAttentionStep(LayerStep):
    """A window, chosen blocks and the outline of the others, under one softmax."""

    def mix(self, y_BR: Tensor, cache_layer: StaticBlockKeys, now: Now) -> Tensor:
        """See ``LayerStep``."""
        mixer: Any = self.layer.mixer
        spec = mixer.spec
        gates_BX = y_BR[:, sum(self.sizes[:3]) :]
        q_BHD, block_k_BGMD, block_v_BGMD = self._place(y_BR, cache_layer, now)
        column_B = now.slots[cache_layer.slots].long()
        if cache_layer.slots <= mixer.local:
            o_BHD = decode_attention(
                q_BHD, cache_layer.keys, cache_layer.values, now.used[cache_layer.slots],
                scale=spec.attention_scale, soft_cap=spec.attention_softcap,
                arrivals_BH=now.arrivals,
            )  # fmt: skip
            return o_BHD.flatten(1)
        past_B = (column_B - mixer.local + 1).clamp(min=0) // mixer.block
        chosen_BGK, picked_BGK, rest_BGM = self._choose(q_BHD, block_k_BGMD, past_B)
        inside_L = torch.arange(mixer.block, device=q_BHD.device)
        at_BGN = (chosen_BGK[..., None] * mixer.block + inside_L).flatten(2)
        local_N = torch.arange(mixer.local + mixer.block - 1, device=q_BHD.device)
        local_BN = past_B[:, None] * mixer.block + local_N
        near_B1N = (local_BN <= column_B[:, None])[:, None]
        local_B1N = local_BN.clamp(max=cache_layer.slots - 1)[:, None]
        parts = [
            (*_gathered(cache_layer, local_B1N), near_B1N, 0.0),
            (*_gathered(cache_layer, at_BGN), picked_BGK.repeat_interleave(mixer.block, -1), 0.0),
            (block_k_BGMD, block_v_BGMD, rest_BGM, math.log(mixer.block)),
        ]
        gates_BH = mixer.log_gates(gates_BX[:, None])[..., 0]
        return self._attend(q_BHD, parts, gates_BH).flatten(1)

    def take_in(self, y_BR: Tensor, cache_layer: StaticBlockKeys, now: Now) -> None:
        """See ``LayerStep``."""
        self._place(y_BR, cache_layer, now)

    def _place(
        self, y_BR: Tensor, cache_layer: StaticBlockKeys, now: Now
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of all blocks; the token's own are kept."""
        mixer: Any = self.layer.mixer
        qkv_BM = y_BR[:, : sum(self.sizes[:3])]
        q_BHD = placed(qkv_BM, mixer, cache_layer, now)
        column_B = now.slots[cache_layer.slots].long()
        return q_BHD, *self._blocks(mixer, cache_layer, column_B)

    @staticmethod
    def _blocks(mixer: Any, cache: StaticBlockKeys, column_B: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all blocks, that of the new token among them if it is the last."""
        number_B1 = (column_B // mixer.block)[:, None]
        inside_L = torch.arange(mixer.block, device=column_B.device)
        at_B1L = (number_B1 * mixer.block + inside_L).clamp(max=cache.slots - 1)[:, None]
        k_BG1LD, v_BG1LD = (x.unsqueeze(2) for x in _gathered(cache, at_B1L))
        whole_B1 = ((column_B + 1) % mixer.block == 0)[:, None]
        k_BG1D, v_BG1D = mixer.compress(k_BG1LD, v_BG1LD)
        return cache.update_blocks(k_BG1D, v_BG1D, number_B1, whole_B1, cache.slots // mixer.block)

    def _choose(
        self, q_BHD: Tensor, k_BGMD: Tensor, past_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers of chosen blocks [B, G, K], which of them count, and the others seen."""
        mixer: Any = self.layer.mixer
        number_M = torch.arange(k_BGMD.shape[2], device=q_BHD.device)
        seen_B1M = (number_M < past_B[:, None])[:, None]
        weight_BG1M = block_weights(
            q_BHD[:, :, None], k_BGMD, seen_B1M,
            mixer.spec.attention_scale, mixer.spec.attention_softcap,
        )  # fmt: skip
        order_BGM = ranks(weight_BG1M[:, :, 0].where(number_M > 0, float("inf")))
        order_BGM = order_BGM.masked_fill(~seen_B1M, NEVER)
        best = order_BGM.topk(min(mixer.chosen, len(number_M)), dim=-1)
        picked_BGK = best.values > NEVER
        chosen_BGM = torch.zeros_like(order_BGM, dtype=torch.bool)
        chosen_BGM = chosen_BGM.scatter(2, best.indices, picked_BGK)
        return best.indices, picked_BGK, seen_B1M & ~chosen_BGM

    def _attend(
        self, q_BHD: Tensor, parts: list[tuple[Tensor, Tensor, Tensor, float]], gates_BH: Tensor
    ) -> Tensor:
        """One softmax over keys and values of all parts, each with what counts and its log size."""
        spec = self.layer.mixer.spec
        work = torch.promote_types(q_BHD.dtype, torch.float32)
        groups = parts[0][0].shape[1]
        q_BGRD = q_BHD.to(work).unflatten(1, (groups, -1))
        scores, values = [], []
        for (k_BGND, v_BGND, seen_BGN, size), gate_BH in zip(parts, gates_BH, strict=True):
            score = q_BGRD @ k_BGND.to(work).mT * spec.attention_scale
            if (cap := spec.attention_softcap) is not None:
                score = cap * torch.tanh(score / cap)
            score = score + gate_BH.unflatten(1, (groups, -1))[..., None].to(work) + size
            scores.append(score.masked_fill(~seen_BGN[:, :, None], float("-inf")))
            values.append(v_BGND.to(work))
        o_BGRD = torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 2)
        return o_BGRD.flatten(1, 2).to(q_BHD.dtype)


def gathered(x_BGSD: Tensor, at_BGN: Tensor) -> Tensor:
    """Keys or values of those slots, [B, G, N, D]; the slots may be the same for all heads."""
    batch, groups, _, width = x_BGSD.shape
    return x_BGSD.gather(2, at_BGN[..., None].expand(batch, groups, -1, width))


def _gathered(cache: StaticKeys, at_BGN: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of those slots."""
    return gathered(cache.keys, at_BGN), gathered(cache.values, at_BGN)
