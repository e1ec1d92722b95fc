"""The recurrence from chunk to chunk, forwards for the states and backwards for their gradients.

One program walks all chunks of one head for a block of value columns; the state [K, BV] stays in
fp32 registers. With U, W from `prepare`, e the decay from a token to the chunk's end, c the decay
through the chunk, d that of the incoming state::

    forwards    U <- U - W S          S  <- c S + (e K)^T U
    backwards   dU <- dU + e K dS     dS <- c dS + (d Q)^T dO - W^T dU

Each state is written down before its chunk's step: S as it comes in, dS as it comes back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.tiles import head_decays, sums_of, tile, tile_t


@triton.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    k_ptr, v_ptr, counts_ptr, sum_ptr, k_factor_ptr, u_ptr, w_ptr,
    initial_ptr, final_ptr, state_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N,
    C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr,
    DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr, L2NORM: tl.constexpr,
    INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States at the start of every chunk, the final state, and U completed in place."""
    pid = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = VP // BV
    first, bh = (pid % blocks) * BV, pid // blocks
    b, h = bh // H, bh % H
    i, channels = tl.arange(0, C), tl.arange(0, KP)
    columns = first + tl.arange(0, BV)
    k_ptr += b * k_stride_b + h * k_stride_h
    v_ptr += b * v_stride_b + h * v_stride_h
    inside = (channels[:, None] < K) & (columns[None, :] < V)
    at = channels[:, None] * V + columns[None, :]
    state = tl.zeros([KP, BV], tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + bh * K * V + at, mask=inside, other=0.0).to(tl.float32)
    dtype = k_ptr.dtype.element_ty
    for chunk in range(0, N):
        index = bh * N + chunk
        rows = T - chunk * C
        low = state.to(dtype)
        tl.store(state_ptr + index * KP * VP + channels[:, None] * VP + columns[None, :], low)
        sums = sums_of(sum_ptr, index, C, KP, PER_CHANNEL)
        _, out, through = head_decays(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
        if L2NORM:
            out *= tl.load(k_factor_ptr + index * C + i)
        if DELTA:
            at_u = u_ptr + (index * C + i[:, None]) * VP + columns[None, :]
            w = tl.load(w_ptr + (index * C + i[:, None]) * KP + channels[None, :])
            u = tl.load(at_u).to(tl.float32) - tl.dot(w, low, input_precision=PRECISION)
            tl.store(at_u, u.to(dtype))
        else:
            u = tile(v_ptr, i, columns, v_stride_t, rows, V).to(tl.float32)
        k_t = tile_t(k_ptr, i, channels, k_stride_t, rows, K)
        if PER_CHANNEL:
            total = tl.load(sums + (C - 1) * KP + channels)
            gap = tl.load(sums + i[None, :] * KP + channels[:, None])
            k_t = (k_t * tl.exp((total[:, None] - gap).to(tl.float32))).to(dtype)
            state *= tl.exp(total.to(tl.float32))[:, None]
        write = (u * out[:, None]).to(dtype)
        state = state * through + tl.dot(k_t, write, input_precision=PRECISION)
        k_ptr += C * k_stride_t
        v_ptr += C * v_stride_t
    tl.store(final_ptr + bh * K * V + at, state, mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def reverse_scan_kernel(
    q_ptr, k_ptr, do_ptr, counts_ptr, sum_ptr, q_factor_ptr, k_factor_ptr, w_ptr, du_ptr,
    dfinal_ptr, dinitial_ptr, dstate_ptr,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    T, H, K, V, N, scale,
    C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr,
    DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr, L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after every chunk and of the initial one, and dU in place."""
    pid = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = VP // BV
    first, bh = (pid % blocks) * BV, pid // blocks
    b, h = bh // H, bh % H
    i, channels = tl.arange(0, C), tl.arange(0, KP)
    columns = first + tl.arange(0, BV)
    last = (N - 1).to(tl.int64) * C
    q_ptr += b * q_stride_b + h * q_stride_h + last * q_stride_t
    k_ptr += b * k_stride_b + h * k_stride_h + last * k_stride_t
    do_ptr += ((b * T + (N - 1) * C) * H + h) * V
    inside = (channels[:, None] < K) & (columns[None, :] < V)
    at = channels[:, None] * V + columns[None, :]
    dstate = tl.load(dfinal_ptr + bh * K * V + at, mask=inside, other=0.0).to(tl.float32)
    dtype = k_ptr.dtype.element_ty
    for step in range(0, N):
        chunk = N - 1 - step
        index = bh * N + chunk
        rows = T - chunk * C
        low = dstate.to(dtype)
        tl.store(dstate_ptr + index * KP * VP + channels[:, None] * VP + columns[None, :], low)
        sums = sums_of(sum_ptr, index, C, KP, PER_CHANNEL)
        into, out, through = head_decays(sums, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
        if L2NORM:
            into *= tl.load(q_factor_ptr + index * C + i)
            out *= tl.load(k_factor_ptr + index * C + i)
        else:
            into *= scale
        q_t = tile_t(q_ptr, i, channels, q_stride_t, rows, K)
        k = tile(k_ptr, i, channels, k_stride_t, rows, K)
        if PER_CHANNEL:
            total = tl.load(sums + (C - 1) * KP + channels)
            gap = tl.load(sums + i[:, None] * KP + channels[None, :])
            gap_t = tl.load(sums + i[None, :] * KP + channels[:, None])
            k = (k * tl.exp((total[None, :] - gap).to(tl.float32))).to(dtype)
            q_t = (q_t * tl.exp(gap_t.to(tl.float32))).to(dtype)
            dstate *= tl.exp(total.to(tl.float32))[:, None]
        at_du = du_ptr + (index * C + i[:, None]) * VP + columns[None, :]
        du = tl.load(at_du).to(tl.float32)
        du += tl.dot(k, low, input_precision=PRECISION) * out[:, None]
        tl.store(at_du, du.to(dtype))
        do = tile(do_ptr, i, columns, H * V, rows, V)
        read = (do * into[:, None]).to(dtype)
        dstate = dstate * through + tl.dot(q_t, read, input_precision=PRECISION)
        if DELTA:
            w_t = tl.load(w_ptr + (index * C + i[None, :]) * KP + channels[:, None])
            dstate -= tl.dot(w_t, du.to(dtype), input_precision=PRECISION)
        q_ptr -= C * q_stride_t
        k_ptr -= C * k_stride_t
        do_ptr -= C * H * V
    tl.store(dinitial_ptr + bh * K * V + at, dstate, mask=inside)
