"""Reading the states: outputs of a chunk, and the part of dU that its own outputs give.

With d the decay of the incoming state S, L the decays between the chunk's tokens::

    O = d Q S + (Q K^T * L) U          dU = (Q K^T * L)^T dO
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.prepare import key_products
from ltconvert.kernels.chunkwise.scan import sums_of
from ltconvert.kernels.chunkwise.tiles import (
    CHANNEL, NORM_EPS, between, head_decays, level_factor, level_mask, save, tile, tile_t,
    transposed,
)  # fmt: skip


@triton.jit
def output_kernel(
    q_ptr, k_ptr, v_ptr, counts_ptr, sum_ptr, length_ptr, u_ptr, state_ptr, o_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one chunk for a block of value columns."""
    pid = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = VP // BV
    first, index = (pid % blocks) * BV, pid // blocks
    chunk, bh = index % N, index // N
    b, h = bh // H, bh % H
    start = chunk * C
    rows = T - start
    i = tl.arange(0, C)
    columns = first + tl.arange(0, BV)
    q_ptr += b * q_stride_b + start * q_stride_t + h * q_stride_h
    k_ptr += b * k_stride_b + start * k_stride_t + h * k_stride_h
    sums = sums_of(sum_ptr, index, C, KP, DECAY)
    dtype = q_ptr.dtype.element_ty
    scores, squares = key_products(
        q_ptr, k_ptr, q_stride_t, k_stride_t, sums, rows, K,
        C, BK, KP, LEVELS, DECAY, True, PRECISION,
    )  # fmt: skip
    read = tl.zeros([C, BV], tl.float32)
    for block in range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        q = tile(q_ptr, i, channels, q_stride_t, rows, K)
        if DECAY == CHANNEL:
            gap = tl.load(sums + i[:, None] * KP + channels[None, :])
            q = (q * tl.exp(gap)).to(dtype)
        state = tl.load(
            state_ptr + (index * KP + channels[:, None]) * VP + columns[None, :]
        )
        read += tl.dot(q, state, input_precision=PRECISION)
    scores *= between(sums, counts_ptr, b, chunk, T, C, DECAY, SEGMENTS)
    into, _, _ = head_decays(sums, counts_ptr, b, chunk, T, C, DECAY, SEGMENTS)
    factor = tl.full([C], scale, tl.float32)
    if L2NORM:
        scores *= tl.load(length_ptr + index * C + i)[None, :]
        factor *= tl.rsqrt(squares + NORM_EPS)
    if DELTA:
        u = tl.load(u_ptr + (index * C + i[:, None]) * VP + columns[None, :])
    else:
        v_ptr += b * v_stride_b + start * v_stride_t + h * v_stride_h
        u = tile(v_ptr, i, columns, v_stride_t, rows, V)
    o = read * into[:, None] + tl.dot(scores.to(dtype), u, input_precision=PRECISION)
    o_ptr += ((b * T + start) * H + h) * V
    save(o_ptr, o * factor[:, None], i, columns, H * V, rows, V)


@triton.jit
def local_gradient_kernel(
    q_ptr, k_ptr, do_ptr, counts_ptr, sum_ptr, q_length_ptr, length_ptr, du_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's own part of dU, and 1 / |q|."""
    index = tl.program_id(0).to(tl.int64)
    chunk, bh = index % N, index // N
    b, h = bh // H, bh % H
    start = chunk * C
    rows = T - start
    i = tl.arange(0, C)
    q_ptr += b * q_stride_b + start * q_stride_t + h * q_stride_h
    k_ptr += b * k_stride_b + start * k_stride_t + h * k_stride_h
    do_ptr += ((b * T + start) * H + h) * V
    sums = sums_of(sum_ptr, index, C, KP, DECAY)
    dtype = q_ptr.dtype.element_ty
    scores_t = tl.zeros([C, C], tl.float32)  # [k, q]
    squares = tl.zeros([C], tl.float32)
    for block in range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        q = tile(q_ptr, i, channels, q_stride_t, rows, K)
        k = tile(k_ptr, i, channels, k_stride_t, rows, K)
        squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
        if DECAY == CHANNEL:
            own = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
            scores_t += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
            for level in tl.static_range(0, LEVELS):
                factor = level_factor(sums, channels, KP, level, C)
                reader_t = tl.trans((q * factor).to(dtype))
                product = tl.dot((k * factor).to(dtype), reader_t, input_precision=PRECISION)
                scores_t += tl.where(tl.trans(level_mask(level, C)), product, 0.0)
        else:
            q_t = tile_t(q_ptr, i, channels, q_stride_t, rows, K)
            scores_t += tl.dot(k, q_t, input_precision=PRECISION)
    scores_t *= transposed(sums, counts_ptr, b, chunk, T, C, DECAY, SEGMENTS) * scale
    if L2NORM:
        length = tl.rsqrt(squares + NORM_EPS)
        tl.store(q_length_ptr + index * C + i, length)
        scores_t *= tl.load(length_ptr + index * C + i)[:, None] * length[None, :]
    low = scores_t.to(dtype)
    for block in range(0, VP, BV):
        columns = block + tl.arange(0, BV)
        do = tile(do_ptr, i, columns, H * V, rows, V)
        du = tl.dot(low, do, input_precision=PRECISION)
        save(du_ptr + index * C * VP, du, i, columns, VP, C, VP)
