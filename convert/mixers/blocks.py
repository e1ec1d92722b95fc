"""Where the blocks of a row lie: whole blocks of L tokens, counted from the start of each document.

Counted from there, and not from the row's, a document's blocks are the same wherever it is packed
and however it is padded. A block of less than L tokens is none. B rows, T new tokens, S keys,
M = S // L, more than any row has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ltconvert.convert.mixers.context import SequenceContext


class Blocks(NamedTuple):
    """Blocks of cached and new tokens, numbered along each row.

    Attributes:
        end_BM: the last column of each block; S for those that a row does not have.
        first_BT, past_BT: numbers of the blocks before a query's own stretch: all of its document
            that end at least ``window`` tokens before it.
        local_BT: the first column of that stretch: of the first token behind those blocks.
        block_BS: the number of each key's block, -1 where it has none.
    """

    end_BM: Tensor
    first_BT: Tensor
    past_BT: Tensor
    local_BT: Tensor
    block_BS: Tensor


def blocks_of(context: SequenceContext, keys: int, size: int, window: int) -> Blocks:
    """The blocks of a pass, made once for all layers."""
    return context.remembered(
        ("blocks", keys, size, window), lambda: _blocks(context, keys, size, window)
    )


def _blocks(context: SequenceContext, keys: int, size: int, window: int) -> Blocks:
    starts_BT = context.starts(keys)
    rows = len(starts_BT)
    columns_S = torch.arange(keys, device=context.device)
    columns_BT = columns_S[keys - context.num_tokens :].expand(rows, -1).contiguous()
    if context.segment_ids_BT is None:
        number_M = torch.arange(1, keys // size + 1, device=context.device)
        end_BM = row_starts(context, keys) + number_M * size - 1
    else:
        ends_BS = (columns_BT - starts_BT + 1) % size == 0
        end_BM = columns_S.where(ends_BS, keys).sort(dim=-1).values[:, : keys // size]
    end_BM = end_BM.where(end_BM < keys, keys).expand(rows, -1).contiguous()
    first_BT = torch.searchsorted(end_BM, starts_BT.contiguous())
    past_BT = torch.searchsorted(end_BM, columns_BT - window, right=True).maximum(first_BT)
    local_BT = starts_BT + (past_BT - first_BT) * size
    block_BS = torch.searchsorted(end_BM, columns_S.expand(rows, -1).contiguous())
    end_BS = torch.nn.functional.pad(end_BM, (0, 1), value=keys).gather(1, block_BS)
    inside_BS = (end_BS < keys) & (columns_S > end_BS - size)
    return Blocks(end_BM, first_BT, past_BT, local_BT, block_BS.masked_fill(~inside_BS, -1).int())


def row_starts(context: SequenceContext, keys: int) -> Tensor:
    """The first column of each row that is no padding, [B or 1, 1]; of rows of one document."""
    if context.keep_BS is None:
        return torch.zeros(1, 1, dtype=torch.int64, device=context.device)
    return context.keep_BS[:, -keys:].int().argmax(dim=-1, keepdim=True)
