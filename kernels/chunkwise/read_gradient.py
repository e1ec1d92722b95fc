"""Gradients through what a chunk reads; they need no gradient of a state.

With the letters of `output`, and dO the gradient of the outputs::

    dU = (Q K^T * L)^T dO              the part from the chunk's own outputs
    dP = lower(dO U^T) * L
    dQ = d dO S^T + dP K
    dG = rows - columns of dP * Q K^T, and Q . (d dO S^T)

A running sum G_i multiplies, through exp, all that row i reads, and divides all that later rows
read of it. Sums over one fp32 matrix keep rows and columns equal to the last digit; per channel the
products are taken elementwise instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.prepare import key_products
from ltconvert.kernels.chunkwise.tiles import (
    NORM_EPS,
    between,
    head_decays,
    level_factor,
    level_mask,
    save,
    sums_of,
    tile,
    written,
)


@triton.jit(do_not_specialize=["T", "N"])
def read_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, counts_ptr, sum_ptr, q_factor_ptr, k_factor_ptr, u_ptr, state_ptr,
    du_ptr, dp_ptr, dq_ptr, dsum_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale / |q|, dQ, the chunk's own dU, dP times q's factor, and the reads' part of dG."""
    index = tl.program_id(0).to(tl.int64)
    chunk, bh = index % N, index // N
    b, h = bh // H, bh % H
    start = chunk * C
    rows = T - start
    i = tl.arange(0, C)
    q_ptr += b * q_stride_b + start * q_stride_t + h * q_stride_h
    k_ptr += b * k_stride_b + start * k_stride_t + h * k_stride_h
    v_ptr += b * v_stride_b + start * v_stride_t + h * v_stride_h
    token = (b * T + start) * H + h
    do_ptr += token * V
    dq_ptr += token * K
    sums = sums_of(sum_ptr, index, C, KP, PER_CHANNEL)
    dtype = q_ptr.dtype.element_ty
    into, _, _ = head_decays(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
    decay = between(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)

    scores, squares = key_products(
        q_ptr, k_ptr, q_stride_t, k_stride_t, sums, rows, K,
        C, BK, KP, LEVELS, PER_CHANNEL, True, PRECISION,
    )  # fmt: skip
    q_factor = tl.full([C], scale, tl.float32)
    k_factor = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        q_factor *= tl.rsqrt(squares + NORM_EPS)
        tl.store(q_factor_ptr + index * C + i, q_factor)
        k_factor = tl.load(k_factor_ptr + index * C + i)
    scores *= q_factor[:, None] * k_factor[None, :]
    scores_t = tl.trans((scores * decay).to(dtype))
    dp = tl.zeros([C, C], tl.float32)
    for block in range(0, VP, BV):
        columns = block + tl.arange(0, BV)
        do = tile(do_ptr, i, columns, H * V, rows, V)
        u = written(u_ptr, v_ptr, v_stride_t, index, columns, rows, V, C, VP, DELTA)
        dp += tl.dot(do, tl.trans(u), input_precision=PRECISION)
        du = tl.dot(scores_t, do, input_precision=PRECISION)
        save(du_ptr + index * C * VP, du, i, columns, VP, C, VP)
    dp *= decay
    save(dp_ptr + index * C * C, dp * q_factor[:, None], i, i, C, C, C)
    if not PER_CHANNEL:
        pull = dp * scores
        dsum = tl.sum(pull, axis=1) - tl.sum(pull, axis=0)

    q_dot = tl.zeros([C], tl.float32)
    for block in tl.static_range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        dq = tl.zeros([C, BK], tl.float32)
        for v_block in range(0, VP, BV):
            columns = v_block + tl.arange(0, BV)
            do = tile(do_ptr, i, columns, H * V, rows, V)
            at = (index * KP + channels[None, :]) * VP + columns[:, None]
            dq += tl.dot(do, tl.load(state_ptr + at), input_precision=PRECISION)
        dq *= into[:, None]
        q = tile(q_ptr, i, channels, q_stride_t, rows, K).to(tl.float32) * q_factor[:, None]
        k = tile(k_ptr, i, channels, k_stride_t, rows, K)
        if not PER_CHANNEL:
            dsum += tl.sum(q * dq, axis=1)
        if PER_CHANNEL:
            here = tl.load(sums + i[:, None] * KP + channels[None, :])
            dq *= tl.exp(here.to(tl.float32))
            for level in tl.range(0, LEVELS, num_stages=1):
                factor = level_factor(sums, channels, KP, level, C)
                low = tl.where(level_mask(level, C), dp * k_factor[None, :], 0.0).to(dtype)
                part = tl.dot(low, (k * factor).to(dtype), input_precision=PRECISION)
                dq += part * factor
            save(dsum_ptr + token * K, q * dq, i, channels, H * K, rows, K)
            # The diagonal does not decay: in dG it would leave its rounding alone.
            own = tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), axis=1)
            dq += (own * k_factor)[:, None] * k
        else:
            dq += tl.dot((dp * k_factor[None, :]).to(dtype), k, input_precision=PRECISION)
        q_dot += tl.sum(q * dq, axis=1)
        if L2NORM and KP == BK:  # the inner product is whole: finish here
            dq -= q * (q_dot / (scale * scale))[:, None]
        save(dq_ptr, dq * q_factor[:, None], i, channels, H * K, rows, K)
    if not PER_CHANNEL:
        tl.store(dsum_ptr + token + i * H, dsum, mask=i < rows)
    if L2NORM and KP > BK:
        finish(q_ptr, dq_ptr, q_dot / (scale * scale), q_factor, q_stride_t, H, rows, K, C, BK, KP)


@triton.jit
def finish(
    x_ptr, dx_ptr, dot, factor, stride, H, rows, K,
    C: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """dx - x factor^2 dot: the gradient without what a normalised x cannot feel.

    For keys of several blocks of channels, whose inner products had to wait for the last.
    """
    tl.debug_barrier()  # what other threads wrote is read back
    i = tl.arange(0, C)
    for block in tl.static_range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        x = tile(x_ptr, i, channels, stride, rows, K).to(tl.float32)
        dx = tile(dx_ptr, i, channels, H * K, rows, K).to(tl.float32)
        dx -= x * (factor * factor * dot)[:, None]
        save(dx_ptr, dx, i, channels, H * K, rows, K)
