"""Triton kernels of ``window_attention``.

A block of queries meets the few blocks of keys that its windows reach; a block of keys the few
blocks of queries that reach it. H query heads, G key/value heads, D head width, filled up to E.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(x, rows, T, stride, D: tl.constexpr, E: tl.constexpr):
    """Rows of one head, [rows, E]; zeros beyond its end and its width."""
    column = tl.arange(0, E)[None, :]
    at = x + rows.to(tl.int64)[:, None] * stride + column
    return tl.load(at, mask=(rows < T)[:, None] & (column < D), other=0.0)


@triton.jit
def _scores(a, b, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """``a b^T`` as the softmax reads it, in fp32."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
    if CAP > 0.0:
        s = CAP * (2.0 * tl.sigmoid(2.0 * s / CAP) - 1.0)  # tanh
    return s


@triton.jit
def _seen(query, key, ids, T, window, SEGMENTS: tl.constexpr):
    """Which keys the queries see; one of both runs along rows, the other along columns."""
    ahead = query - key
    seen = (ahead >= 0) & (ahead < window) & (query < T)
    if SEGMENTS:
        of_query = tl.load(ids + query, mask=query < T, other=-1)
        of_key = tl.load(ids + key, mask=key < T, other=-2)
        seen = seen & (of_query == of_key)
    return seen


@triton.jit
def forward_kernel(
    q, k, v, ids, o, log_sum, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of a head: outputs, and the log of the summed weights."""
    blocks = tl.cdiv(T, M)
    start = tl.program_id(0) % blocks * M
    row, head = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    row, group = row.to(tl.int64), head // (H // G)
    q += row * q_row + head * q_head
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    ids += row * T
    query = start + tl.arange(0, M)
    q_ME = _tile(q, query, T, q_token, D, E)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o_ME = tl.zeros([M, E], tl.float32)
    for first in range(tl.maximum(start - window + 1, 0) // N * N, tl.minimum(start + M, T), N):
        key = first + tl.arange(0, N)
        s_MN = _scores(q_ME, _tile(k, key, T, k_token, D, E), scale, CAP, PRECISION)
        seen_MN = _seen(query[:, None], key[None, :], ids, T, window, SEGMENTS)
        s_MN = tl.where(seen_MN, s_MN, float("-inf"))
        now = tl.maximum(highest, tl.max(s_MN, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)  # a block of which a query sees nothing
        weight_MN = tl.exp2((s_MN - finite[:, None]) * LOG2E)
        faded = tl.exp2((highest - finite) * LOG2E)
        total = total * faded + tl.sum(weight_MN, 1)
        v_NE = _tile(v, key, T, v_token, D, E)
        o_ME = o_ME * faded[:, None]
        o_ME += tl.dot(weight_MN.to(v_NE.dtype), v_NE, input_precision=PRECISION)
        highest = now
    total = tl.where(query < T, total, 1.0)
    column = tl.arange(0, E)[None, :]
    at = o + ((row * T + query.to(tl.int64)[:, None]) * H + head) * D + column
    inside = (query < T)[:, None] & (column < D)
    tl.store(at, (o_ME / total[:, None]).to(o.dtype.element_ty), mask=inside)
    at = log_sum + (row * H + head) * T + query
    tl.store(at, highest + tl.log(total), mask=query < T)


@triton.jit
def delta_kernel(
    o, do, dlog_sum, delta, T, H, HAS_SUM: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """``o.do - dlog_sum`` of M queries of a head, taken from the gradient of each weight."""
    blocks = tl.cdiv(T, M)
    query = tl.program_id(0) % blocks * M + tl.arange(0, M)
    row, head = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    first = (row.to(tl.int64) * T * H + head) * D
    o_ME = _tile(o + first, query, T, H * D, D, E).to(tl.float32)
    do_ME = _tile(do + first, query, T, H * D, D, E).to(tl.float32)
    delta_M = tl.sum(o_ME * do_ME, 1)
    at = (row.to(tl.int64) * H + head) * T + query
    if HAS_SUM:
        delta_M -= tl.load(dlog_sum + at, mask=query < T, other=0.0)
    tl.store(delta + at, delta_M, mask=query < T)


@triton.jit
def query_gradient_kernel(
    q, k, v, ids, do, log_sum, delta, dq, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries of a head."""
    blocks = tl.cdiv(T, M)
    start = tl.program_id(0) % blocks * M
    row, head = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    row, group = row.to(tl.int64), head // (H // G)
    q += row * q_row + head * q_head
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    ids += row * T
    query = start + tl.arange(0, M)
    first_of_head = (row * T * H + head) * D
    q_ME = _tile(q, query, T, q_token, D, E)
    do_ME = _tile(do + first_of_head, query, T, H * D, D, E)
    of_head = (row * H + head) * T
    log_sum_M = tl.load(log_sum + of_head + query, mask=query < T, other=0.0)
    delta_M = tl.load(delta + of_head + query, mask=query < T, other=0.0)
    dq_ME = tl.zeros([M, E], tl.float32)
    for first in range(tl.maximum(start - window + 1, 0) // N * N, tl.minimum(start + M, T), N):
        key = first + tl.arange(0, N)
        k_NE = _tile(k, key, T, k_token, D, E)
        s_MN = _scores(q_ME, k_NE, scale, CAP, PRECISION)
        seen_MN = _seen(query[:, None], key[None, :], ids, T, window, SEGMENTS)
        weight_MN = tl.where(seen_MN, tl.exp2((s_MN - log_sum_M[:, None]) * LOG2E), 0.0)
        v_NE = _tile(v, key, T, v_token, D, E)
        dweight_MN = tl.dot(do_ME, tl.trans(v_NE), input_precision=PRECISION)
        ds_MN = weight_MN * (dweight_MN - delta_M[:, None])
        if CAP > 0.0:
            ds_MN *= 1.0 - (s_MN / CAP) * (s_MN / CAP)
        dq_ME += tl.dot(ds_MN.to(k_NE.dtype), k_NE, input_precision=PRECISION)
    column = tl.arange(0, E)[None, :]
    at = dq + first_of_head + query.to(tl.int64)[:, None] * H * D + column
    tl.store(at, (dq_ME * scale).to(dq.dtype.element_ty), mask=(query < T)[:, None] & (column < D))


@triton.jit
def key_gradient_kernel(
    q, k, v, ids, do, log_sum, delta, dk, dv, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of a head, over all query heads that share them."""
    blocks = tl.cdiv(T, N)
    start = tl.program_id(0) % blocks * N
    row, group = tl.program_id(0) // blocks // G, tl.program_id(0) // blocks % G
    row, share = row.to(tl.int64), H // G
    q += row * q_row
    k += row * k_row + group * k_head
    v += row * v_row + group * v_head
    ids += row * T
    key = start + tl.arange(0, N)
    k_NE, v_NE = _tile(k, key, T, k_token, D, E), _tile(v, key, T, v_token, D, E)
    dk_NE = tl.zeros([N, E], tl.float32)
    dv_NE = tl.zeros([N, E], tl.float32)
    for head in range(group * share, (group + 1) * share):
        of_head = (row * H + head) * T
        first_of_head = (row * T * H + head) * D
        for first in range(start // M * M, tl.minimum(start + N + window - 1, T), M):
            query = first + tl.arange(0, M)
            q_ME = _tile(q + head * q_head, query, T, q_token, D, E)
            do_ME = _tile(do + first_of_head, query, T, H * D, D, E)
            log_sum_M = tl.load(log_sum + of_head + query, mask=query < T, other=0.0)
            delta_M = tl.load(delta + of_head + query, mask=query < T, other=0.0)
            s_NM = _scores(k_NE, q_ME, scale, CAP, PRECISION)
            seen_NM = _seen(query[None, :], key[:, None], ids, T, window, SEGMENTS)
            weight_NM = tl.where(seen_NM, tl.exp2((s_NM - log_sum_M[None, :]) * LOG2E), 0.0)
            dv_NE += tl.dot(weight_NM.to(do_ME.dtype), do_ME, input_precision=PRECISION)
            dweight_NM = tl.dot(v_NE, tl.trans(do_ME), input_precision=PRECISION)
            ds_NM = weight_NM * (dweight_NM - delta_M[None, :])
            if CAP > 0.0:
                ds_NM *= 1.0 - (s_NM / CAP) * (s_NM / CAP)
            dk_NE += tl.dot(ds_NM.to(q_ME.dtype), q_ME, input_precision=PRECISION)
    column = tl.arange(0, E)[None, :]
    offset = ((row * T + key.to(tl.int64)[:, None]) * G + group) * D + column
    inside = (key < T)[:, None] & (column < D)
    tl.store(dk + offset, (dk_NE * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + offset, dv_NE.to(dv.dtype.element_ty), mask=inside)
