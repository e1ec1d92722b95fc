"""Triton kernels of ``index_topk``: scores of tiles of queries and keys, and the choice of a query.

Products of all heads are added up in registers, so that nothing but the scores is written. The
choice finds the least score that is chosen bit by bit; it keeps a query's scores in registers, or
where they are too many reads them once a bit.
Q queries of a tile, N keys of a tile, E channels; everything is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_rows(q_ptr, t_Q, head, end, HEADS: tl.constexpr, E: tl.constexpr):
    """Queries t of one index head [Q, E], zeros from ``end`` on; the pointer is that of the row."""
    at_Q, e_E = t_Q.to(tl.int64) * HEADS + head, tl.arange(0, E)
    return tl.load(q_ptr + at_Q[:, None] * E + e_E[None, :], mask=(t_Q < end)[:, None], other=0.0)


@triton.jit
def head_weights(weight_ptr, t_Q, head, end, HEADS: tl.constexpr):
    """Weights [Q] of one index head, likewise."""
    at_Q = t_Q.to(tl.int64) * HEADS + head
    return tl.load(weight_ptr + at_Q, mask=t_Q < end, other=0.0).to(tl.float32)


@triton.jit
def scored(
    q_ptr, k_NE, weight_ptr, t_Q, end, HEADS: tl.constexpr, E: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of queries t before ``end`` of one row, whose pointers these are, fp32 [Q, N]."""
    score_QN = tl.zeros([BQ, BN], tl.float32)
    for head in range(HEADS):
        q_QE = head_rows(q_ptr, t_Q, head, end, HEADS, E)
        weight_Q = head_weights(weight_ptr, t_Q, head, end, HEADS)
        product_QN = tl.dot(q_QE, tl.trans(k_NE), input_precision=PRECISION)
        score_QN += tl.maximum(product_QN, 0.0) * weight_Q[:, None]
    return score_QN


@triton.jit(do_not_specialize=["T", "S", "first", "past", "keys", "tiles_q", "tiles_k"])
def score_kernel(
    q_ptr, k_ptr, weight_ptr, score_ptr, T, S, first, past, keys, tiles_q, tiles_k,
    HEADS: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [B, past - first, keys] of queries ``first`` to before ``past``, fp32."""
    pid = tl.program_id(0)
    tile_k, tile_q = pid % tiles_k, (pid // tiles_k) % tiles_q
    row = (pid // tiles_k // tiles_q).to(tl.int64)
    t_Q = first + tile_q * BQ + tl.arange(0, BQ)
    s_N, e_E = tile_k * BN + tl.arange(0, BN), tl.arange(0, E)
    k_NE = tl.load(
        k_ptr + (row * S + s_N)[:, None] * E + e_E[None, :], mask=(s_N < keys)[:, None], other=0.0
    )
    score_QN = scored(
        q_ptr + row * T * HEADS * E, k_NE, weight_ptr + row * T * HEADS, t_Q, past,
        HEADS, E, BQ, BN, PRECISION,
    )  # fmt: skip
    at_Q = row * (past - first) + t_Q - first
    at_QN = at_Q[:, None] * keys + s_N[None, :]
    tl.store(score_ptr + at_QN, score_QN, mask=(t_Q < past)[:, None] & (s_N < keys)[None, :])


@triton.jit
def ordered(
    score_ptr, first_ptr, keep_ptr, s, column, keys, FIRST: tl.constexpr, KEEP: tl.constexpr
):
    """Whether the query of a column sees keys s, and integers in the order of their scores.

    Pointers are those of the query (keep: of the row). What is not seen comes last.
    """
    seen = (s <= column) & (s < keys)
    if FIRST:
        seen = seen & (s >= tl.load(first_ptr))
    if KEEP:
        kept = tl.load(keep_ptr + s, mask=s < keys, other=0) != 0
        seen = seen & (kept | (s == column))
    score = tl.load(score_ptr + s, mask=seen, other=0.0)
    score = tl.where(score != 0, score, 0.0)  # -0.0 is 0.0
    order = score.to(tl.int32, bitcast=True)
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    return seen, tl.where(seen, order, -2147483648)


@triton.jit(do_not_specialize=["T", "S", "W", "first", "past", "keys", "count", "first_row"])
def choose_kernel(
    score_ptr, first_ptr, keep_ptr, bits_ptr, T, S, W, first, past, keys, count, first_row,
    FIRST: tl.constexpr, KEEP: tl.constexpr, WORDS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Bits of the ``count`` keys of highest score of one query; WORDS times 32 hold all keys.

    PLACES: bits of the number of a key.
    """
    pid = tl.program_id(0)
    row, t = (pid // (past - first)).to(tl.int64), first + pid % (past - first)
    w_W, b_B = tl.arange(0, WORDS), tl.arange(0, 32)
    s = w_W[:, None] * 32 + b_B[None, :]
    score_ptr += (row * (past - first) + t - first) * keys
    first_ptr += row * first_row + t
    keep_ptr += row * S
    seen, order = ordered(score_ptr, first_ptr, keep_ptr, s, S - T + t, keys, FIRST, KEEP)

    lowest = tl.full([], -2147483648, tl.int32)
    least = tl.where(_number(order >= 0) >= count, 0, lowest)
    for step in range(0, 31):
        candidate = least + (1 << (30 - step))
        least = tl.where(_number(order >= candidate) >= count, candidate, least)
    # Of those that are equal to the least as many as there is room for, from the last one on.
    room = count - _number(order > least)
    place = tl.full([], 0, tl.int32)
    for step in range(0, PLACES):
        candidate = place + (1 << (PLACES - 1 - step))
        enough = _number((order == least) & (s >= candidate)) >= room
        place = tl.where(enough, candidate, place)
    chosen = seen & ((order > least) | ((order == least) & (s >= place)))
    words_W = tl.sum(chosen.to(tl.int32) << b_B[None, :], axis=1)
    tl.store(bits_ptr + (row * T + t) * W + w_W, words_W, mask=w_W < tl.cdiv(keys, 32))


@triton.jit
def _number(mask):
    """How many of [W, 32] are true."""
    return tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["T", "S", "W", "first", "past", "keys", "count", "first_row"])
def choose_many_kernel(
    score_ptr, first_ptr, keep_ptr, bits_ptr, T, S, W, first, past, keys, count, first_row,
    FIRST: tl.constexpr, KEEP: tl.constexpr, WORDS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The same for any number of keys, WORDS times 32 of them at a time."""
    pid = tl.program_id(0)
    row, t = (pid // (past - first)).to(tl.int64), first + pid % (past - first)
    w_W, b_B = tl.arange(0, WORDS), tl.arange(0, 32)
    score_ptr += (row * (past - first) + t - first) * keys
    first_ptr += row * first_row + t
    keep_ptr += row * S
    column = S - T + t

    # Score and place of the last one chosen.
    place = tl.full([], 0, tl.int32)
    least = tl.full([], -2147483648, tl.int32)
    number = _number_from(
        0, place, score_ptr, first_ptr, keep_ptr, column, keys, FIRST, KEEP, WORDS
    )
    least = tl.where(number >= count, 0, least)
    for step in range(0, 31):
        candidate = least + (1 << (30 - step))
        number = _number_from(
            candidate, place, score_ptr, first_ptr, keep_ptr, column, keys, FIRST, KEEP, WORDS
        )
        least = tl.where(number >= count, candidate, least)
    for step in range(0, PLACES):
        candidate = place + (1 << (PLACES - 1 - step))
        number = _number_from(
            least, candidate, score_ptr, first_ptr, keep_ptr, column, keys, FIRST, KEEP, WORDS
        )
        place = tl.where(number >= count, candidate, place)
    for start in range(0, keys, WORDS * 32):
        s = start + w_W[:, None] * 32 + b_B[None, :]
        seen, order = ordered(score_ptr, first_ptr, keep_ptr, s, column, keys, FIRST, KEEP)
        chosen = seen & _from(order, s, least, place)
        words_W = tl.sum(chosen.to(tl.int32) << b_B[None, :], axis=1)
        at_W = start // 32 + w_W
        tl.store(bits_ptr + (row * T + t) * W + at_W, words_W, mask=at_W < tl.cdiv(keys, 32))


@triton.jit
def _from(order, s, least, place):
    """Whether keys come at or after the one of that order and place."""
    return (order > least) | ((order == least) & (s >= place))


@triton.jit
def _number_from(
    least, place, score_ptr, first_ptr, keep_ptr, column, keys,
    FIRST: tl.constexpr, KEEP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """How many keys do."""
    number = tl.zeros([WORDS, 32], tl.int32)  # threads wait for each other at the end alone
    for start in range(0, keys, WORDS * 32):
        s = start + tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        _, order = ordered(score_ptr, first_ptr, keep_ptr, s, column, keys, FIRST, KEEP)
        number += _from(order, s, least, place).to(tl.int32)
    return tl.sum(tl.sum(number, axis=1), axis=0)
