"""First step of every chunkwise op: what a chunk needs that no other chunk has a say in.

Running sums of the log decays, inverse lengths of keys, and for the delta rule the UT transform
(arXiv 2406.06484, section 3): with b = beta, K the keys, L the decays between tokens, d those of
the incoming state S::

    A = strictly_lower(b K K^T * L),  R = (I + A)^-1,  U = R b V,  W = R b d K

so that the corrections that a chunk writes are U - W S.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.chunkwise.tiles import (
    LEAST_CHANNEL,
    LEAST_HEAD,
    NORM_EPS,
    between,
    head_decays,
    invert,
    level_factor,
    level_mask,
    save,
    sums_of,
    tile,
    tile_t,
)


@triton.jit
def sum_decays(
    decay_ptr, sum_ptr, b, h, T, H, K, start,
    C: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Write the chunk's running sums: fp64 [C] a head, or [C, KP] a channel."""
    i = tl.arange(0, C)
    if not PER_CHANNEL:
        decay_ptr += (b * T + start) * H + h
        g = tl.load(decay_ptr + i * H, mask=start + i < T, other=0.0)
        g = tl.maximum(g.to(tl.float64), LEAST_HEAD)
        tl.store(sum_ptr + i, tl.cumsum(g, axis=0))
    else:
        decay_ptr += ((b * T + start) * H + h) * K
        for block in tl.static_range(0, KP, BK):
            columns = block + tl.arange(0, BK)
            g = tile(decay_ptr, i, columns, H * K, T - start, K).to(sum_ptr.dtype.element_ty)
            sums = tl.cumsum(tl.maximum(g, LEAST_CHANNEL), axis=0)
            tl.store(sum_ptr + i[:, None] * KP + columns[None, :], sums)


@triton.jit
def key_products(
    x_ptr, k_ptr, x_stride, k_stride, sum_ptr, rows, K,
    C: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr, LEVELS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x K^T [C, C] and squared lengths of x [C].

    Per channel the decays are in the products, and only those on (with DIAGONAL) and below the
    diagonal are right.
    """
    i = tl.arange(0, C)
    products = tl.zeros([C, C], tl.float32)
    squares = tl.zeros([C], tl.float32)
    for block in tl.static_range(0, KP, BK):
        columns = block + tl.arange(0, BK)
        x = tile(x_ptr, i, columns, x_stride, rows, K)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        if PER_CHANNEL:
            k = tile(k_ptr, i, columns, k_stride, rows, K)
            if DIAGONAL:
                own = tl.sum(x.to(tl.float32) * k.to(tl.float32), axis=1)
                products += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
            for level in tl.range(0, LEVELS, num_stages=1):
                factor = level_factor(sum_ptr, columns, KP, level, C)
                reader = (x * factor).to(x.dtype)
                written = (k * factor).to(x.dtype)
                product = tl.dot(reader, tl.trans(written), input_precision=PRECISION)
                products += tl.where(level_mask(level, C), product, 0.0)
        else:
            k_t = tile_t(k_ptr, i, columns, k_stride, rows, K)
            products += tl.dot(x, k_t, input_precision=PRECISION)
    return products, squares


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    k_ptr, v_ptr, beta_ptr, decay_ptr, counts_ptr,
    sum_ptr, k_factor_ptr, inverse_ptr, u_ptr, w_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    T, H, K, V, N,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """One chunk: G, and for the delta rule 1 / |k| and R, read where they are KNOWN, U and W."""
    pid = tl.program_id(0).to(tl.int64)
    chunk, bh = pid % N, pid // N
    b, h = bh // H, bh % H
    start = chunk * C
    i = tl.arange(0, C)
    k_ptr += b * k_stride_b + start * k_stride_t + h * k_stride_h
    rows = T - start
    sum_ptr = sums_of(sum_ptr, pid, C, KP, PER_CHANNEL)
    sum_decays(decay_ptr, sum_ptr, b, h, T, H, K, start, C, BK, KP, PER_CHANNEL)
    dtype = k_ptr.dtype.element_ty
    tl.debug_barrier()  # the sums are read back below, by other threads
    if DELTA:
        beta = tl.load(beta_ptr + (b * T + start + i) * H + h, mask=i < rows, other=0.0)
        at = inverse_ptr + (pid * C + i[:, None]) * C + i[None, :]
        k_factor = tl.full([C], 1.0, tl.float32)
        if KNOWN:
            inverse = tl.load(at).to(tl.float32)
            if L2NORM:
                k_factor = tl.load(k_factor_ptr + pid * C + i)
        else:
            products, squares = key_products(
                k_ptr, k_ptr, k_stride_t, k_stride_t, sum_ptr, rows, K,
                C, BK, KP, LEVELS, PER_CHANNEL, False, PRECISION,
            )  # fmt: skip
            if L2NORM:
                k_factor = tl.rsqrt(squares + NORM_EPS)
                tl.store(k_factor_ptr + pid * C + i, k_factor)
            decay = between(sum_ptr, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
            a = products * decay * (beta * k_factor)[:, None] * k_factor[None, :]
            a = tl.where(i[:, None] > i[None, :], a, 0.0)
            # With unit keys and beta in [0, 2] no entry of the inverse is above 2: it holds
            # products of I - beta k k^T, whose norms are at most 1.
            bounded: tl.constexpr = L2NORM and dtype != tl.float32
            inverse = invert(a, C, LEVELS, PRECISION, bounded)
            tl.store(at, inverse.to(dtype))
        into, _, _ = head_decays(sum_ptr, counts_ptr, b, chunk, T, C, PER_CHANNEL, SEGMENTS)
        # Row factors go onto R's columns in fp32: the tiles stay as they are, rounded once.
        r_v = (inverse * beta[None, :]).to(dtype)
        r_k = (inverse * (beta * k_factor * into)[None, :]).to(dtype)
        v_ptr += b * v_stride_b + start * v_stride_t + h * v_stride_h
        for block in range(0, VP, BV):
            columns = block + tl.arange(0, BV)
            v = tile(v_ptr, i, columns, v_stride_t, rows, V)
            u = tl.dot(r_v, v, input_precision=PRECISION)
            save(u_ptr + pid * C * VP, u, i, columns, VP, C, VP)
        for block in tl.static_range(0, KP, BK):
            columns = block + tl.arange(0, BK)
            k = tile(k_ptr, i, columns, k_stride_t, rows, K)
            if PER_CHANNEL:
                sums = tl.load(sum_ptr + i[:, None] * KP + columns[None, :])
                k = (k * tl.exp(sums.to(tl.float32))).to(dtype)
            w = tl.dot(r_k, k, input_precision=PRECISION)
            save(w_ptr + pid * C * KP, w, i, columns, KP, C, KP)
