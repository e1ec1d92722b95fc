"""What a model is told of its tokens: padding, documents and positions, as its layers read them.

B rows, T new tokens, S cached and new tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.rope import Rope
from ltconvert.kernels.segments import segment_counts


def read_sequence(
    h_BTC: Tensor,
    ropes: Mapping[str, Rope],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
    past_length: int,
) -> SequenceContext:
    """The context of one pass; arguments and errors see ``LT2Model.context``."""
    rows, num_tokens = h_BTC.shape[:2]
    total = past_length + num_tokens
    if attention_mask is not None and attention_mask.shape != (rows, total):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
            f"{(rows, total)}: one entry for each cached and new token"
        )
    if segment_ids is not None and past_length:
        raise ValueError(
            "segment_ids cannot follow a cache; pack documents in uncached passes only"
        )
    keep_BS = None
    if attention_mask is not None and not bool(attention_mask.all()):
        keep_BS = attention_mask.bool()
    keep_BT = None if keep_BS is None else keep_BS[:, -num_tokens:]
    if keep_BT is not None and bool(keep_BT.all()):
        keep_BT = None
    # Numbered anew: one that comes back is another document, in every mixer alike.
    segment_ids = segment_counts(segment_ids, keep_BT)
    if position_ids is None:
        position_ids = _positions(h_BTC, keep_BS, segment_ids, past_length)
    rope = {name: table(position_ids) for name, table in ropes.items()}
    return SequenceContext(
        rope, num_tokens, h_BTC.device, position_ids, keep_BS, keep_BT, segment_ids
    )


def _positions(
    h_BTC: Tensor, keep_BS: Tensor | None, segment_ids: Tensor | None, past_length: int
) -> Tensor:
    """Positions [B or 1, T]: real tokens counted from 0 in each row and document."""
    num_tokens = h_BTC.shape[1]
    index_BS = torch.arange(past_length, past_length + num_tokens, device=h_BTC.device)[None]
    if keep_BS is not None:
        index_BS = keep_BS.long().cumsum(-1) - 1
    if segment_ids is not None:  # a document's first token is a real one
        starts_BT = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        index_BS = index_BS - index_BS.where(starts_BT, 0).cummax(dim=-1).values
    return index_BS.clamp(min=0)[:, -num_tokens:]
