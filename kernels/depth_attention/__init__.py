"""Attention over a sequence and, under one softmax, over the same token's depth keys.

B rows, T queries, S keys, N slots, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def depth_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    schedule: float | Tensor = 1.0,
    bias_H: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    segment_ids_BT: Tensor | None = None,
    keep_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``o = o_seq + s sigmoid(lse_depth + b - lse_seq) (o_depth - o_seq)`` (stand-in)."""
    _, length, heads, _ = q_BTHD.shape
    keys, groups = k_BSGD.shape[1:3]
    work = torch.promote_types(q_BTHD.dtype, torch.float32)
    q = q_BTHD.to(work)
    k, v, dk, dv = (
        y.to(work).repeat_interleave(heads // groups, dim=-2)
        for y in (k_BSGD, v_BSGD, depth_k_BTNGD[:, :, :slots], depth_v_BTNGD[:, :, :slots])
    )

    def capped(scores: Tensor) -> Tensor:
        return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)

    own = torch.arange(keys - length, keys, device=q.device)[:, None]
    at = torch.arange(keys, device=q.device)[None]
    mask = at <= own
    if window is not None:
        mask = mask & (own - at < window)
    mask = mask[None]
    if segment_ids_BT is not None:
        mask = mask & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None])
    if keep_BS is not None:
        mask = (mask & keep_BS[:, None]) | (at == own)
    scores = capped(torch.einsum("bthd,bshd->bths", q, k) * scale)
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    lse = scores.logsumexp(-1)
    o = torch.einsum("bths,bshd->bthd", scores.softmax(-1), v)
    if not slots:
        return o.to(q_BTHD.dtype), lse, torch.zeros_like(lse)
    depth = capped(torch.einsum("bthd,btnhd->bthn", q, dk) * scale)
    if bias_H is not None:
        depth = depth + bias_H[:, None].to(work)
    share = schedule * torch.sigmoid(depth.logsumexp(-1) - lse)
    o_depth = torch.einsum("bthn,btnhd->bthd", depth.softmax(-1), dv)
    o = o + share[..., None] * (o_depth - o)
    return o.to(q_BTHD.dtype), lse - torch.log1p(-share), share.detach()
