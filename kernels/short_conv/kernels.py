"""Triton kernels of ``short_conv``: a program walks along tokens and reads every row once.

The rows that taps look back to stay in registers as a tuple of vectors, a fixed number of rows a
step, so that nothing is read again but the few rows before a program's first.

D channels of a program, W taps, PAST = W - 1, R rows a step, STEPS steps of a program.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row(row_ptr, history_ptr, keep_ptr, t, d_D, length, channels, PAST: tl.constexpr):
    """Inputs of token t in fp32, those of the history where t < 0; zero where there is nothing."""
    inside = (t >= 0) & (t < length)
    mask_D = d_D < tl.where(inside, channels, 0)
    x_D = tl.load(row_ptr + d_D, mask=mask_D, other=0.0).to(tl.float32)
    if keep_ptr is not None:
        x_D = tl.where(tl.load(keep_ptr + t, mask=inside, other=0) != 0, x_D, 0.0)
    if history_ptr is not None:
        mask_D = d_D < tl.where((t < 0) & (t >= -PAST), channels, 0)
        past_D = tl.load(history_ptr + d_D * PAST + (t + PAST), mask=mask_D, other=0.0)
        x_D += past_D.to(row_ptr.dtype.element_ty).to(tl.float32)
    return x_D


@triton.jit
def _count(counts_ptr, t, length):
    """Segment count of token t; 0 before the row."""
    return tl.load(counts_ptr + t, mask=(t >= 0) & (t < length), other=0)


@triton.jit(do_not_specialize=["length"])
def forward_kernel(
    x_ptr, taps_ptr, history_ptr, counts_ptr, keep_ptr, y_ptr, last_ptr,
    length, channels, x_row, x_token,
    W: tl.constexpr, SILU: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """y [B, T, channels] and the new history [B, channels, PAST], both contiguous."""
    PAST: tl.constexpr = W - 1
    blocks, walks = tl.cdiv(channels, D), tl.cdiv(length, R * STEPS)
    pid = tl.program_id(0)
    d_D = (pid % blocks) * D + tl.arange(0, D)
    start = (pid // blocks % walks) * (R * STEPS)
    b = (pid // (blocks * walks)).to(tl.int64)
    x_ptr += b * x_row
    y_ptr += b * length * channels
    if history_ptr is not None:
        history_ptr += b * channels * PAST
    if counts_ptr is not None:
        counts_ptr += b * length
    if keep_ptr is not None:
        keep_ptr += b * length
    inside_D = d_D < channels

    taps = ()
    for tap in tl.static_range(W):
        tap_D = tl.load(taps_ptr + tap * channels + d_D, mask=inside_D, other=0.0)
        taps = taps + (tap_D.to(tl.float32),)
    window = ()
    for p in tl.static_range(PAST):
        t = start - PAST + p
        row_ptr = x_ptr + t.to(tl.int64) * x_token
        x_D = _row(row_ptr, history_ptr, keep_ptr, t, d_D, length, channels, PAST)
        window = window + (x_D,)
    for step in range(STEPS):
        first = start + step * R
        step_ptr = x_ptr + first.to(tl.int64) * x_token
        out_ptr = y_ptr + first.to(tl.int64) * channels
        rows = window
        for r in tl.static_range(R):
            row_ptr = step_ptr + r * x_token
            x_D = _row(row_ptr, None, keep_ptr, first + r, d_D, length, channels, PAST)
            rows = rows + (x_D,)
        counts = ()
        if counts_ptr is not None:
            for r in tl.static_range(R + PAST):
                counts = counts + (_count(counts_ptr, first - PAST + r, length),)
        for r in tl.static_range(R):
            y_D = rows[r + PAST] * taps[PAST]
            for tap in tl.static_range(PAST):
                x_D = rows[r + tap]
                if counts_ptr is not None:
                    x_D = tl.where(counts[r + tap] == counts[r + PAST], x_D, 0.0)
                y_D += x_D * taps[tap]
            if SILU:
                y_D = y_D / (1 + tl.exp(-y_D))
            mask_D = d_D < tl.where(first + r < length, channels, 0)
            y_D = y_D.to(y_ptr.dtype.element_ty)
            tl.store(out_ptr + r * channels + d_D, y_D, mask=mask_D)
        window = rows[R:]

    if start + R * STEPS >= length:
        last_ptr += b * channels * PAST
        for p in tl.static_range(PAST):
            t = length - PAST + p
            row_ptr = x_ptr + t.to(tl.int64) * x_token
            x_D = _row(row_ptr, history_ptr, keep_ptr, t, d_D, length, channels, PAST)
            if counts_ptr is not None:
                same = _count(counts_ptr, t, length) == _count(counts_ptr, length - 1, length)
                x_D = tl.where(same, x_D, 0.0)
            tl.store(last_ptr + d_D * PAST + p, x_D.to(last_ptr.dtype.element_ty), mask=inside_D)


@triton.jit(do_not_specialize=["length"])
def backward_kernel(
    dy_ptr, dlast_ptr, x_ptr, taps_ptr, history_ptr, counts_ptr, keep_ptr,
    dx_ptr, dhistory_ptr, partial_ptr, length, channels, x_row, x_token,
    W: tl.constexpr, SILU: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients of x and the history, and each program's part of that of the taps [W, channels].

    With g the gradient before the activation, source row s gets ``sum_j taps[PAST - j] g_{s+j}``:
    known once the walk is at token s + PAST. A walk begins PAST tokens into the last one.
    """
    PAST: tl.constexpr = W - 1
    OWN: tl.constexpr = R * STEPS - PAST  # source rows that a program finishes
    blocks, walks = tl.cdiv(channels, D), tl.cdiv(length + PAST, OWN)
    pid = tl.program_id(0)
    d_D = (pid % blocks) * D + tl.arange(0, D)
    start = (pid // blocks % walks) * OWN - PAST
    b = (pid // (blocks * walks)).to(tl.int64)
    x_ptr += b * x_row
    dy_ptr += b * length * channels
    dx_ptr += b * length * channels
    if history_ptr is not None:
        history_ptr += b * channels * PAST
        dhistory_ptr += b * channels * PAST
    if dlast_ptr is not None:
        dlast_ptr += b * channels * PAST
    if counts_ptr is not None:
        counts_ptr += b * length
        final = _count(counts_ptr, length - 1, length)
    if keep_ptr is not None:
        keep_ptr += b * length
    inside_D = d_D < channels

    taps, dtaps, window, upstream = (), (), (), ()
    for tap in tl.static_range(W):
        tap_D = tl.load(taps_ptr + tap * channels + d_D, mask=inside_D, other=0.0)
        taps = taps + (tap_D.to(tl.float32),)
        dtaps = dtaps + (tl.zeros([D], tl.float32),)
    for p in tl.static_range(PAST):
        t = start - PAST + p
        row_ptr = x_ptr + t.to(tl.int64) * x_token
        x_D = _row(row_ptr, history_ptr, keep_ptr, t, d_D, length, channels, PAST)
        window = window + (x_D,)
        upstream = upstream + (tl.zeros([D], tl.float32),)
    for step in range(STEPS):
        first = start + step * R
        step_ptr = x_ptr + first.to(tl.int64) * x_token
        at = first.to(tl.int64) * channels
        rows, grads = window, upstream
        for r in tl.static_range(R):
            row_ptr = step_ptr + r * x_token
            x_D = _row(row_ptr, history_ptr, keep_ptr, first + r, d_D, length, channels, PAST)
            rows = rows + (x_D,)
        counts = ()
        if counts_ptr is not None:
            for r in tl.static_range(R + PAST):
                counts = counts + (_count(counts_ptr, first - PAST + r, length),)
        for r in tl.static_range(R):
            row_ptr = dy_ptr + at + r * channels
            g_D = _row(row_ptr, None, None, first + r, d_D, length, channels, PAST)
            if SILU:
                y_D = rows[r + PAST] * taps[PAST]
                for tap in tl.static_range(PAST):
                    x_D = rows[r + tap]
                    if counts_ptr is not None:
                        x_D = tl.where(counts[r + tap] == counts[r + PAST], x_D, 0.0)
                    y_D += x_D * taps[tap]
                open_D = tl.sigmoid(y_D)
                g_D *= open_D * (1 + y_D * (1 - open_D))
            grads = grads + (g_D,)
        for r in tl.static_range(R):
            s = first + r - PAST
            dx_D = tl.zeros([D], tl.float32)
            for tap in tl.static_range(W):
                g_D = grads[r + PAST - tap]
                if counts_ptr is not None:
                    g_D = tl.where(counts[r + PAST - tap] == counts[r], g_D, 0.0)
                dx_D += g_D * taps[tap]
            if dlast_ptr is not None:
                late = s - (length - PAST)  # which column of the new history
                mask_D = d_D < tl.where((late >= 0) & (late < PAST), channels, 0)
                last_D = tl.load(dlast_ptr + d_D * PAST + late, mask=mask_D, other=0.0)
                last_D = last_D.to(tl.float32)
                if counts_ptr is not None:
                    last_D = tl.where(counts[r] == final, last_D, 0.0)
                dx_D += last_D
            if history_ptr is not None:
                mask_D = d_D < tl.where((s < 0) & (s >= start), channels, 0)
                dpast_D = dx_D.to(dhistory_ptr.dtype.element_ty)
                tl.store(dhistory_ptr + d_D * PAST + (s + PAST), dpast_D, mask=mask_D)
            inside = (s >= 0) & (s >= start) & (s < length)
            if keep_ptr is not None:
                dx_D = tl.where(tl.load(keep_ptr + s, mask=inside, other=0) != 0, dx_D, 0.0)
            mask_D = d_D < tl.where(inside, channels, 0)
            dx_D = dx_D.to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + at + (r - PAST) * channels + d_D, dx_D, mask=mask_D)
        added = ()
        for tap in tl.static_range(W):
            dtap_D = dtaps[tap]
            for r in tl.static_range(R):
                g_D = grads[r + PAST - tap]
                if counts_ptr is not None:
                    g_D = tl.where(counts[r + PAST - tap] == counts[r], g_D, 0.0)
                dtap_D += g_D * tl.where(first + r - PAST >= start, rows[r], 0.0)
            added = added + (dtap_D,)
        dtaps = added
        window, upstream = rows[R:], grads[R:]

    partial_ptr += (pid // blocks).to(tl.int64) * W * channels
    for tap in tl.static_range(W):
        tl.store(partial_ptr + tap * channels + d_D, dtaps[tap], mask=inside_D)
