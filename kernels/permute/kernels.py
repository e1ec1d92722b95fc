"""Triton kernels of ``permute``. A program has a few tokens and all of their choices.

N tokens, K choices a token, C channels; BN tokens and BC channels of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def collect_kernel(
    y, place, weight, out, N, C,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``out[n] = sum_k weight[n, k] y[place[n, k]]``, every weight 1 unless WEIGHTED.

    Negative places are left out.
    """
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    inside_NC = (n_N < N)[:, None] & (c_C < C)[None, :]
    sum_NC = tl.zeros([BN, BC], tl.float32)
    for k in range(K):
        place_N = tl.load(place + n_N * K + k, mask=n_N < N, other=0)
        there_NC = inside_NC & (place_N >= 0)[:, None]
        y_NC = tl.load(y + place_N[:, None] * C + c_C[None, :], mask=there_NC, other=0.0)
        y_NC = y_NC.to(tl.float32)
        if WEIGHTED:
            weight_N = tl.load(weight + n_N * K + k, mask=n_N < N, other=0.0).to(tl.float32)
            y_NC = y_NC * weight_N[:, None]
        sum_NC += y_NC
    at_NC = n_N[:, None] * C + c_C[None, :]
    tl.store(out + at_NC, sum_NC.to(out.dtype.element_ty), mask=inside_NC)


@triton.jit(do_not_specialize=["N"])
def hand_out_kernel(
    x, place, weight, y, out, dweight, N, C,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``out[place[n, k]] = weight[n, k] x[n]``, every weight 1 unless WEIGHTED.

    WEIGHTED, as the backward of the sum above: also ``dweight[n, k] = x[n] . y[place[n, k]]``.
    Negative places are left out, with a dweight of 0.
    """
    n_N = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    for k in range(K):
        place_N = tl.load(place + n_N * K + k, mask=n_N < N, other=0)
        weight_N = tl.full([BN], 1.0, tl.float32)
        if WEIGHTED:
            weight_N = tl.load(weight + n_N * K + k, mask=n_N < N, other=0.0).to(tl.float32)
        product_NC = tl.zeros([BN, BC], tl.float32)
        for first in range(0, C, BC):
            c_C = first + tl.arange(0, BC)
            inside_NC = (n_N < N)[:, None] & (c_C < C)[None, :]
            x_NC = tl.load(x + n_N[:, None] * C + c_C[None, :], mask=inside_NC, other=0.0)
            at_NC = place_N[:, None] * C + c_C[None, :]
            there_NC = inside_NC & (place_N >= 0)[:, None]
            if WEIGHTED:
                x_NC = x_NC.to(tl.float32)
                y_NC = tl.load(y + at_NC, mask=there_NC, other=0.0).to(tl.float32)
                product_NC += x_NC * y_NC
                x_NC = x_NC * weight_N[:, None]
            tl.store(out + at_NC, x_NC.to(out.dtype.element_ty), mask=there_NC)
        if WEIGHTED:
            tl.store(dweight + n_N * K + k, tl.sum(product_NC, 1), mask=n_N < N)
