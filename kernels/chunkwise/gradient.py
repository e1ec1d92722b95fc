"""Gradients of one chunk's inputs, once its states and their gradients are known.

With the letters of `prepare`, `scan` and `output`, and X * Y elementwise::

    dZ = R^T dU                      of b (V - d K S)
    dV = b dZ                        db = dZ . V - K . Y,   Y = d dZ S^T + (dA * L) K
    dA = strictly_lower(dZ U^T),     dP = lower(dO U^T)
    dQ = d dO S^T + (dP * L) K
    dK = -b Y  +  e U dS^T + (dP * L)^T Q - (dA * L)^T b K
         (reads)  (is read)

A running sum G_i multiplies, through exp, all that row i reads, and divides all that later rows
read of it: dG = Q . dQ + K . dK(reads) - K . dK(is read), with what leaves the chunk added to its
last. Per channel the products are taken elementwise instead of summed. Without the delta rule U is
V, and dZ, dA and Y are not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.scan import sums_of
from ltconvert.kernels.chunkwise.tiles import (
    CHANNEL, HEAD, between, head_decays, level_factor, level_mask, save, tile,
)  # fmt: skip


@triton.jit
def corrected(
    inverse, du_ptr, index, columns,
    C: tl.constexpr, VP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dZ of a block of columns, [C, BV]; ``inverse`` is R transposed."""
    i = tl.arange(0, C)
    du = tl.load(du_ptr + (index * C + i[:, None]) * VP + columns[None, :])
    return tl.dot(inverse, du, input_precision=PRECISION)


@triton.jit
def written(
    u_ptr, v_ptr, v_stride, index, columns, rows, V,
    C: tl.constexpr, VP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """U of a block of columns, [C, BV]."""
    i = tl.arange(0, C)
    if DELTA:
        u = tl.load(u_ptr + (index * C + i[:, None]) * VP + columns[None, :])
    else:
        u = tile(v_ptr, i, columns, v_stride, rows, V)
    return u


@triton.jit
def gradient_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, do_ptr, counts_ptr, sum_ptr, q_length_ptr, length_ptr,
    inverse_ptr, u_ptr, du_ptr, state_ptr, dstate_ptr,
    dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, ddecay_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dV, dbeta and the gradient of the log decays of one chunk."""
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
    at_k, at_h = token * K, token + i * H
    do_ptr += token * V
    dv_ptr += token * V
    dq_ptr += at_k
    dk_ptr += at_k
    sums = sums_of(sum_ptr, index, C, KP, DECAY)
    dtype = q_ptr.dtype.element_ty
    into, out, through = head_decays(sums, counts_ptr, b, chunk, T, C, DECAY, SEGMENTS)
    q_length = tl.full([C], 1.0, tl.float32)
    length = q_length
    if L2NORM:
        q_length = tl.load(q_length_ptr + index * C + i)
        length = tl.load(length_ptr + index * C + i)
    q_length *= scale

    # Products over the values.
    dp = tl.zeros([C, C], tl.float32)
    da = tl.zeros([C, C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    beta = tl.zeros([C], tl.float32)
    if DELTA:
        beta = tl.load(beta_ptr + at_h, mask=i < rows, other=0.0)
        inverse = tl.load(inverse_ptr + (index * C + i[None, :]) * C + i[:, None])
    for block in range(0, VP, BV):
        columns = block + tl.arange(0, BV)
        do = tile(do_ptr, i, columns, H * V, rows, V)
        u = written(u_ptr, v_ptr, v_stride_t, index, columns, rows, V, C, VP, DELTA)
        u_t = tl.trans(u)
        dp += tl.dot(do, u_t, input_precision=PRECISION)
        if DELTA:
            dz = corrected(inverse, du_ptr, index, columns, C, VP, PRECISION)
            v = tile(v_ptr, i, columns, v_stride_t, rows, V).to(tl.float32)
            dbeta += tl.sum(dz * v, axis=1)
            save(dv_ptr, dz * beta[:, None], i, columns, H * V, rows, V)
            da += tl.dot(dz.to(dtype), u_t, input_precision=PRECISION)
        else:
            dv = tl.load(du_ptr + (index * C + i[:, None]) * VP + columns[None, :])
            save(dv_ptr, dv, i, columns, H * V, rows, V)
    decay = between(sums, counts_ptr, b, chunk, T, C, DECAY, SEGMENTS)
    dp *= decay
    da = tl.where(i[:, None] > i[None, :], da * decay, 0.0)

    # Gradients of queries and keys, a block of channels at a time. Lengths of q and k and the
    # scale are kept in the small matrices' rows and columns.
    q_dot = tl.zeros([C], tl.float32)
    row_dot = tl.zeros([C], tl.float32)
    column_dot = tl.zeros([C], tl.float32)
    end_dot = tl.zeros([C], tl.float32)
    kept = tl.zeros([1], tl.float32)
    for block in range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        q = tile(q_ptr, i, channels, q_stride_t, rows, K)
        k = tile(k_ptr, i, channels, k_stride_t, rows, K)
        dq = tl.zeros([C, BK], tl.float32)
        y = tl.zeros([C, BK], tl.float32)
        dk_end = tl.zeros([C, BK], tl.float32)
        kept_k = tl.zeros([BK], tl.float32)
        for v_block in range(0, VP, BV):
            columns = v_block + tl.arange(0, BV)
            do = tile(do_ptr, i, columns, H * V, rows, V)
            at = (index * KP + channels[None, :]) * VP + columns[:, None]
            state_t, dstate_t = tl.load(state_ptr + at), tl.load(dstate_ptr + at)
            dq += tl.dot(do, state_t, input_precision=PRECISION)
            u = written(u_ptr, v_ptr, v_stride_t, index, columns, rows, V, C, VP, DELTA)
            dk_end += tl.dot(u, dstate_t, input_precision=PRECISION)
            if DELTA:
                dz = corrected(inverse, du_ptr, index, columns, C, VP, PRECISION)
                y += tl.dot(dz.to(dtype), state_t, input_precision=PRECISION)
            kept_k += tl.sum(state_t.to(tl.float32) * dstate_t.to(tl.float32), axis=0)
        dq *= into[:, None]
        y *= into[:, None]
        dk_end *= out[:, None]
        if DECAY == CHANNEL:
            here = tl.load(sums + i[:, None] * KP + channels[None, :])
            total = tl.load(sums + (C - 1) * KP + channels)
            grown = tl.exp(here)
            dq *= grown
            y *= grown
            dk_end *= tl.exp(total[None, :] - here)
            kept_k *= tl.exp(total)
        dk_column = tl.zeros([C, BK], tl.float32)
        for level in tl.static_range(0, LEVELS if DECAY == CHANNEL else 1):
            if DECAY == CHANNEL:
                factor = level_factor(sums, channels, KP, level, C)
                mask = level_mask(level, C)
                q_read, k_read = (q * factor).to(dtype), (k * factor).to(dtype)
                dp_level, da_level = tl.where(mask, dp, 0.0), tl.where(mask, da, 0.0)
            else:
                q_read, k_read = q, k
                dp_level, da_level = dp, da
            dp_low = (dp_level * length[None, :]).to(dtype)
            dp_t = tl.trans((dp_level * q_length[:, None]).to(dtype))
            dq_part = tl.dot(dp_low, k_read, input_precision=PRECISION)
            column_part = tl.dot(dp_t, q_read, input_precision=PRECISION)
            if DELTA:
                da_low = (da_level * length[None, :]).to(dtype)
                da_t = tl.trans((da_level * -(beta * length)[:, None]).to(dtype))
                y_part = tl.dot(da_low, k_read, input_precision=PRECISION)
                column_part += tl.dot(da_t, k_read, input_precision=PRECISION)
                y += y_part * factor if DECAY == CHANNEL else y_part
            if DECAY == CHANNEL:
                dq += dq_part * factor
                dk_column += column_part * factor
            else:
                dq += dq_part
                dk_column += column_part
        if DECAY == CHANNEL:
            own = tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), axis=1)
            dq += (own * length)[:, None] * k
            dk_column += (own * q_length)[:, None] * q
        q_hat = q.to(tl.float32) * q_length[:, None]
        k_hat = k.to(tl.float32) * length[:, None]
        dk_row = y * -beta[:, None]
        dbeta -= tl.sum(k_hat * y, axis=1)
        dk_column += dk_end
        if DECAY == CHANNEL:
            dsum = q_hat * dq + k_hat * (dk_row - dk_column)
            leaving = tl.sum(k_hat * dk_end, axis=0) + kept_k * through
            dsum += tl.where(i[:, None] == C - 1, leaving[None, :], 0.0)
            ddecay = tl.cumsum(dsum, axis=0, reverse=True)
            save(ddecay_ptr + at_k, ddecay, i, channels, H * K, rows, K)
        q_dot += tl.sum(q_hat * dq, axis=1)
        row_dot += tl.sum(k_hat * dk_row, axis=1)
        column_dot += tl.sum(k_hat * dk_column, axis=1)
        end_dot += tl.sum(k_hat * dk_end, axis=1)
        kept += tl.sum(kept_k, axis=0)
        dk = dk_row + dk_column
        if L2NORM and KP == BK:  # the dot products are whole: finish here
            dq -= q_hat * (q_dot / (scale * scale))[:, None]
            dk -= k_hat * (row_dot + column_dot)[:, None]
        save(dq_ptr, dq * q_length[:, None], i, channels, H * K, rows, K)
        save(dk_ptr, dk * length[:, None], i, channels, H * K, rows, K)
    if DELTA:
        tl.store(dbeta_ptr + at_h, dbeta, mask=i < rows)
    if DECAY == HEAD:
        dsum = q_dot + row_dot - column_dot
        leaving = tl.sum(end_dot, axis=0) + tl.sum(kept, axis=0) * through
        dsum += tl.where(i == C - 1, leaving, 0.0)
        tl.store(ddecay_ptr + at_h, tl.cumsum(dsum, axis=0, reverse=True), mask=i < rows)
    if L2NORM and KP > BK:
        tl.debug_barrier()  # what other threads wrote above is read back
        for block in range(0, KP, BK):
            channels = block + tl.arange(0, BK)
            q = tile(q_ptr, i, channels, q_stride_t, rows, K).to(tl.float32)
            k = tile(k_ptr, i, channels, k_stride_t, rows, K).to(tl.float32)
            dq = tile(dq_ptr, i, channels, H * K, rows, K).to(tl.float32)
            dk = tile(dk_ptr, i, channels, H * K, rows, K).to(tl.float32)
            dq -= q * (q_length * q_length * q_dot / (scale * scale))[:, None]
            dk -= k * (length * length * (row_dot + column_dot))[:, None]
            save(dq_ptr, dq, i, channels, H * K, rows, K)
            save(dk_ptr, dk, i, channels, H * K, rows, K)
