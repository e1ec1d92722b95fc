"""``sparse_attention`` in plain PyTorch: chunk by chunk of queries, each against all keys so far.

The backward computes the weights again. B rows, H query heads, G key/value heads, R query heads of
one of those, T queries, n of a chunk, S keys, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.kernels.segments import can_look
from ltconvert.kernels.sparse_attention.seen import chunks, seen_keys
from ltconvert.kernels.untraced import untraced


def sparse_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.sparse_attention.sparse_attention``."""
    return _attended(
        q_BHTD, k_BGSD, v_BGSD, first_BT, bits_BJTW, block_BS, keep_BS, scale, soft_cap, causal
    )


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q_BGRTD, k_BGSD, v_BGSD = _wide(q, k, v)
        o, log_sum = torch.empty_like(q_BGRTD), q_BGRTD.new_empty(q_BGRTD.shape[:-1])
        with torch.autocast(q.device.type, enabled=False):
            for a, b in _chunks(q, k):
                weights, part = _weights(q_BGRTD, k_BGSD, a, b, *others)
                log_sum[..., a:b] = part.log_sum
                o[..., a:b, :] = weights @ v_BGSD[:, :, None, part.keys]
        o, log_sum = o.flatten(1, 2).to(q.dtype), log_sum.flatten(1, 2)
        ctx.save_for_backward(q, k, v, o, *others[:4])
        ctx.scales = others[4:]
        return o, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlog_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, *tensors = ctx.saved_tensors
        others: list[Any] = [*tensors, *ctx.scales]
        scale = ctx.scales[0]
        q_BGRTD, k_BGSD, v_BGSD = _wide(q, k, v)
        do_BGRTD = do.to(q_BGRTD.dtype).view_as(q_BGRTD)
        # How far a weight moves the outputs beyond their mean, which it moves as well.
        mean_BGRT = (do_BGRTD * o.view_as(q_BGRTD)).sum(-1) - dlog_sum.view(q_BGRTD.shape[:-1])
        dq, dk, dv = (torch.zeros_like(x) for x in (q_BGRTD, k_BGSD, v_BGSD))
        with torch.autocast(q.device.type, enabled=False):
            for a, b in _chunks(q, k):
                weights, part = _weights(q_BGRTD, k_BGSD, a, b, *others)
                do_n = do_BGRTD[..., a:b, :]
                dv[:, :, part.keys] += (weights.mT @ do_n).sum(2)
                dweights = do_n @ v_BGSD[:, :, None, part.keys].mT
                dscores = weights * (dweights - mean_BGRT[..., a:b, None]) * part.slope * scale
                dq[..., a:b, :] = dscores @ k_BGSD[:, :, None, part.keys]
                dk[:, :, part.keys] += (dscores.mT @ q_BGRTD[..., a:b, :]).sum(2)
        grads = (dq.view_as(q).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
        return (*grads, *[None] * 7)


@untraced
def _attended(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _SparseAttention.apply(q, k, v, *others)


class _Chunk(NamedTuple):
    """What a chunk's weights come with: log of their sum [B, G, R, n], derivative of the soft cap
    (1 without one), keys that it looked at."""

    log_sum: Tensor
    slope: Tensor | float
    keys: slice


def _weights(
    q_BGRTD: Tensor,
    k_BGSD: Tensor,
    a: int,
    b: int,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    cap: float | None,
    causal: bool,
) -> tuple[Tensor, _Chunk]:
    """Softmax weights [B, G, R, n, keys] of queries a to b."""
    length, total = q_BGRTD.shape[3], k_BGSD.shape[2]
    past = total - length + b if causal else total
    keys = slice(
        _least(first_BT[:, a:b]) if bits_BJTW is None and first_BT is not None else 0, past
    )
    scores = (q_BGRTD[..., a:b, :] @ k_BGSD[:, :, None, keys].mT) * scale
    slope: Tensor | float = 1.0
    if cap is not None:
        scores = torch.tanh(scores / cap)
        slope = 1.0 - scores.square()
        scores = cap * scores
    seen_BJnS = seen_keys(
        first_BT, bits_BJTW, block_BS, keep_BS, a, b, length, total, scores.device, causal
    )
    seen_BJnS = seen_BJnS[..., keys]
    heads = q_BGRTD.shape[1] * q_BGRTD.shape[2]
    if seen_BJnS.shape[1] > 1:
        seen_BJnS = seen_BJnS.repeat_interleave(heads // seen_BJnS.shape[1], dim=1)
        seen = seen_BJnS.unflatten(1, q_BGRTD.shape[1:3])
    else:
        seen = seen_BJnS[:, :, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    log_sum = scores.logsumexp(-1)
    some = log_sum.masked_fill(log_sum == float("-inf"), 0.0)  # nothing seen: all weights 0
    return (scores - some[..., None]).exp(), _Chunk(log_sum, slope, keys)


def _least(first_Bn: Tensor) -> int:
    """The first key that any of the queries sees; 0 where looking would cost."""
    if not can_look(first_Bn):
        return 0
    return int(first_Bn.min())


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In at least fp32, query heads beside the key/value head that they read."""
    work = torch.promote_types(q.dtype, torch.float32)
    q_BGRTD = q.to(work).contiguous().unflatten(1, (k.shape[1], -1))
    return q_BGRTD, k.to(work), v.to(work)


def _chunks(q_BHTD: Tensor, k_BGSD: Tensor) -> list[tuple[int, int]]:
    batch, heads, length, _ = q_BHTD.shape
    return chunks(length, batch * heads * k_BGSD.shape[2], q_BHTD.device)
