"""Gradients of ``sparse_attention``: a program a tile of queries, then a program a tile of keys.

Both compute the weights again from the logs of their sums. Every number has one program that writes
it: no atomics, and the same bits on every run. With p the weights, dp = do . v and ``mean`` the
weighted mean of dp less the gradient of the log sum, ``ds = p (dp - mean)``. Letters as in
``kernels.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.sparse_attention.kernels import SIZES, capped, put, rows, seen


@triton.jit(do_not_specialize=SIZES)
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, mean_ptr, dq_ptr,
    first_ptr, bits_ptr, block_ptr, keep_ptr,
    count_ptr, order_ptr, scale, factor, cap, T, S, W, tiles, others, first_row, list_row,
    H: tl.constexpr, G: tl.constexpr, J: tl.constexpr, LISTS: tl.constexpr,
    FIRST: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries of one head."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles
    cell = (pid // tiles).to(tl.int64)
    row, head = cell // H, cell % H
    t_Q, n_N, d_D = tile * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, D)
    q_QD = rows(q_ptr + cell * T * D, t_Q, d_D, T, D)
    do_QD = rows(do_ptr + cell * T * D, t_Q, d_D, T, D)
    sum_Q = tl.load(sum_ptr + cell * T + t_Q, mask=t_Q < T, other=0.0)
    mean_Q = tl.load(mean_ptr + cell * T + t_Q, mask=t_Q < T, other=0.0)
    kv = (row * G + head // (H // G)) * S * D
    k_ptr += kv
    v_ptr += kv
    first_ptr += row * first_row
    bits_ptr += (row * J + head // (H // J)) * T * W
    block_ptr += row * S
    keep_ptr += row * S
    at = row * list_row + (head // (H // LISTS)) * tiles + tile
    count = tl.load(count_ptr + at)
    order_ptr += at * others

    dq_QD = tl.zeros([BQ, D], tl.float32)
    for index in range(0, count):
        s_N = tl.load(order_ptr + index) * BN + n_N
        k_ND = rows(k_ptr, s_N, d_D, S, D)
        v_ND = rows(v_ptr, s_N, d_D, S, D)
        s_QN, slope = capped(
            tl.dot(q_QD, tl.trans(k_ND), input_precision=PRECISION), factor, cap, CAPPED
        )
        see = seen(
            t_Q[:, None], s_N[None, :], first_ptr, bits_ptr, block_ptr, keep_ptr, T, S, W,
            FIRST, BITS, BLOCKS, KEEP, CAUSAL,
        )  # fmt: skip
        p_QN = tl.where(see, tl.exp2(s_QN - sum_Q[:, None]), 0.0)
        dp_QN = tl.dot(do_QD, tl.trans(v_ND), input_precision=PRECISION)
        ds_QN = p_QN * (dp_QN - mean_Q[:, None]) * slope
        dq_QD = tl.dot(ds_QN.to(k_ND.dtype), k_ND, dq_QD, input_precision=PRECISION)
    put(dq_ptr + cell * T * D, dq_QD * scale, t_Q, d_D, T, D)


@triton.jit(do_not_specialize=SIZES)
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr, mean_ptr, dk_ptr, dv_ptr,
    first_ptr, bits_ptr, block_ptr, keep_ptr,
    count_ptr, order_ptr, scale, factor, cap, T, S, W, tiles, others, first_row, list_row,
    H: tl.constexpr, G: tl.constexpr, J: tl.constexpr, LISTS: tl.constexpr,
    FIRST: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over all query heads that read them; tiles are of keys here."""
    pid = tl.program_id(0)
    tile = pid % tiles
    cell = (pid // tiles).to(tl.int64)
    row, group = cell // G, cell % G
    s_N, q_Q, d_D = tile * BN + tl.arange(0, BN), tl.arange(0, BQ), tl.arange(0, D)
    k_ND = rows(k_ptr + cell * S * D, s_N, d_D, S, D)
    v_ND = rows(v_ptr + cell * S * D, s_N, d_D, S, D)
    first_ptr += row * first_row
    block_ptr += row * S
    keep_ptr += row * S
    bits_ptr += row * J * T * W

    dk_ND = tl.zeros([BN, D], tl.float32)
    dv_ND = tl.zeros([BN, D], tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        here = (row * H + head) * T
        chosen_ptr = bits_ptr + (head // (H // J)) * T * W
        at = row * list_row + (head // (H // LISTS)) * tiles + tile
        count = tl.load(count_ptr + at)
        for index in range(0, count):
            t_Q = tl.load(order_ptr + at * others + index) * BQ + q_Q
            q_QD = rows(q_ptr + here * D, t_Q, d_D, T, D)
            do_QD = rows(do_ptr + here * D, t_Q, d_D, T, D)
            sum_Q = tl.load(sum_ptr + here + t_Q, mask=t_Q < T, other=0.0)
            mean_Q = tl.load(mean_ptr + here + t_Q, mask=t_Q < T, other=0.0)
            s_NQ, slope = capped(
                tl.dot(k_ND, tl.trans(q_QD), input_precision=PRECISION), factor, cap, CAPPED
            )
            see = seen(
                t_Q[None, :], s_N[:, None], first_ptr, chosen_ptr, block_ptr, keep_ptr, T, S, W,
                FIRST, BITS, BLOCKS, KEEP, CAUSAL,
            )  # fmt: skip
            p_NQ = tl.where(see, tl.exp2(s_NQ - sum_Q[None, :]), 0.0)
            dv_ND = tl.dot(p_NQ.to(do_QD.dtype), do_QD, dv_ND, input_precision=PRECISION)
            dp_NQ = tl.dot(v_ND, tl.trans(do_QD), input_precision=PRECISION)
            ds_NQ = p_NQ * (dp_NQ - mean_Q[None, :]) * slope
            dk_ND = tl.dot(ds_NQ.to(q_QD.dtype), q_QD, dk_ND, input_precision=PRECISION)
    put(dk_ptr + cell * S * D, dk_ND * scale, s_N, d_D, S, D)
    put(dv_ptr + cell * S * D, dv_ND, s_N, d_D, S, D)
