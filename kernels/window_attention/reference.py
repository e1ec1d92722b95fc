"""``window_attention`` in plain PyTorch: blocks of W queries, each against 2 W keys.

B batch, T queries, S keys, P = S - T keys of the past, H heads, D head width, W window, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.segments import Bounds


def window_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float | None,
    bounds: Bounds | None,
    keep_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.window_attention.window_attention``."""
    length, share = q_BTHD.shape[1], q_BTHD.shape[2] // k_BSGD.shape[2]
    q_BHTD = q_BTHD.transpose(1, 2)
    k_BHSD, v_BHSD = (x.repeat_interleave(share, 2).transpose(1, 2) for x in (k_BSGD, v_BSGD))
    if k_BHSD.shape[2] <= 2 * window:
        mask = _mask(length, k_BHSD.shape[2], window, bounds, keep_BS, q_BHTD.device)
        o_BHTD, log_sum_BHT = _attend(q_BHTD, k_BHSD, v_BHSD, mask, scale, soft_cap)
    else:
        o_BHTD, log_sum_BHT = _banded(
            q_BHTD, k_BHSD, v_BHSD, window, bounds, keep_BS, scale, soft_cap
        )
    return o_BHTD.transpose(1, 2), log_sum_BHT.transpose(1, 2)


def _mask(
    length: int,
    keys: int,
    window: int,
    bounds: Bounds | None,
    keep_BS: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Which keys a query sees, [B or 1, 1, T, S]; itself always."""
    column_S = torch.arange(keys, device=device)
    ahead_TS = column_S[keys - length :, None] - column_S
    mask = ((ahead_TS >= 0) & (ahead_TS < window))[None]
    if bounds is not None:
        mask = mask & (column_S >= bounds.first_BT[:, :, None])
    if keep_BS is not None:
        mask = (mask & keep_BS[:, None]) | (ahead_TS == 0)
    return mask[:, None]


def _banded(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    window: int,
    bounds: Bounds | None,
    keep_BS: Tensor | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    length, past = q_BHTD.shape[2], k_BHSD.shape[2] - q_BHTD.shape[2]
    count = -(-length // window)
    behind = count * window - length

    def keys(x: Tensor, value: int = 0) -> Tensor:
        """[B, H, S, ...] -> [B, H, n, 2 W, ...]: of each block, and of the W tokens before it."""
        x = x[:, :, max(past - window, 0) :]
        pad = (0, 0) * (x.dim() - 3) + (max(window - past, 0), behind)
        return F.pad(x, pad, value=value).unfold(2, 2 * window, window).movedim(-1, 3)

    def queries(x: Tensor) -> Tensor:
        """[B, H, T, ...] -> [B, H, n, W, ...]."""
        return F.pad(x, (0, 0) * (x.dim() - 3) + (0, behind)).unflatten(2, (count, window))

    column = torch.arange(2 * window, device=q_BHTD.device)
    ahead_WK = window + column[:window, None] - column
    real_nK = keys(q_BHTD.new_ones(1, 1, past + length, dtype=torch.bool))
    mask = (ahead_WK >= 0) & (ahead_WK < window) & real_nK[..., None, :]
    if bounds is not None:
        index_nK = keys(torch.arange(length, device=q_BHTD.device)[None, None])
        mask = mask & (index_nK[..., None, :] >= queries(bounds.first_BT[:, None])[..., None])
    if keep_BS is not None:
        mask = mask & (keys(keep_BS[:, None].int()) == 1)[..., None, :]
    mask = mask | (ahead_WK == 0)  # what fills up the last block sees itself, too
    o, log_sum = _attend(queries(q_BHTD), keys(k_BHSD), keys(v_BHSD), mask, scale, cap)
    return o.flatten(2, 3)[:, :, :length], log_sum.flatten(2, 3)[:, :, :length]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Over [..., T, D] queries and [..., S, D] keys, with the scores in memory.

    In fp32, autocast or not: what shares a softmax hangs on the difference of two large logs.
    """
    with torch.autocast(q.device.type, enabled=False):
        work = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(work) @ k.to(work).transpose(-1, -2)) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask, float("-inf"))
        log_sum = scores.logsumexp(-1, keepdim=True)
        return (scores - log_sum).exp().to(v.dtype) @ v, log_sum.squeeze(-1)
