"""Triton kernel of ``sparse_attention``: tiles of queries against the tiles of keys they meet.

What a query sees inside of a tile is read from its bits. Tiles in which no query of a tile sees
anything are not visited: lists say which are (``tiles.py``). Exponentials are of 2.

Q queries of a tile, N keys of a tile, D channels. Everything is contiguous: q [B, H, T, D],
k and v [B, G, S, D], bits [B, J, T, W], lists [B or 1, J or 1, tiles, other tiles].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh

# Below every score, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(-1e38)
# A new length alone compiles nothing.
SIZES = ("T", "S", "W", "tiles", "others", "first_row", "list_row")


@triton.jit
def seen(
    t, s, first_ptr, bits_ptr, block_ptr, keep_ptr, T, S, W,
    FIRST: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Whether query t sees key s, of one axis each, [.., 1] and [1, ..] or the other way round.

    Pointers are those of the row (bits: of the row and choice).
    """
    inside = (t < T) & (s < S)
    allowed = inside
    if BITS:
        number = s
        if BLOCKS:
            number = tl.load(block_ptr + s, mask=s < S, other=-1)
        at = tl.maximum(number, 0)
        word = tl.load(bits_ptr + t.to(tl.int64) * W + (at // 32), mask=inside, other=0)
        allowed = inside & (((word >> (at % 32)) & 1) != 0) & (number >= 0)
    if FIRST:
        first = tl.load(first_ptr + t, mask=t < T, other=0)
        near = inside & (s >= first)
        allowed = (allowed | near) if BITS else near
    if CAUSAL:
        allowed = allowed & (s <= S - T + t)
    if KEEP:
        kept = tl.load(keep_ptr + s, mask=s < S, other=0) != 0
        allowed = allowed & (kept | (s == S - T + t))
    return allowed


@triton.jit
def rows(ptr, n_N, d_D, end, D: tl.constexpr):
    """Rows n [N, D] of one head, less than 2^31 numbers, zeros past their end."""
    at = n_N[:, None] * D + d_D[None, :]
    return tl.load(ptr + at, mask=(n_N < end)[:, None], other=0.0)


@triton.jit
def put(ptr, value, n_N, d_D, end, D: tl.constexpr):
    """Store rows n [N, D]."""
    at = n_N[:, None] * D + d_D[None, :]
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=(n_N < end)[:, None])


@triton.jit
def capped(product, factor, cap, CAPPED: tl.constexpr):
    """(scores times log2(e), derivative of the soft cap) of products; factor and cap hold it."""
    score = product * factor
    slope = 1.0
    if CAPPED:
        share = tanh(score)
        score = share * cap
        slope = 1 - share * share
    return score, slope


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, sum_ptr, first_ptr, bits_ptr, block_ptr, keep_ptr,
    count_ptr, order_ptr, factor, cap, T, S, W, tiles, others, first_row, list_row,
    H: tl.constexpr, G: tl.constexpr, J: tl.constexpr, LISTS: tl.constexpr,
    FIRST: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head: outputs, and the logs of their summed weights."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles  # those with the most keys begin first
    cell = (pid // tiles).to(tl.int64)
    row, head = cell // H, cell % H
    t_Q, n_N, d_D = tile * BQ + tl.arange(0, BQ), tl.arange(0, BN), tl.arange(0, D)
    q_QD = rows(q_ptr + cell * T * D, t_Q, d_D, T, D)
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

    m_Q = tl.full([BQ], LOWEST, tl.float32)
    l_Q = tl.zeros([BQ], tl.float32)
    o_QD = tl.zeros([BQ, D], tl.float32)
    for index in range(0, count):
        s_N = tl.load(order_ptr + index) * BN + n_N
        k_ND = rows(k_ptr, s_N, d_D, S, D)
        v_ND = rows(v_ptr, s_N, d_D, S, D)
        s_QN, _ = capped(
            tl.dot(q_QD, tl.trans(k_ND), input_precision=PRECISION), factor, cap, CAPPED
        )
        see = seen(
            t_Q[:, None], s_N[None, :], first_ptr, bits_ptr, block_ptr, keep_ptr, T, S, W,
            FIRST, BITS, BLOCKS, KEEP, CAUSAL,
        )  # fmt: skip
        s_QN = tl.where(see, s_QN, float("-inf"))
        top_Q = tl.maximum(m_Q, tl.max(s_QN, axis=1))
        shrink_Q, p_QN = tl.exp2(m_Q - top_Q), tl.exp2(s_QN - top_Q[:, None])
        m_Q, l_Q = top_Q, l_Q * shrink_Q + tl.sum(p_QN, axis=1)
        o_QD = tl.dot(
            p_QN.to(v_ND.dtype), v_ND, o_QD * shrink_Q[:, None], input_precision=PRECISION
        )

    some_Q = l_Q > 0
    l_Q = tl.where(some_Q, l_Q, 1.0)
    put(o_ptr + cell * T * D, o_QD / l_Q[:, None], t_Q, d_D, T, D)
    log_sum_Q = tl.where(some_Q, (m_Q + tl.log2(l_Q)) * 0.6931471805599453, float("-inf"))
    tl.store(sum_ptr + cell * T + t_Q, log_sum_Q, mask=t_Q < T)
