"""Reading the states: the outputs of a chunk.

With d the decay of the incoming state S, L the decays between the chunk's tokens::

    O = d Q S + (Q K^T * L) U
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.prepare import key_products
from ltconvert.kernels.chunkwise.tiles import (
    NORM_EPS,
    between,
    head_decays,
    save,
    sums_of,
    tile,
    written,
)


@triton.jit(do_not_specialize=["T", "N"])
def output_kernel(
    q_ptr, k_ptr, v_ptr, counts_ptr, sum_ptr, k_factor_ptr, u_ptr, state_ptr, o_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
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
    sums = sums_of(sum_ptr, index, C, KP, PER_CHANNEL)
    dtype = q_ptr.dtype.element_ty
    scores, squares = key_products(
        q_ptr, k_ptr, q_stride_t, k_stride_t, sums, rows, K,
        C, BK, KP, LEVELS, PER_CHANNEL, True, PRECISION,
    )  # fmt: skip
    read = tl.zeros([C, BV], tl.float32)
    for block in tl.static_range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        q = tile(q_ptr, i, channels, q_stride_t, rows, K)
        if PER_CHANNEL:
            gap = tl.load(sums + i[:, None] * KP + channels[None, :])
            q = (q * tl.exp(gap.to(tl.float32))).to(dtype)
        state = tl.load(state_ptr + (index * KP + channels[:, None]) * VP + columns[None, :])
        read += tl.dot(q, state, input_precision=PRECISION)
    scores *= between(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
    into, _, _ = head_decays(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
    factor = tl.full([C], scale, tl.float32)
    if L2NORM:
        scores *= tl.load(k_factor_ptr + index * C + i)[None, :]
        factor *= tl.rsqrt(squares + NORM_EPS)
    v_ptr += b * v_stride_b + start * v_stride_t + h * v_stride_h
    u = written(u_ptr, v_ptr, v_stride_t, index, columns, rows, V, C, VP, DELTA)
    # Scaled before they are rounded: q . k may be beyond fp16 where the outputs are not.
    scores *= factor[:, None]
    o = read * (into * factor)[:, None] + tl.dot(scores.to(dtype), u, input_precision=PRECISION)
    o_ptr += ((b * T + start) * H + h) * V
    save(o_ptr, o, i, columns, H * V, rows, V)
