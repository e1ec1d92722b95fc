"""Softmax attention over a window of tokens, with the logarithm of what its weights add up to.

PyTorch's scaled dot product attention keeps that sum to itself; a mixer that shares the softmax
between a window and something else needs it.

B rows, T new tokens, S keys, H heads, D head width, W window, n blocks of W queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.mixers.attention import exact_scores
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.flex import flex_with_sum


def local_attention(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    context: SequenceContext,
    *,
    window: int,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over itself and the ``window - 1`` tokens before it.

    Args:
        k_BHSD, v_BHSD: cached and new keys and values, S >= T; at most ``window - 1`` are cached.
        cap: scores pass through ``cap * tanh(s / cap)``.

    Returns:
        Outputs [B, H, T, D] and the log of the sum of exponentiated scores, [B, H, T] in at least
        fp32.
    """
    if (blocks := context.block_mask(window)) is not None:
        return flex_with_sum(q_BHTD, k_BHSD, v_BHSD, blocks, scale, cap)
    if k_BHSD.shape[2] <= 2 * window:
        mask = context.attention_mask(window, k_BHSD.shape[2])
        if mask is None:
            size = (q_BHTD.shape[2], k_BHSD.shape[2])
            mask = torch.ones(size, dtype=torch.bool, device=q_BHTD.device).tril()
        return _attend(q_BHTD, k_BHSD, v_BHSD, mask, scale, cap)
    return _banded(q_BHTD, k_BHSD, v_BHSD, context, window, scale, cap)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Over [..., T, D] queries and [..., S, D] keys, with the scores in memory.

    In fp32, autocast or not: the share of the window hangs on the difference of two large logs.
    """
    with torch.autocast(q.device.type, enabled=False):
        scores = exact_scores(q, k, scale, cap).masked_fill(~mask, float("-inf"))
        log_sum = scores.logsumexp(-1, keepdim=True)
        return (scores - log_sum).exp().to(v.dtype) @ v, log_sum.squeeze(-1)


def _banded(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    context: SequenceContext,
    window: int,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Blocks of W queries, each against 2 W keys: its own tokens and the W before them."""
    length, cached = q_BHTD.shape[2], k_BHSD.shape[2] - q_BHTD.shape[2]
    count = -(-length // window)
    behind = count * window - length

    def keys(x: Tensor) -> Tensor:
        """[B, H, S, ...] -> [B, H, n, 2 W, ...]."""
        pad = (0, 0) * (x.dim() - 3) + (window - cached, behind)
        return F.pad(x, pad).unfold(2, 2 * window, window).movedim(-1, 3)

    q_BHnWD = F.pad(q_BHTD, (0, 0, 0, behind)).unflatten(2, (count, window))
    mask = context.remembered(
        ("band", window, cached), lambda: _band(context, length, cached, count, window)
    )
    o, log_sum = _attend(q_BHnWD, keys(k_BHSD), keys(v_BHSD), mask, scale, cap)
    return o.flatten(2, 3)[:, :, :length], log_sum.flatten(2, 3)[:, :, :length]


def _band(context: SequenceContext, length: int, cached: int, count: int, window: int) -> Tensor:
    """Which keys of its 2 W a query sees, [B or 1, 1, n, W, 2 W]; itself always."""
    device = context.device
    index_nWK = torch.arange(2 * window, device=device) + window * torch.arange(
        count, device=device
    ).view(-1, 1, 1)
    query_nWK = window + torch.arange(count * window, device=device).view(count, window, 1)
    ahead = query_nWK - index_nWK
    seen = (ahead >= 0) & (ahead < window)
    seen = (seen & (index_nWK >= window - cached))[None]
    behind = count * window - length

    def blocks(x_BS: Tensor, value: int) -> tuple[Tensor, Tensor]:
        """Of queries [B, n, W, 1] and of keys [B, n, 1, 2 W]."""
        padded = F.pad(x_BS, (window - cached, behind), value=value)
        own = padded[:, window:].unflatten(1, (count, window))
        return own[..., None], padded.unfold(1, 2 * window, window)[:, :, None]

    if (ids_BT := context.segment_ids_BT) is not None:
        of_query, of_key = blocks(ids_BT, -1)
        seen = seen & (of_query == of_key)
    if (keep_BS := context.keep_BS) is not None:
        _, of_key = blocks(keep_BS[:, -(cached + length) :].int(), 0)
        seen = (seen & (of_key == 1)) | (ahead == 0)
    return seen[:, None]
