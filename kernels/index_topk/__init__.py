"""The lightning indexer of DeepSeek sparse attention: which keys a query attends to.

B rows, T queries, S keys, I index heads, E their width, W words of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.index_topk.reference import NEVER, index_scores, ranks
from ltconvert.kernels.sparse_attention import check_seen


def index_topk(
    q_BTIE: Tensor,
    k_BSE: Tensor,
    weight_BTI: Tensor,
    count: int,
    *,
    first_BT: Tensor | None = None,
    keep_BS: Tensor | None = None,
) -> Tensor:
    """The ``count`` keys of highest score of every query, as bits [B, 1, T, W], int32.

    ``score[t, s] = sum_i weight[t, i] * relu(q[t, i] . k[s])`` (arXiv 2512.02556, eq. 1), in fp32;
    of equal scores that of the later key counts as higher. Which keys take part (``first_BT``,
    ``keep_BS``) is as in ``sparse_attention``, which reads the bits; where they are no more than
    ``count`` all are chosen. The scores of all queries never stand in memory together. No gradient.

    Raises:
        ValueError: shapes that do not fit together, or a count below 1.
    """
    check_index(q_BTIE, k_BSE, weight_BTI)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    check_seen(q_BTIE.shape[0], q_BTIE.shape[1], k_BSE.shape[1], first_BT, keep_BS)
    limit = limits.of_index(q_BTIE)
    return dispatch.implementation("index_topk", q_BTIE.device, limit).index_topk(
        q_BTIE, k_BSE, weight_BTI, count, first_BT=first_BT, keep_BS=keep_BS
    )


def decode_topk(
    q_BIE: Tensor,
    k_BSE: Tensor,
    weight_BI: Tensor,
    count: int,
    lengths_B: Tensor,
    window: int | None = None,
) -> Tensor:
    """The slots of the best keys for one token a row, int64 [B, ``min(count, S)``], best first.

    Of the first ``lengths_B`` slots of a cache, or of the last ``window`` of those; where they are
    fewer, slots that do not count follow. Fixed shapes, nothing the host waits for. No gradient.
    """
    slots = k_BSE.shape[1]
    with torch.no_grad():
        ranks_BS = ranks(index_scores(q_BIE[:, None], k_BSE, weight_BI[:, None])[:, 0])
        slots_S = torch.arange(slots, device=k_BSE.device)
        seen_BS = slots_S < lengths_B[:, None]
        if window is not None:
            seen_BS = seen_BS & (slots_S >= lengths_B[:, None] - window)
        return ranks_BS.masked_fill(~seen_BS, NEVER).topk(min(count, slots), dim=-1).indices


def check_index(q_BTIE: Tensor, k_BSE: Tensor, weight_BTI: Tensor) -> None:
    """Raise ValueError unless an indexer's queries, keys and weights fit together."""
    batch, length, heads, width = q_BTIE.shape
    keys = k_BSE.shape[1]
    if (
        k_BSE.shape != (batch, keys, width)
        or weight_BTI.shape != (batch, length, heads)
        or not length
        or keys < length
    ):
        raise ValueError(
            f"with index queries {list(q_BTIE.shape)}, keys must be [{batch}, {length} or more, "
            f"{width}] and weights [{batch}, {length}, {heads}]; got {list(k_BSE.shape)} and "
            f"{list(weight_BTI.shape)}"
        )
