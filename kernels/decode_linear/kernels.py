"""Triton kernels of ``decode_linear``: a program for a few outputs walks along the channels.

Reading the weight is nearly all of the time, so its next blocks are always under way. One row of x
goes through plain sums, its norm computed while the first blocks come; several rows go through
matrix units.

B rows of x, filled up; C channels, of which BC a step; O outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh

# Channels that the norm reads at a time of a row, and of several: a warp a row of x.
ROW_STEP, ROWS_STEP = tl.constexpr(512), tl.constexpr(256)


@triton.jit
def _rounded(x, ptr):
    """In fp32, with the digits that a tensor of ptr's dtype keeps."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _scaled(x, factor, norm_ptr, c_C, offset, x_ptr, C: tl.constexpr):
    """x [..., C] after the norm, as it would be stored; ``factor`` is one over its size."""
    weight_C = tl.load(norm_ptr + c_C, mask=c_C < C, other=0.0).to(tl.float32) + offset
    return _rounded(x * factor * weight_C, x_ptr)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        value = x / (1 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        value = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return value


@triton.jit
def _biased(sums, bias_ptr, o_O, outputs, y_ptr):
    """Sums [..., O] with their bias, as a linear layer hands them on."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + o_O, mask=o_O < outputs, other=0.0).to(tl.float32)
    return _rounded(sums, y_ptr)


@triton.jit
def _gated(gate, up, bias_ptr, o_O, outputs, y_ptr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr):
    """Of sums [..., O] what the layers behind make: of ``gate`` alone, or of both."""
    value = _biased(gate, bias_ptr, o_O, outputs, y_ptr)
    if SWIGLU:
        up_bias_ptr = bias_ptr
        if bias_ptr is not None:
            up_bias_ptr = bias_ptr + outputs
        up = _biased(up, up_bias_ptr, o_O, outputs, y_ptr)
        value = _rounded(_rounded(_activated(value, ACTIVATION), y_ptr) * up, y_ptr)
    return value


@triton.jit
def _weights(ptr, o_O, c_C, in_O, C: tl.constexpr):
    """Weights [O, C] of a block, zeros past the end; rows start where o_O says.

    They pass by the first-level cache, where x stays.
    """
    mask = in_O[:, None] & (c_C < C)[None, :]
    at_OC = o_O[:, None] + c_C[None, :]
    return tl.load(ptr + at_OC, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _factor(x_ptr, eps, C: tl.constexpr):
    """One over the root mean square of a row."""
    squares_C = tl.zeros([ROW_STEP], tl.float32)
    for start in tl.static_range(0, C, ROW_STEP):  # nothing waits for the block before
        n_C = start + tl.arange(0, ROW_STEP)
        x_C = tl.load(x_ptr + n_C, mask=n_C < C, other=0.0).to(tl.float32)
        squares_C += x_C * x_C
    return tl.rsqrt(tl.sum(squares_C, axis=0) / C + eps)


@triton.jit
def _rows(x_ptr, b_B, c_C, rows, C: tl.constexpr):
    """Rows b of x at channels c [B, C], zeros past the end."""
    mask = (b_B < rows)[:, None] & (c_C < C)[None, :]
    return tl.load(x_ptr + b_B[:, None] * C + c_C[None, :], mask=mask, other=0.0)


@triton.jit
def _factors(x_ptr, b_B, rows, eps, C: tl.constexpr):
    """The same of rows b, [B]."""
    squares_BC = tl.zeros([b_B.shape[0], ROWS_STEP], tl.float32)
    for start in tl.static_range(0, C, ROWS_STEP):
        x_BC = _rows(x_ptr, b_B, start + tl.arange(0, ROWS_STEP), rows, C).to(tl.float32)
        squares_BC += x_BC * x_BC
    return tl.rsqrt(tl.sum(squares_BC, axis=1) / C + eps)


@triton.jit(do_not_specialize=["outputs", "rows"])
def single_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, rows, outputs, stride, eps, offset,
    C: tl.constexpr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row of x (``rows`` is 1). Threads add up their own channels and meet at the end."""
    o_O, c_C = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BC)
    in_O = o_O < outputs
    at_O = o_O.to(tl.int64) * stride
    up_ptr = weight_ptr + outputs.to(tl.int64) * stride
    sums_OC = tl.zeros([BO, BC], tl.float32)
    up_sums_OC = sums_OC
    factor = 1.0
    for start in tl.range(0, C, BC, num_stages=STAGES):
        n_C = start + c_C
        weight_OC = _weights(weight_ptr, at_O, n_C, in_O, C)
        if SWIGLU:
            up_OC = _weights(up_ptr, at_O, n_C, in_O, C)
        x_C = tl.load(x_ptr + n_C, mask=n_C < C, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            # Here and not before the loop: the first blocks of the weight are on their way.
            if start == 0:
                factor = _factor(x_ptr, eps, C)
            x_C = _scaled(x_C, factor, norm_ptr, n_C, offset, x_ptr, C)
        sums_OC += weight_OC.to(tl.float32) * x_C[None, :]
        if SWIGLU:
            up_sums_OC += up_OC.to(tl.float32) * x_C[None, :]

    up_O = tl.sum(up_sums_OC, axis=1) if SWIGLU else 0.0
    y_O = _gated(tl.sum(sums_OC, axis=1), up_O, bias_ptr, o_O, outputs, y_ptr, SWIGLU, ACTIVATION)
    if residual_ptr is not None:
        y_O += tl.load(residual_ptr + o_O, mask=in_O, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_O, y_O.to(y_ptr.dtype.element_ty), mask=in_O)


@triton.jit(do_not_specialize=["outputs", "rows"])
def several_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, rows, outputs, stride, eps, offset,
    C: tl.constexpr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BB rows of x."""
    b_B, c_C = tl.arange(0, BB), tl.arange(0, BC)
    o_O = tl.program_id(0) * BO + tl.arange(0, BO)
    in_O = o_O < outputs
    at_O = o_O.to(tl.int64) * stride
    up_ptr = weight_ptr + outputs.to(tl.int64) * stride
    sums_BO = tl.zeros([BB, BO], tl.float32)
    up_sums_BO = sums_BO
    if norm_ptr is not None:
        factor_B = _factors(x_ptr, b_B, rows, eps, C)
    for start in range(0, C, BC):
        n_C = start + c_C
        weight_OC = _weights(weight_ptr, at_O, n_C, in_O, C)
        x_BC = _rows(x_ptr, b_B, n_C, rows, C)
        if norm_ptr is not None:
            scaled_BC = _scaled(
                x_BC.to(tl.float32), factor_B[:, None], norm_ptr, n_C, offset, x_ptr, C
            )
            x_BC = scaled_BC.to(x_BC.dtype)
        sums_BO = tl.dot(x_BC, tl.trans(weight_OC), sums_BO, input_precision=PRECISION)
        if SWIGLU:
            up_OC = _weights(up_ptr, at_O, n_C, in_O, C)
            up_sums_BO = tl.dot(x_BC, tl.trans(up_OC), up_sums_BO, input_precision=PRECISION)

    y_BO = _gated(sums_BO, up_sums_BO, bias_ptr, o_O, outputs, y_ptr, SWIGLU, ACTIVATION)
    at_BO = b_B[:, None] * outputs + o_O[None, :]
    mask = (b_B < rows)[:, None] & in_O[None, :]
    if residual_ptr is not None:
        y_BO += tl.load(residual_ptr + at_BO, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at_BO, y_BO.to(y_ptr.dtype.element_ty), mask=mask)
