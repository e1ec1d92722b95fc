"""``block_topk`` in plain PyTorch, chunk by chunk of queries.

B rows, G key/value heads, R query heads of one of those, T queries, n of a chunk, M blocks,
D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.index_topk.reference import NEVER, ranks
from ltconvert.kernels.sparse_attention.bits import pack, words_for
from ltconvert.kernels.sparse_attention.seen import chunks


def block_topk(
    q_BHTD: Tensor,
    k_BGMD: Tensor,
    first_BT: Tensor,
    past_BT: Tensor,
    count: int,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.block_topk.block_topk``."""
    with torch.no_grad():
        return _block_topk(q_BHTD, k_BGMD, first_BT, past_BT, count, scale, soft_cap)


# An op of its own, so that `torch.compile` does not unroll the chunks.
@torch.library.custom_op("ltconvert::block_topk", mutates_args=())
def _block_topk(
    q_BHTD: Tensor,
    k_BGMD: Tensor,
    first_BT: Tensor,
    past_BT: Tensor,
    count: int,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q_BHTD.shape
    blocks = k_BGMD.shape[2]
    chosen, rest = (x.zero_() for x in _bits(q_BHTD, k_BGMD))
    number_M = torch.arange(blocks, device=q_BHTD.device)
    for a, b in chunks(length, batch * heads * blocks, q_BHTD.device) if blocks else ():
        first_Bn1, past_Bn1 = first_BT[:, a:b, None], past_BT[:, a:b, None]
        seen_BnM = (number_M >= first_Bn1) & (number_M < past_Bn1)
        weight_BGnM = block_weights(q_BHTD[:, :, a:b], k_BGMD, seen_BnM, scale, soft_cap)
        mask_BGnM = best_blocks(weight_BGnM, seen_BnM, number_M == first_Bn1, count)
        chosen[:, :, a:b] = pack(mask_BGnM)
        rest[:, :, a:b] = pack(seen_BnM[:, None] & ~mask_BGnM)
    return chosen, rest


@_block_topk.register_fake
def _bits(q_BHTD: Tensor, k_BGMD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    groups, blocks = k_BGMD.shape[1:3]
    size = q_BHTD.shape[0], groups, q_BHTD.shape[2], words_for(blocks)
    return q_BHTD.new_empty(size, dtype=torch.int32), q_BHTD.new_empty(size, dtype=torch.int32)


def block_weights(
    q_BHnD: Tensor, k_BGMD: Tensor, seen_BnM: Tensor, scale: float, cap: float | None
) -> Tensor:
    """Softmax over the blocks seen, summed over a group's query heads, [B, G, n, M]."""
    work = torch.promote_types(q_BHnD.dtype, torch.float32)
    with torch.autocast(q_BHnD.device.type, enabled=False):
        q_BGRnD = q_BHnD.to(work).unflatten(1, (k_BGMD.shape[1], -1))
        scores = (q_BGRnD @ k_BGMD.to(work)[:, :, None].mT) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen_BnM[:, None, None], float("-inf"))
    return scores.softmax(-1).sum(2)  # NaN where no block is seen: none is chosen then


def best_blocks(weight_BGnM: Tensor, seen_BnM: Tensor, first_BnM: Tensor, count: int) -> Tensor:
    """The blocks chosen, boolean [B, G, n, M]: the first seen and the ``count - 1`` best others."""
    seen = seen_BnM[:, None]
    if weight_BGnM.shape[-1] <= count:
        return seen.expand_as(weight_BGnM)
    weight_BGnM = weight_BGnM.masked_fill(first_BnM[:, None], float("inf"))
    order = ranks(weight_BGnM).masked_fill(~seen, NEVER)
    least = order.topk(count, dim=-1, sorted=False).values.amin(-1, True)
    return seen & (order >= least)
