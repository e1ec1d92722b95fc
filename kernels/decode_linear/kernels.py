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
    added,
    fetch_rows,
    gated,
    optional,
    scaled,
    weights,
)
from ltconvert.kernels.overlap_kernels import let_go, take_turn

ROWS_STEP = tl.constexpr(256)  # channels that the norm reads at a time of several rows


@triton.jit
def _row(ptr, c_C, C: tl.constexpr):
    """A row at channels c; where there is none, c stands in its place."""
    value_C = c_C
    if ptr is not None:
        value_C = tl.load(ptr + c_C, mask=c_C < C, other=0.0)
    return value_C


@triton.jit
def _ahead(
    ptr, up_ptr, norm_ptr, branch_norm_ptr, at_O, c_C, in_O, C: tl.constexpr, SWIGLU: tl.constexpr
):
    """What nothing writes of a block: (weights [O, C], those of up, the norms' [C])."""
    weight_OC = weights(ptr, at_O, c_C, in_O, C)
    up_OC = weight_OC
    if SWIGLU:
        up_OC = weights(up_ptr, at_O, c_C, in_O, C)
    return (weight_OC, up_OC, _row(norm_ptr, c_C, C), _row(branch_norm_ptr, c_C, C))


@triton.jit
def _part(x_ptr, stream_ptr, branch_norm_C, c_C, C: tl.constexpr):
    """What ``_stream`` reads of a block: (x, what x is a branch of, the branch's norm)."""
    return (_row(x_ptr, c_C, C), _row(stream_ptr, c_C, C), branch_norm_C)


@triton.jit
def _stream(part, factor, offset, x_ptr, stream_ptr):
    """A block of x in fp32, or of the stream that x has been added to."""
    x_C, before_C, weight_C = part
    h_C = x_C.to(tl.float32)
    if stream_ptr is not None:
        h_C = added(before_C, h_C, factor, weight_C, offset, x_ptr)
    return h_C


@triton.jit
def _factor(row, factor, offset, x_ptr, stream_ptr, eps, C: tl.constexpr):
    """One over the root mean square of a row in blocks, each as in ``_stream``."""
    h_C = _stream(row[0], factor, offset, x_ptr, stream_ptr)
    squares_C = h_C * h_C
    for n in tl.static_range(1, len(row)):
        h_C = _stream(row[n], factor, offset, x_ptr, stream_ptr)
        squares_C += h_C * h_C
    return tl.rsqrt(tl.sum(squares_C, axis=0) / C + eps)


@triton.jit
def _products(weight_OC, x_C, VEC: tl.constexpr):
    """Weights times x, summed over the VEC channels side by side that a thread has read."""
    BO: tl.constexpr = weight_OC.shape[0]
    BC: tl.constexpr = weight_OC.shape[1]
    return tl.sum(tl.reshape(weight_OC.to(tl.float32) * x_C[None, :], [BO, BC // VEC, VEC]), axis=2)


@triton.jit(do_not_specialize=["outputs"])
def single_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, outputs, stride, eps, offset,
    branch_norm_ptr, stream_ptr, h_ptr, branch_eps, branch_offset,
    C: tl.constexpr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr, VEC: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of x. Threads add up their own channels and meet at the end.

    With ``stream_ptr`` x is a branch: every program norms it and adds it to the stream for itself,
    and the first one writes the sum down.
    """
    let_go(OVERLAP)
    first, c_C = tl.program_id(0) * BO, tl.arange(0, BC)
    o_O = first + tl.arange(0, BO)
    in_O = o_O < outputs
    at_O = o_O.to(tl.int64) * stride
    up_ptr = weight_ptr + outputs.to(tl.int64) * stride
    blocks = ()
    for n in tl.static_range(AHEAD):
        n_C = n * BC + c_C
        blocks = blocks + (
            _ahead(weight_ptr, up_ptr, norm_ptr, branch_norm_ptr, at_O, n_C, in_O, C, SWIGLU),
        )
    if FETCH and OVERLAP:
        fetch_rows(weight_ptr, up_ptr, first, outputs, stride, C, BO, SWIGLU)
    bias_O, up_bias_O = optional(bias_ptr, o_O, in_O), 0.0
    if SWIGLU:
        up_bias_O = optional(bias_ptr, outputs + o_O, in_O)
    take_turn(OVERLAP)

    parts = ()
    for n in tl.static_range(AHEAD):
        parts = parts + (_part(x_ptr, stream_ptr, blocks[n][3], n * BC + c_C, C),)
    residual_O = optional(residual_ptr, o_O, in_O)
    row = parts  # all of it for the norms; nothing waits for the block before
    for start in tl.static_range(AHEAD * BC, C, BC):
        n_C = start + c_C
        row = row + (_part(x_ptr, stream_ptr, _row(branch_norm_ptr, n_C, C), n_C, C),)
    branch_factor, factor = 1.0, 1.0
    if stream_ptr is not None:
        branch_factor = _factor(row, 1.0, 0.0, x_ptr, None, branch_eps, C)
    if norm_ptr is not None:
        factor = _factor(row, branch_factor, branch_offset, x_ptr, stream_ptr, eps, C)
    written = tl.where(first == 0, C, 0)  # channels of the stream
    sums_OC = tl.zeros([BO, BC // VEC], tl.float32)
    up_sums_OC = sums_OC
    for start in range(0, C, AHEAD * BC):
        next_blocks, next_parts = (), ()
        for n in tl.static_range(AHEAD):
            weight_OC, up_OC, norm_C, _ = blocks[n]
            x_C = _stream(parts[n], branch_factor, branch_offset, x_ptr, stream_ptr)
            n_C = start + n * BC + c_C
            if h_ptr is not None:
                tl.store(h_ptr + n_C, x_C.to(h_ptr.dtype.element_ty), mask=n_C < written)
            if norm_ptr is not None:
                x_C = scaled(x_C, factor, norm_C, offset, x_ptr)
            sums_OC += _products(weight_OC, x_C, VEC)
            if SWIGLU:
                up_sums_OC += _products(up_OC, x_C, VEC)
            n_C += AHEAD * BC
            block = _ahead(
                weight_ptr, up_ptr, norm_ptr, branch_norm_ptr, at_O, n_C, in_O, C, SWIGLU
            )
            next_blocks = next_blocks + (block,)
            next_parts = next_parts + (_part(x_ptr, stream_ptr, block[3], n_C, C),)
        blocks, parts = next_blocks, next_parts

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
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, outputs, stride, eps, offset, rows,
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
