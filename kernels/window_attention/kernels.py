"""Triton kernels of ``window_attention``.

A block of queries meets the blocks of keys that its windows and documents reach; a block of keys
the blocks of queries that reach it. Where there are many of those, the ones of which everything is
seen go through a loop of their own, without a mask.

H query heads, G key/value heads, D head width, filled up to E; T tokens, M queries, N keys. Of each
token ``begins`` and ``ends`` have the first and the last one of its document, ``keep`` 0 at
padding; they are read with DOCUMENTS and PADDED. Scores s are in units of 1 / UNIT
powers of 2: a weight is ``2 ** (UNIT s - ...)``, one multiply-add and one power a score.
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
    """``a b^T`` as the softmax reads it, in fp32: in units of `_unit`."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if CAP > 0.0:
        s = CAP * (2.0 * tl.sigmoid(2.0 * scale * s / CAP) - 1.0)  # tanh
    return s


@triton.jit
def _unit(scale, CAP: tl.constexpr):
    """Powers of 2 in a score of 1."""
    if CAP > 0.0:
        return 0.0 * scale + LOG2E
    return scale * LOG2E


@triton.jit
def _first_key(query, begins, T, window, DOCUMENTS: tl.constexpr):
    """The first key that each query sees; it never falls from one query to the next."""
    first = tl.maximum(query - window + 1, 0)
    if DOCUMENTS:
        first = tl.maximum(first, tl.load(begins + tl.minimum(query, T - 1)))
    return first


@triton.jit
def _seen_keys(query_M, key_N, first_M, keep, T, PADDED: tl.constexpr):
    """Which keys each query sees, [M, N]; itself always."""
    query, key = query_M[:, None], key_N[None, :]
    seen = (key >= first_M[:, None]) & (key <= query)
    if PADDED:
        seen = seen & ((tl.load(keep + key, mask=key < T, other=0) != 0) | (key == query))
    return seen


@triton.jit
def _last_query(key, ends, T, window, DOCUMENTS: tl.constexpr):
    """The last query that sees each key; it never falls from one key to the next."""
    last = tl.minimum(key + window, T) - 1
    if DOCUMENTS:
        last = tl.minimum(last, tl.load(ends + tl.minimum(key, T - 1)))
    return last


@triton.jit
def _blocks(first, end, first_whole, end_whole, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """How many blocks of first to end there are, before the whole ones, and whole ones.

    From first_whole to end_whole everything is seen.
    """
    before, whole = 0, 0
    if SPLIT:
        before = tl.cdiv(tl.maximum(first_whole - first, 0), SIZE)
        whole = tl.maximum((end_whole - first) // SIZE - before, 0)
    return tl.cdiv(end - first, SIZE), before, whole


@triton.jit
def _nth(i, before, whole, WHOLE: tl.constexpr):
    """The block that is the i-th of the whole ones, or of the others."""
    if WHOLE:
        return before + i
    return i + tl.where(i < before, 0, whole)


@triton.jit
def forward_kernel(
    q, k, v, begins, keep, o, log_sum, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of a head: outputs, and the log of the summed weights."""
    blocks = tl.cdiv(T, M)
    start = tl.program_id(0) % blocks * M
    row, head = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    row, group = row.to(tl.int64), head // (H // G)
    q += row * q_row + head.to(tl.int64) * q_head
    k += row * k_row + group.to(tl.int64) * k_head
    v += row * v_row + group.to(tl.int64) * v_head
    begins += row * T
    keep += row * T
    query = start + tl.arange(0, M)
    q_ME = _tile(q, query, T, q_token, D, E)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o_ME = tl.zeros([M, E], tl.float32)
    unit = _unit(scale, CAP)
    first_M = _first_key(query, begins, T, window, DOCUMENTS)
    first = tl.min(first_M, 0) // N * N
    count, before, whole = _blocks(
        first, tl.minimum(start + M, T), tl.max(first_M, 0), start + 1, N, SPLIT
    )
    for WHOLE in tl.static_range(1 + SPLIT):
        for i in range(whole if WHOLE else count - whole):
            key = first + _nth(i, before, whole, WHOLE) * N + tl.arange(0, N)
            s_MN = _scores(q_ME, _tile(k, key, T, k_token, D, E), scale, CAP, PRECISION)
            if not WHOLE:
                seen_MN = _seen_keys(query, key, first_M, keep, T, PADDED)
                s_MN = tl.where(seen_MN, s_MN, float("-inf"))
            now = tl.maximum(highest, tl.max(s_MN, 1))
            finite = now
            if not WHOLE:  # a query may have seen nothing yet
                finite = tl.where(now == float("-inf"), 0.0, now)
            weight_MN = tl.exp2(s_MN * unit - (finite * unit)[:, None])
            faded = tl.exp2((highest - finite) * unit)
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
    tl.store(at, highest * (unit / LOG2E) + tl.log(total), mask=query < T)


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
    q, k, v, begins, keep, do, log_sum, delta, dq, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradient of M queries of a head."""
    blocks = tl.cdiv(T, M)
    start = tl.program_id(0) % blocks * M
    row, head = tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H
    row, group = row.to(tl.int64), head // (H // G)
    q += row * q_row + head.to(tl.int64) * q_head
    k += row * k_row + group.to(tl.int64) * k_head
    v += row * v_row + group.to(tl.int64) * v_head
    begins += row * T
    keep += row * T
    query = start + tl.arange(0, M)
    first_of_head = (row * T * H + head) * D
    q_ME = _tile(q, query, T, q_token, D, E)
    do_ME = _tile(do + first_of_head, query, T, H * D, D, E)
    of_head = (row * H + head) * T
    log_sum_M = tl.load(log_sum + of_head + query, mask=query < T, other=0.0) * LOG2E
    delta_M = tl.load(delta + of_head + query, mask=query < T, other=0.0)
    dq_ME = tl.zeros([M, E], tl.float32)
    unit = _unit(scale, CAP)
    first_M = _first_key(query, begins, T, window, DOCUMENTS)
    first = tl.min(first_M, 0) // N * N
    count, before, whole = _blocks(
        first, tl.minimum(start + M, T), tl.max(first_M, 0), start + 1, N, SPLIT
    )
    for WHOLE in tl.static_range(1 + SPLIT):
        for i in range(whole if WHOLE else count - whole):
            key = first + _nth(i, before, whole, WHOLE) * N + tl.arange(0, N)
            k_NE = _tile(k, key, T, k_token, D, E)
            s_MN = _scores(q_ME, k_NE, scale, CAP, PRECISION)
            weight_MN = tl.exp2(s_MN * unit - log_sum_M[:, None])
            if not WHOLE:
                seen_MN = _seen_keys(query, key, first_M, keep, T, PADDED)
                weight_MN = tl.where(seen_MN, weight_MN, 0.0)
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
    q, k, v, ends, keep, do, log_sum, delta, dk, dv, T, H, G, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    CAP: tl.constexpr, DOCUMENTS: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of a head, over all query heads that share them."""
    blocks = tl.cdiv(T, N)
    start = tl.program_id(0) % blocks * N
    row, group = tl.program_id(0) // blocks // G, tl.program_id(0) // blocks % G
    row, share = row.to(tl.int64), H // G
    q += row * q_row
    k += row * k_row + group.to(tl.int64) * k_head
    v += row * v_row + group.to(tl.int64) * v_head
    ends += row * T
    keep += row * T
    key = start + tl.arange(0, N)
    k_NE, v_NE = _tile(k, key, T, k_token, D, E), _tile(v, key, T, v_token, D, E)
    dk_NE = tl.zeros([N, E], tl.float32)
    dv_NE = tl.zeros([N, E], tl.float32)
    unit = _unit(scale, CAP)
    last_N = _last_query(key, ends, T, window, DOCUMENTS)
    first = start // M * M
    count, before, whole = _blocks(
        first, tl.max(last_N, 0) + 1, start + N - 1, tl.min(last_N, 0) + 1, M, SPLIT
    )
    if PADDED:
        last_N = tl.where(tl.load(keep + key, mask=key < T, other=0) != 0, last_N, key)
    for head in range(group * share, (group + 1) * share):
        of_head = (row * H + head) * T
        first_of_head = (row * T * H + head) * D
        for WHOLE in tl.static_range(1 + SPLIT):
            for i in range(whole if WHOLE else count - whole):
                query = first + _nth(i, before, whole, WHOLE) * M + tl.arange(0, M)
                q_ME = _tile(q + tl.cast(head, tl.int64) * q_head, query, T, q_token, D, E)
                do_ME = _tile(do + first_of_head, query, T, H * D, D, E)
                log_sum_M = tl.load(log_sum + of_head + query, mask=query < T, other=0.0) * LOG2E
                delta_M = tl.load(delta + of_head + query, mask=query < T, other=0.0)
                s_NM = _scores(k_NE, q_ME, scale, CAP, PRECISION)
                weight_NM = tl.exp2(s_NM * unit - log_sum_M[None, :])
                if not WHOLE:
                    seen_NM = (query[None, :] >= key[:, None]) & (query[None, :] <= last_N[:, None])
                    weight_NM = tl.where(seen_NM, weight_NM, 0.0)
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
