"""``index_topk`` in plain PyTorch, chunk by chunk of queries.

B rows, T queries, n of a chunk, S keys, I index heads, E their width, W words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.sparse_attention.bits import pack, words_for
from ltconvert.kernels.sparse_attention.seen import chunks, stretch

NEVER = torch.iinfo(torch.int64).min


def index_topk(
    q_BTIE: Tensor,
    k_BSE: Tensor,
    weight_BTI: Tensor,
    count: int,
    *,
    first_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.index_topk.index_topk``."""
    with torch.no_grad():
        return _index_topk(q_BTIE, k_BSE, weight_BTI, count, first_BT, keep_BS)


# An op of its own, so that `torch.compile` does not unroll the chunks.
@torch.library.custom_op("ltconvert::index_topk_reference", mutates_args=())
def _index_topk(
    q_BTIE: Tensor,
    k_BSE: Tensor,
    weight_BTI: Tensor,
    count: int,
    first_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    length, total = q_BTIE.shape[1], k_BSE.shape[1]

    def put_best(a: int, b: int, keys: int, bits_BTW: Tensor) -> None:
        seen_BnS = stretch(first_BT, keep_BS, a, b, length, total, q_BTIE.device)
        scores_BnS = index_scores(q_BTIE[:, a:b], k_BSE[:, :keys], weight_BTI[:, a:b])
        ranks_BnS = ranks(scores_BnS).masked_fill(~seen_BnS, NEVER)
        least_Bn1 = ranks_BnS.topk(count, dim=-1, sorted=False).values.amin(-1, True)
        bits_BTW[:, a:b, : words_for(keys)] = pack(seen_BnS & (ranks_BnS >= least_Bn1))

    size = q_BTIE.shape[0] * q_BTIE.shape[2] * total
    return choose(put_best, size, q_BTIE, k_BSE, count, first_BT, keep_BS)


@_index_topk.register_fake
def empty_bits(q_BTIE: Tensor, k_BSE: Tensor, *_: Any) -> Tensor:
    """Room for the result, [B, 1, T, W]."""
    shape = q_BTIE.shape[0], 1, q_BTIE.shape[1], words_for(k_BSE.shape[1])
    return q_BTIE.new_empty(shape, dtype=torch.int32)


def choose(
    put_best: Callable[[int, int, int, Tensor], None],
    size: int,
    q_BTIE: Tensor,
    k_BSE: Tensor,
    count: int,
    first_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    """Bits of the best keys [B, 1, T, W].

    Args:
        put_best: puts the bits of queries a to b, of more than ``count`` keys, into [B, T, W].
        size: numbers that the scores of a query take while they are made.
    """
    batch, length = q_BTIE.shape[:2]
    total, device = k_BSE.shape[1], q_BTIE.device
    bits_BTW = torch.zeros(batch, length, words_for(total), dtype=torch.int32, device=device)
    for a, b in chunks(length, size, device):
        keys = total - length + b
        if keys > count:
            put_best(a, b, keys, bits_BTW)
        else:
            seen_BnS = stretch(first_BT, keep_BS, a, b, length, total, device)
            bits_BTW[:, a:b, : words_for(keys)] = pack(seen_BnS)
    return bits_BTW[:, None]


def index_scores(q_BnIE: Tensor, k_BSE: Tensor, weight_BnI: Tensor) -> Tensor:
    """``sum_i weight_i relu(q_i . k)``, [B, n, S] in at least fp32, autocast or not."""
    work = torch.promote_types(q_BnIE.dtype, torch.float32)
    with torch.autocast(q_BnIE.device.type, enabled=False):
        products_BnIS = (q_BnIE.to(work) @ k_BSE.to(work).mT[:, None]).relu()
        return (weight_BnI.to(work)[..., None, :] @ products_BnIS).squeeze(-2)


def ranks(scores: Tensor) -> Tensor:
    """int64 of the order of the scores [..., S] (as fp32); of equal ones the later is higher.

    Scores of 0 are many, where no product of a query is positive: which of them are chosen must not
    depend on how a device sorts.
    """
    scores = scores.float()
    order = scores.where(scores != 0, 0.0).view(torch.int32)  # -0.0 is 0.0
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return (order.long() << 32) | columns
