"""Gradients through what a chunk writes, once the gradients dS of the states after it are known.

With the letters of `prepare` and `scan`, dP from `read_gradient`, and dU complete::

    dZ = R^T dU                        of b (V - d K S)
    dV = b dZ
    dA = strictly_lower(dZ U^T) * L,   Y = d dZ S^T + dA K
    db = dZ . V - K . Y
    dK = -b Y  +  e U dS^T + dP^T Q - dA^T b K
         (reads)  (is read)

The decays' gradient is made as in `read_gradient`; what leaves the chunk adds to its last running
sum. Without the delta rule U is V, and dZ, dA and Y are not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.prepare import key_products
from ltconvert.kernels.chunkwise.read_gradient import finish
from ltconvert.kernels.chunkwise.tiles import (
    between,
    head_decays,
    level_factor,
    level_mask,
    save,
    sums_of,
    tile,
    written,
)


@triton.jit
def value_products(
    v_ptr, u_ptr, du_ptr, dv_ptr, inverse, beta, index, v_stride, rows, H, V,
    C: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dZ U^T [C, C] and dZ . V [C]; writes dV, and dZ over dU."""
    i = tl.arange(0, C)
    da = tl.zeros([C, C], tl.float32)
    dz_v = tl.zeros([C], tl.float32)
    for block in range(0, VP, BV):
        columns = block + tl.arange(0, BV)
        at = du_ptr + (index * C + i[:, None]) * VP + columns[None, :]
        dv = tl.load(at)
        if DELTA:
            u = written(u_ptr, v_ptr, v_stride, index, columns, rows, V, C, VP, DELTA)
            dz = tl.dot(inverse, dv, input_precision=PRECISION)
            v = tile(v_ptr, i, columns, v_stride, rows, V)
            dz_v += tl.sum(dz * v.to(tl.float32), axis=1)
            low = dz.to(u.dtype)
            da += tl.dot(low, tl.trans(u), input_precision=PRECISION)
            tl.store(at, low)
            dv = dz * beta[:, None]
        save(dv_ptr, dv, i, columns, H * V, rows, V)
    return da, dz_v


@triton.jit
def state_products(
    v_ptr, u_ptr, dz_ptr, state_ptr, dstate_ptr, index, channels, v_stride, rows, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dZ S^T and U dS^T [C, BK], S . dS [BK], summed over values."""
    i = tl.arange(0, C)
    y = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for block in range(0, VP, BV):
        columns = block + tl.arange(0, BV)
        u = written(u_ptr, v_ptr, v_stride, index, columns, rows, V, C, VP, DELTA)
        at = (index * KP + channels[None, :]) * VP + columns[:, None]
        dstate_t = tl.load(dstate_ptr + at)
        dk += tl.dot(u, dstate_t, input_precision=PRECISION)
        state_t = tl.load(state_ptr + at)
        kept += tl.sum(state_t.to(tl.float32) * dstate_t.to(tl.float32), axis=0)
        if DELTA:
            dz = tl.load(dz_ptr + (index * C + i[:, None]) * VP + columns[None, :])
            y += tl.dot(dz, state_t, input_precision=PRECISION)
    return y, dk, kept


@triton.jit
def level_products(
    q, k, dp_t, da, y, beta, k_factor, sums, channels,
    C: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """With a decay a channel: dP^T Q - dA^T b K [C, BK], and Y with dA K."""
    dk = tl.zeros([C, BK], tl.float32)
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = level_factor(sums, channels, KP, level, C)
        mask = level_mask(level, C)
        k_low = (k * factor).to(k.dtype)
        low = tl.where(tl.trans(mask), dp_t, 0.0).to(k.dtype)
        part = tl.dot(low, (q * factor).to(k.dtype), input_precision=PRECISION)
        da_level = tl.where(mask, da, 0.0)
        low = tl.trans((da_level * -(beta * k_factor)[:, None]).to(k.dtype))
        part += tl.dot(low, k_low, input_precision=PRECISION)
        dk += part * factor
        low = (da_level * k_factor[None, :]).to(k.dtype)
        y += tl.dot(low, k_low, input_precision=PRECISION) * factor
    return dk, y


@triton.jit(do_not_specialize=["T", "N"])
def write_gradient_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, counts_ptr, sum_ptr, k_factor_ptr,
    inverse_ptr, u_ptr, du_ptr, dp_ptr, state_ptr, dstate_ptr,
    dk_ptr, dv_ptr, dbeta_ptr, dsum_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK, dV, dbeta and, from the running sums' gradient, that of the log decays in its place."""
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
    at_h = token + i * H
    dv_ptr += token * V
    dk_ptr += token * K
    sums = sums_of(sum_ptr, index, C, KP, PER_CHANNEL)
    dtype = k_ptr.dtype.element_ty
    into, out, through = head_decays(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
    k_factor = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        k_factor = tl.load(k_factor_ptr + index * C + i)
    beta = k_factor
    inverse = 0.0
    if DELTA:
        beta = tl.load(beta_ptr + at_h, mask=i < rows, other=0.0)
        inverse = tl.load(inverse_ptr + (index * C + i[None, :]) * C + i[:, None])
    da, dz_v = value_products(
        v_ptr, u_ptr, du_ptr, dv_ptr, inverse, beta, index, v_stride_t, rows, H, V,
        C, BV, VP, DELTA, PRECISION,
    )  # fmt: skip
    if DELTA:
        tl.debug_barrier()  # dZ is read back below, by other threads
        da *= between(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
        da = tl.where(i[:, None] > i[None, :], da, 0.0)

    k_dot = tl.zeros([C], tl.float32)
    reads = tl.zeros([C], tl.float32)  # K . Y
    end_dot = tl.zeros([C], tl.float32)  # K . e U dS^T
    kept = tl.zeros([C], tl.float32)  # S . dS, in the last entry
    for block in tl.static_range(0, KP, BK):
        channels = block + tl.arange(0, BK)
        y, dk_end, kept_k = state_products(
            v_ptr, u_ptr, du_ptr, state_ptr, dstate_ptr, index, channels, v_stride_t, rows, V,
            C, BK, BV, KP, VP, DELTA, PRECISION,
        )  # fmt: skip
        y *= into[:, None]
        dk_end *= out[:, None]
        if PER_CHANNEL:
            here = tl.load(sums + i[:, None] * KP + channels[None, :])
            total = tl.load(sums + (C - 1) * KP + channels)
            y *= tl.exp(here.to(tl.float32))
            dk_end *= tl.exp((total[None, :] - here).to(tl.float32))
            kept_k *= tl.exp(total.to(tl.float32))
        k = tile(k_ptr, i, channels, k_stride_t, rows, K)
        k_hat = k.to(tl.float32) * k_factor[:, None]
        if not PER_CHANNEL:
            end_dot += tl.sum(k_hat * dk_end, axis=1)
            kept += tl.where(i == C - 1, tl.sum(kept_k, axis=0), 0.0)
        if DELTA and not PER_CHANNEL:
            reads += tl.sum(k_hat * y, axis=1)
        q = tile(q_ptr, i, channels, q_stride_t, rows, K)
        at_p = dp_ptr + (index * C + i[None, :]) * C + i[:, None]
        if PER_CHANNEL:
            # dP holds q's factor already; da takes those of beta and k with it.
            dp_t = tl.load(at_p)
            own = tl.sum(tl.where(i[:, None] == i[None, :], dp_t.to(tl.float32), 0.0), axis=1)
            dk, y = level_products(
                q, k, dp_t, da, y, beta, k_factor, sums, channels, C, BK, KP, LEVELS, PRECISION
            )
            dk += dk_end
            dk_row = y * -beta[:, None]
            reads += tl.sum(k_hat * y, axis=1)
            dsum = tile(dsum_ptr + token * K, i, channels, H * K, rows, K)
            dsum += k_hat * (dk_row - dk)
            leaving = tl.sum(k_hat * dk_end, axis=0) + kept_k * through
            dsum += tl.where(i[:, None] == C - 1, leaving[None, :], 0.0)
            ddecay = tl.cumsum(dsum, axis=0, reverse=True)
            save(dsum_ptr + token * K, ddecay, i, channels, H * K, rows, K)
            dk += dk_row + own[:, None] * q
        else:
            dk = dk_end + tl.dot(tl.load(at_p), q, input_precision=PRECISION)
            if DELTA:
                low = tl.trans((da * -(beta * k_factor)[:, None]).to(dtype))
                dk += tl.dot(low, k, input_precision=PRECISION)
                low = (da * k_factor[None, :]).to(dtype)
                y += tl.dot(low, k, input_precision=PRECISION)
                dk -= y * beta[:, None]
        k_dot += tl.sum(k_hat * dk, axis=1)
        if L2NORM and KP == BK:
            dk -= k_hat * k_dot[:, None]
        save(dk_ptr, dk * k_factor[:, None], i, channels, H * K, rows, K)

    returned = tl.zeros([C], tl.float32)
    if DELTA:
        if not PER_CHANNEL:
            products, _ = key_products(
                k_ptr, k_ptr, k_stride_t, k_stride_t, sums, rows, K,
                C, BK, KP, LEVELS, PER_CHANNEL, False, PRECISION,
            )  # fmt: skip
            pull = da * products * k_factor[:, None] * k_factor[None, :]
            reads += tl.sum(pull, axis=1)
            returned = tl.sum(pull * beta[:, None], axis=0)
        tl.store(dbeta_ptr + at_h, dz_v - reads, mask=i < rows)
    if not PER_CHANNEL:
        dsum = tl.load(dsum_ptr + at_h, mask=i < rows, other=0.0) + returned - end_dot
        if DELTA:
            dsum -= beta * reads
        dsum += tl.where(i == C - 1, tl.sum(end_dot, axis=0), 0.0) + kept * through
        tl.store(dsum_ptr + at_h, tl.cumsum(dsum, axis=0, reverse=True), mask=i < rows)
    if L2NORM and KP > BK:
        finish(k_ptr, dk_ptr, k_dot, k_factor, k_stride_t, H, rows, K, C, BK, KP)
