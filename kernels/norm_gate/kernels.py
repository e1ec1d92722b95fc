"""Triton kernels of ``norm_gate``: tiles of whole rows, a program has one row of the weight.

N rows of a tile, D channels, G groups of rows that have a row of the weight each.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def open_gate(gate, GATE_FN: tl.constexpr):
    """The gate's function and its derivative."""
    opened = tl.sigmoid(gate)
    if GATE_FN == "silu":
        value = gate * opened
        slope = opened * (1 + gate * (1 - opened))
    elif GATE_FN == "sigmoid":
        value = opened
        slope = opened * (1 - opened)
    else:
        tl.static_assert(GATE_FN == "2sigmoid")
        value = 2 * opened
        slope = value * (1 - opened)
    return value, slope


@triton.jit
def _tile(ptr, n_N, d_D, rows, stride, D: tl.constexpr):
    """Rows n of a matrix with contiguous rows in fp32, zeros past its end."""
    mask = (n_N < rows)[:, None] & (d_D < D)[None, :]
    return tl.load(ptr + n_N[:, None] * stride + d_D[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _save(ptr, value, n_N, d_D, rows, stride, D: tl.constexpr):
    mask = (n_N < rows)[:, None] & (d_D < D)[None, :]
    value = value.to(ptr.dtype.element_ty)
    tl.store(ptr + n_N[:, None] * stride + d_D[None, :], value, mask=mask)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, gate_ptr, y_ptr, rows, groups, eps, x_row, x_group, gate_row, gate_group,
    D: tl.constexpr, GATE_FN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    group = (pid % groups).to(tl.int64)
    n_N = (pid // groups).to(tl.int64) * BN + tl.arange(0, BN)
    d_D = tl.arange(0, BD)
    weight_D = tl.load(weight_ptr + group * D + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    x = _tile(x_ptr + group * x_group, n_N, d_D, rows, x_row, D)
    gate = _tile(gate_ptr + group * gate_group, n_N, d_D, rows, gate_row, D)
    factor_N = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    opened, _ = open_gate(gate, GATE_FN)
    y = x * factor_N[:, None] * weight_D[None, :] * opened
    _save(y_ptr + group * D, y, n_N, d_D, rows, groups * D, D)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, gate_ptr, dx_ptr, dgate_ptr, partial_ptr,
    rows, groups, eps, x_row, x_group, gate_row, gate_group,
    D: tl.constexpr, GATE_FN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    group, part = pid % groups, pid // groups
    d_D = tl.arange(0, BD)
    weight_D = tl.load(weight_ptr + group * D + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([BN, BD], tl.float32)
    for tile in range(TILES):
        n_N = (part * TILES + tile) * BN + tl.arange(0, BN)
        x = _tile(x_ptr + group * x_group, n_N, d_D, rows, x_row, D)
        gate = _tile(gate_ptr + group * gate_group, n_N, d_D, rows, gate_row, D)
        dy = _tile(dy_ptr + group * D, n_N, d_D, rows, groups * D, D)
        factor_N = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        normed = x * factor_N[:, None]
        opened, slope = open_gate(gate, GATE_FN)
        dscaled = dy * opened  # of normed * weight
        dweight += dscaled * normed
        dgate = dy * normed * weight_D[None, :] * slope
        dnormed = dscaled * weight_D[None, :]
        pull_N = tl.sum(dnormed * normed, axis=1) / D
        dx = (dnormed - normed * pull_N[:, None]) * factor_N[:, None]
        _save(dx_ptr + group * D, dx, n_N, d_D, rows, groups * D, D)
        _save(dgate_ptr + group * D, dgate, n_N, d_D, rows, groups * D, D)
    tl.store(partial_ptr + pid * D + d_D, tl.sum(dweight, axis=0), mask=d_D < D)
