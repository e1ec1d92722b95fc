"""Triton kernels of ``index_kl``: sums of weights, then where the distributions differ.

Both distributions are known once their sums are; their difference, the gradient of the index
scores, is written for a chunk of queries at a time. Only tiles of keys in which a query of a tile
sees anything are visited: lists say which (``sparse_attention.tiles``). Logs and exponentials are
of 2.

Q queries of a tile, N keys of a tile, D channels of attention, E of the indexer. Everything is
contiguous: q [B, H, T, D], k [B, G, S, D], index q [B, T, I, E] and k [B, S, E], weight [B, T, I],
lists [B or 1, tiles, other tiles]. Filled up to whole tiles: head sums [B, H, T], index sums
[B, T], differences [B, queries of the chunk, S].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.index_topk.kernels import scored
from ltconvert.kernels.sparse_attention.kernels import LOWEST, capped, rows, seen

LOG2E = tl.constexpr(1.4426950408889634)
# A new length alone compiles nothing.
SIZES = ("T", "S", "W", "start", "tiles", "others", "filled", "first_row", "list_row")


@triton.jit
def visible(
    t, s, first_ptr, bits_ptr, keep_ptr, T, S, W,
    FIRST: tl.constexpr, BITS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``seen`` of keys in causal order, each a block of its own."""
    return seen(
        t, s, first_ptr, bits_ptr, first_ptr, keep_ptr, T, S, W, FIRST, BITS, False, KEEP, True
    )


@triton.jit
def added(top_Q, sum_Q, score_QN, see_QN):
    """Greatest score so far, and the sum of weights relative to it, with more keys."""
    score_QN = tl.where(see_QN, score_QN, float("-inf"))
    new_Q = tl.maximum(top_Q, tl.max(score_QN, axis=1))
    sum_Q = sum_Q * tl.exp2(top_Q - new_Q) + tl.sum(tl.exp2(score_QN - new_Q[:, None]), axis=1)
    return new_Q, sum_Q


@triton.jit
def log_sum(top_Q, sum_Q):
    """Log of the sum; of none, whose weights are all masked, any finite number."""
    return top_Q + tl.log2(tl.where(sum_Q > 0, sum_Q, 1.0))


@triton.jit(do_not_specialize=SIZES)
def head_sum_kernel(
    q_ptr, k_ptr, sum_ptr, first_ptr, bits_ptr, keep_ptr, count_ptr, order_ptr, factor, cap,
    T, S, W, tiles, others, first_row, list_row,
    H: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr, KEEP: tl.constexpr,
    CAPPED: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Logs of the summed weights of a tile of queries in one attention head."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles  # those with the most keys begin first
    cell = (pid // tiles).to(tl.int64)
    row, head = cell // H, cell % H
    t_Q, n_N, d_D = tile * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, D)
    q_QD = rows(q_ptr + cell * T * D, t_Q, d_D, T, D)
    k_ptr += (row * G + head // (H // G)) * S * D
    first_ptr += row * first_row
    bits_ptr += row * T * W
    keep_ptr += row * S
    at = row * list_row + tile
    count = tl.load(count_ptr + at)
    order_ptr += at * others

    top_Q = tl.full([BQ], LOWEST, tl.float32)
    sum_Q = tl.zeros([BQ], tl.float32)
    for index in range(0, count):
        s_N = tl.load(order_ptr + index) * BN + n_N
        k_ND = rows(k_ptr, s_N, d_D, S, D)
        product_QN = tl.dot(q_QD, tl.trans(k_ND), input_precision=PRECISION)
        score_QN, _ = capped(product_QN, factor, cap, CAPPED)
        see_QN = visible(
            t_Q[:, None], s_N[None, :], first_ptr, bits_ptr, keep_ptr, T, S, W, FIRST, BITS, KEEP
        )
        top_Q, sum_Q = added(top_Q, sum_Q, score_QN, see_QN)
    tl.store(sum_ptr + cell * tiles * BQ + t_Q, log_sum(top_Q, sum_Q))


@triton.jit(do_not_specialize=SIZES)
def index_sum_kernel(
    q_ptr, k_ptr, weight_ptr, sum_ptr, first_ptr, bits_ptr, keep_ptr, count_ptr, order_ptr,
    T, S, W, tiles, others, first_row, list_row,
    HEADS: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr, KEEP: tl.constexpr,
    E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logs of the summed weights of a tile of queries under the index scores."""
    pid = tl.program_id(0)
    tile, row = tiles - 1 - pid % tiles, (pid // tiles).to(tl.int64)
    t_Q, n_N, e_E = tile * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, E)
    q_ptr += row * T * HEADS * E
    k_ptr += row * S * E
    weight_ptr += row * T * HEADS
    first_ptr += row * first_row
    bits_ptr += row * T * W
    keep_ptr += row * S
    at = row * list_row + tile
    count = tl.load(count_ptr + at)
    order_ptr += at * others

    top_Q = tl.full([BQ], LOWEST, tl.float32)
    sum_Q = tl.zeros([BQ], tl.float32)
    for index in range(0, count):
        s_N = tl.load(order_ptr + index) * BN + n_N
        k_NE = rows(k_ptr, s_N, e_E, S, E)
        score_QN = scored(q_ptr, k_NE, weight_ptr, t_Q, T, HEADS, E, BQ, BN, PRECISION)
        see_QN = visible(
            t_Q[:, None], s_N[None, :], first_ptr, bits_ptr, keep_ptr, T, S, W, FIRST, BITS, KEEP
        )
        top_Q, sum_Q = added(top_Q, sum_Q, score_QN * LOG2E, see_QN)
    tl.store(sum_ptr + row * tiles * BQ + t_Q, log_sum(top_Q, sum_Q))


@triton.jit(do_not_specialize=SIZES)
def difference_kernel(
    q_ptr, k_ptr, index_q_ptr, index_k_ptr, weight_ptr, head_sum_ptr, index_sum_ptr,
    difference_ptr, loss_ptr, first_ptr, bits_ptr, keep_ptr, count_ptr, order_ptr, factor, cap,
    T, S, W, start, tiles, others, filled, first_row, list_row,
    H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr,
    KEEP: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(index score) - p of a tile of queries and one of keys, and their part of the loss.

    Tile ``start`` is the first of the chunk, ``filled`` the length of the sums. Queries that are
    padding have 0.
    """
    pid = tl.program_id(0)
    index, tile, row = pid % others, pid // others % tiles, (pid // others // tiles).to(tl.int64)
    at = row * list_row + start + tile
    if index >= tl.load(count_ptr + at):
        return
    q_Q, d_D, e_E = tl.arange(0, BQ), tl.arange(0, D), tl.arange(0, E)
    t_Q = (start + tile) * BQ + q_Q
    s_N = tl.load(order_ptr + at * others + index) * BN + tl.arange(0, BN)
    see_QN = visible(
        t_Q[:, None], s_N[None, :], first_ptr + row * first_row, bits_ptr + row * T * W,
        keep_ptr + row * S, T, S, W, FIRST, BITS, KEEP,
    )  # fmt: skip

    p_QN = tl.zeros([BQ, BN], tl.float32)
    for head in range(H):
        q_QD = rows(q_ptr + (row * H + head) * T * D, t_Q, d_D, T, D)
        k_ND = rows(k_ptr + (row * G + head // (H // G)) * S * D, s_N, d_D, S, D)
        sum_Q = tl.load(head_sum_ptr + (row * H + head) * filled + t_Q)
        product_QN = tl.dot(q_QD, tl.trans(k_ND), input_precision=PRECISION)
        score_QN, _ = capped(product_QN, factor, cap, CAPPED)
        p_QN += tl.exp2(tl.where(see_QN, score_QN - sum_Q[:, None], float("-inf")))
    p_QN *= 1.0 / H

    k_NE = rows(index_k_ptr + row * S * E, s_N, e_E, S, E)
    index_q_ptr += row * T * HEADS * E
    weight_ptr += row * T * HEADS
    score_QN = scored(index_q_ptr, k_NE, weight_ptr, t_Q, T, HEADS, E, BQ, BN, PRECISION)
    sum_Q = tl.load(index_sum_ptr + row * filled + t_Q)
    log_QN = score_QN * LOG2E - sum_Q[:, None]
    real_Q = t_Q < T
    if KEEP:
        real_Q = tl.load(keep_ptr + row * S + S - T + t_Q, mask=real_Q, other=0) != 0
    counts_QN = see_QN & real_Q[:, None]
    some_QN = counts_QN & (p_QN > 0)
    terms_QN = p_QN * (tl.log2(tl.where(some_QN, p_QN, 1.0)) - log_QN)
    loss = tl.sum(tl.sum(tl.where(some_QN, terms_QN, 0.0), axis=1), axis=0) / LOG2E
    tl.store(loss_ptr + pid, loss)
    difference_QN = tl.where(counts_QN, tl.exp2(log_QN) - p_QN, 0.0)
    at_Q = (row * tiles + tile) * BQ + q_Q
    tl.store(difference_ptr + at_Q[:, None] * (others * BN) + s_N[None, :], difference_QN)
