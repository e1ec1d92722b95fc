"""Triton kernels of ``decode_linear``: a program for a few outputs walks along the channels.

Reading the weight is nearly all of the time, so its next blocks are always under way, the first
ones before x is there. One row of x goes through plain sums, its weights through registers; several
rows go through matrix units.

B rows of x, filled up; C channels, of which BC a block; O outputs of a program.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_linear.parts import (
    fetch_rows,
    gated,
    optional,
    scaled,
    weights,
)
from ltconvert.kernels.overlap_kernels import let_go, take_turn

ROWS_STEP = tl.constexpr(256)  # channels that the norm reads at a time of several rows


@triton.jit
def _ahead(ptr, up_ptr, norm_ptr, at_O, c_C, in_O, C: tl.constexpr, SWIGLU: tl.constexpr):
    """What nothing writes of a block: (weights [O, C], those of up, the norm's [C])."""
    weight_OC = weights(ptr, at_O, c_C, in_O, C)
    up_OC, norm_C = weight_OC, c_C
    if SWIGLU:
        up_OC = weights(up_ptr, at_O, c_C, in_O, C)
    if norm_ptr is not None:
        norm_C = tl.load(norm_ptr + c_C, mask=c_C < C, other=0.0)
    return (weight_OC, up_OC, norm_C)


@triton.jit
def _row(x_ptr, c_C, C: tl.constexpr):
    return tl.load(x_ptr + c_C, mask=c_C < C, other=0.0)


@triton.jit
def _factor(x_ptr, first_C, eps, C: tl.constexpr, BC: tl.constexpr):
    """One over the root mean square of a row whose first channels are there already."""
    squares_C = first_C.to(tl.float32) * first_C.to(tl.float32)
    for start in tl.static_range(BC, C, BC):  # nothing waits for the block before
        x_C = _row(x_ptr, start + tl.arange(0, BC), C).to(tl.float32)
        squares_C += x_C * x_C
    return tl.rsqrt(tl.sum(squares_C, axis=0) / C + eps)


@triton.jit
def _products(weight_OC, x_C, VEC: tl.constexpr):
    """Weights times x, summed over the VEC channels side by side that a thread has read."""
    BO: tl.constexpr = weight_OC.shape[0]
    BC: tl.constexpr = weight_OC.shape[1]
    return tl.sum(tl.reshape(weight_OC.to(tl.float32) * x_C[None, :], [BO, BC // VEC, VEC]), axis=2)


@triton.jit(do_not_specialize=["outputs", "rows"])
def single_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, rows, outputs, stride, eps, offset,
    C: tl.constexpr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr, VEC: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of x (``rows`` is 1). Threads add up their own channels and meet at the end."""
    let_go(OVERLAP)
    first, c_C = tl.program_id(0) * BO, tl.arange(0, BC)
    o_O = first + tl.arange(0, BO)
    in_O = o_O < outputs
    at_O = o_O.to(tl.int64) * stride
    up_ptr = weight_ptr + outputs.to(tl.int64) * stride
    blocks = ()
    for n in tl.static_range(AHEAD):
        blocks = blocks + (
            _ahead(weight_ptr, up_ptr, norm_ptr, at_O, n * BC + c_C, in_O, C, SWIGLU),
        )
    if FETCH and OVERLAP:
        fetch_rows(weight_ptr, up_ptr, first, outputs, stride, C, BO, SWIGLU)
    bias_O, up_bias_O = optional(bias_ptr, o_O, in_O), 0.0
    if SWIGLU:
        up_bias_O = optional(bias_ptr, outputs + o_O, in_O)
    take_turn(OVERLAP)

    first_C = _row(x_ptr, c_C, C)
    xs = (first_C,)
    for n in tl.static_range(1, AHEAD):
        xs = xs + (_row(x_ptr, n * BC + c_C, C),)
    residual_O = optional(residual_ptr, o_O, in_O)
    factor = 1.0
    if norm_ptr is not None:
        factor = _factor(x_ptr, first_C, eps, C, BC)
    sums_OC = tl.zeros([BO, BC // VEC], tl.float32)
    up_sums_OC = sums_OC
    for start in range(0, C, AHEAD * BC):
        next_blocks, next_xs = (), ()
        for n in tl.static_range(AHEAD):
            weight_OC, up_OC, norm_C = blocks[n]
            x_C = xs[n].to(tl.float32)
            if norm_ptr is not None:
                x_C = scaled(x_C, factor, norm_C, offset, x_ptr)
            sums_OC += _products(weight_OC, x_C, VEC)
            if SWIGLU:
                up_sums_OC += _products(up_OC, x_C, VEC)
            n_C = start + (AHEAD + n) * BC + c_C
            next_xs = next_xs + (_row(x_ptr, n_C, C),)
            next_blocks = next_blocks + (
                _ahead(weight_ptr, up_ptr, norm_ptr, at_O, n_C, in_O, C, SWIGLU),
            )
        blocks, xs = next_blocks, next_xs

    up_O = tl.sum(up_sums_OC, axis=1) if SWIGLU else 0.0
    y_O = gated(tl.sum(sums_OC, axis=1), up_O, bias_O, up_bias_O, y_ptr, SWIGLU, ACTIVATION)
    y_O += residual_O
    tl.store(y_ptr + o_O, y_O.to(y_ptr.dtype.element_ty), mask=in_O)


@triton.jit
def _rows(x_ptr, b_B, c_C, rows, C: tl.constexpr):
    """Rows b of x at channels c [B, C], zeros past the end."""
    mask = (b_B < rows)[:, None] & (c_C < C)[None, :]
    return tl.load(x_ptr + b_B[:, None] * C + c_C[None, :], mask=mask, other=0.0)


@triton.jit
def _factors(x_ptr, b_B, rows, eps, C: tl.constexpr):
    """One over the root mean squares of rows b, [B]; a warp a row."""
    squares_BC = tl.zeros([b_B.shape[0], ROWS_STEP], tl.float32)
    for start in tl.static_range(0, C, ROWS_STEP):
        x_BC = _rows(x_ptr, b_B, start + tl.arange(0, ROWS_STEP), rows, C).to(tl.float32)
        squares_BC += x_BC * x_BC
    return tl.rsqrt(tl.sum(squares_BC, axis=1) / C + eps)


@triton.jit(do_not_specialize=["outputs", "rows"])
def several_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, rows, outputs, stride, eps, offset,
    C: tl.constexpr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Up to BB rows of x."""
    let_go(OVERLAP)
    b_B, c_C = tl.arange(0, BB), tl.arange(0, BC)
    first = tl.program_id(0) * BO
    o_O = first + tl.arange(0, BO)
    in_O = o_O < outputs
    at_O = o_O.to(tl.int64) * stride
    up_ptr = weight_ptr + outputs.to(tl.int64) * stride
    if FETCH and OVERLAP:
        fetch_rows(weight_ptr, up_ptr, first, outputs, stride, C, BO, SWIGLU)
    bias_O, up_bias_O = optional(bias_ptr, o_O, in_O), 0.0
    if SWIGLU:
        up_bias_O = optional(bias_ptr, outputs + o_O, in_O)[None, :]
    take_turn(OVERLAP)

    at_BO = b_B[:, None] * outputs + o_O[None, :]
    mask = (b_B < rows)[:, None] & in_O[None, :]
    residual_BO = optional(residual_ptr, at_BO, mask)
    sums_BO = tl.zeros([BB, BO], tl.float32)
    up_sums_BO = sums_BO
    if norm_ptr is not None:
        factor_B = _factors(x_ptr, b_B, rows, eps, C)
    for start in range(0, C, BC):
        n_C = start + c_C
        weight_OC = weights(weight_ptr, at_O, n_C, in_O, C)
        x_BC = _rows(x_ptr, b_B, n_C, rows, C)
        if norm_ptr is not None:
            norm_C = tl.load(norm_ptr + n_C, mask=n_C < C, other=0.0)
            x_BC = scaled(x_BC, factor_B[:, None], norm_C, offset, x_ptr).to(x_BC.dtype)
        sums_BO = tl.dot(x_BC, tl.trans(weight_OC), sums_BO, input_precision=PRECISION)
        if SWIGLU:
            up_OC = weights(up_ptr, at_O, n_C, in_O, C)
            up_sums_BO = tl.dot(x_BC, tl.trans(up_OC), up_sums_BO, input_precision=PRECISION)

    y_BO = gated(sums_BO, up_sums_BO, bias_O[None, :], up_bias_O, y_ptr, SWIGLU, ACTIVATION)
    y_BO += residual_BO
    tl.store(y_ptr + at_BO, y_BO.to(y_ptr.dtype.element_ty), mask=mask)
