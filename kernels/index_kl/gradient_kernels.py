"""Gradients of ``index_kl`` by the indexer, from the gradient of the index scores of a chunk.

A program a tile of queries and index head, then a program a tile of keys: every number has one
program that writes it, so that there are no atomics and the same bits on every run. Products are
computed again. Letters as in ``kernels.py``; gradients are fp32, not divided by the queries yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.index_kl.kernels import SIZES
from ltconvert.kernels.index_topk.kernels import head_rows, head_weights
from ltconvert.kernels.sparse_attention.kernels import put, rows


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    q_ptr, k_ptr, weight_ptr, difference_ptr, dq_ptr, dweight_ptr, count_ptr, order_ptr,
    T, S, start, tiles, others, list_row,
    HEADS: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dweight of a tile of queries of one index head."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles
    row, head = (pid // tiles // HEADS).to(tl.int64), pid // tiles % HEADS
    q_Q, n_N, e_E = tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, E)
    t_Q = (start + tile) * BQ + q_Q
    q_QE = head_rows(q_ptr + row * T * HEADS * E, t_Q, head, T, HEADS, E)
    weight_Q = head_weights(weight_ptr + row * T * HEADS, t_Q, head, T, HEADS)
    k_ptr += row * S * E
    difference_Q1 = difference_ptr + ((row * tiles + tile) * BQ + q_Q)[:, None] * (others * BN)
    at = row * list_row + start + tile
    count = tl.load(count_ptr + at)
    order_ptr += at * others

    dq_QE = tl.zeros([BQ, E], tl.float32)
    dweight_Q = tl.zeros([BQ], tl.float32)
    for index in range(0, count):
        s_N = tl.load(order_ptr + index) * BN + n_N
        k_NE = rows(k_ptr, s_N, e_E, S, E)
        difference_QN = tl.load(difference_Q1 + s_N[None, :])
        product_QN = tl.dot(q_QE, tl.trans(k_NE), input_precision=PRECISION)
        difference_QN = tl.where(product_QN > 0, difference_QN, 0.0)
        dweight_Q += tl.sum(product_QN * difference_QN, axis=1)
        dproduct_QN = (difference_QN * weight_Q[:, None]).to(k_NE.dtype)
        dq_QE = tl.dot(dproduct_QN, k_NE, dq_QE, input_precision=PRECISION)
    at_Q = (row * T + t_Q) * HEADS + head
    tl.store(dq_ptr + at_Q[:, None] * E + e_E[None, :], dq_QE, mask=(t_Q < T)[:, None])
    tl.store(dweight_ptr + at_Q, dweight_Q, mask=t_Q < T)


@triton.jit(do_not_specialize=SIZES)
def key_kernel(
    q_ptr, k_ptr, weight_ptr, difference_ptr, dk_ptr, count_ptr, order_ptr,
    T, S, start, tiles, others, list_row,
    HEADS: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add this chunk's part of dk of a tile of keys; tiles are of keys here, others of queries."""
    pid = tl.program_id(0)
    tile, row = pid % tiles, (pid // tiles).to(tl.int64)
    q_Q, s_N, e_E = tl.arange(0, BQ), tile * BN + tl.arange(0, BN), tl.arange(0, E)
    k_NE = rows(k_ptr + row * S * E, s_N, e_E, S, E)
    q_ptr += row * T * HEADS * E
    weight_ptr += row * T * HEADS
    difference_ptr += row * others * BQ * tiles * BN
    at = row * list_row + tile
    count = tl.load(count_ptr + at)
    order_ptr += at * others

    dk_NE = rows(dk_ptr + row * S * E, s_N, e_E, S, E)
    for visit in range(0, count * HEADS):
        head, other = visit % HEADS, tl.load(order_ptr + visit // HEADS)
        t_Q = (start + other) * BQ + q_Q
        q_QE = head_rows(q_ptr, t_Q, head, T, HEADS, E)
        weight_Q = head_weights(weight_ptr, t_Q, head, T, HEADS)
        at_Q = (other.to(tl.int64) * BQ + q_Q) * (tiles * BN)
        difference_NQ = tl.load(difference_ptr + at_Q[None, :] + s_N[:, None])
        product_NQ = tl.dot(k_NE, tl.trans(q_QE), input_precision=PRECISION)
        dproduct_NQ = difference_NQ * weight_Q[None, :]
        dproduct_NQ = tl.where(product_NQ > 0, dproduct_NQ, 0.0).to(q_QE.dtype)
        dk_NE = tl.dot(dproduct_NQ, q_QE, dk_NE, input_precision=PRECISION)
    put(dk_ptr + row * S * E, dk_NE, s_N, e_E, S, E)
