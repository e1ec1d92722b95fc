"""The Triton kernel of ``decode_experts``: a program for a few outputs of one row of the result.

N tokens, K choices a token, E experts, C channels, of which BC a block; O outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_linear.parts import gated, optional, weights
from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit(do_not_specialize=["experts", "outputs"])
def experts_kernel(
    x_ptr, weight_ptr, bias_ptr, chosen_ptr, weights_ptr, residual_ptr, y_ptr, experts, outputs,
    expert_stride, output_stride,
    C: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, SUM: tl.constexpr,
    SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row of the result is a token's with ``SUM``, else a choice's.

    ``SHARED``: all choices of a token read the same row of x. Loops are unrolled, so that all
    weights of a program may be on their way at once.
    """
    let_go(OVERLAP)
    row = tl.program_id(0)
    o_O = tl.program_id(1) * BO + tl.arange(0, BO)
    in_O = o_O < outputs
    c_C = tl.arange(0, BC)
    take_turn(OVERLAP)
    at_row_O = row.to(tl.int64) * outputs + o_O
    residual_O = optional(residual_ptr, at_row_O, in_O)
    sums_OC = tl.zeros([BO, BC], tl.float32)
    bias_O = tl.zeros([BO], tl.float32)
    up_sums_OC, up_bias_O = sums_OC, bias_O
    up = outputs.to(tl.int64)  # rows from a gate's to those behind it
    for k in tl.static_range(K if SUM else 1):
        choice = row * K + k if SUM else row
        expert = tl.load(chosen_ptr + choice).to(tl.int64)
        real_O = in_O & (expert + tl.zeros_like(o_O) < experts)
        share = tl.load(weights_ptr + choice).to(tl.float32) if SUM else 1.0
        x_row_ptr = x_ptr + (choice // K if SHARED else choice).to(tl.int64) * C
        at_O = expert * expert_stride + o_O.to(tl.int64) * output_stride
        for start in tl.static_range(0, C, BC):
            n_C = start + c_C
            x_C = tl.load(x_row_ptr + n_C, mask=n_C < C, other=0.0).to(tl.float32) * share
            weight_OC = weights(weight_ptr, at_O, n_C, real_O, C)
            sums_OC += weight_OC.to(tl.float32) * x_C[None, :]
            if SWIGLU:
                up_OC = weights(weight_ptr + up * output_stride, at_O, n_C, real_O, C)
                up_sums_OC += up_OC.to(tl.float32) * x_C[None, :]
        at_bias_O = expert * (2 * outputs if SWIGLU else outputs) + o_O
        bias_O += optional(bias_ptr, at_bias_O, real_O) * share
        if SWIGLU:
            up_bias_O += optional(bias_ptr, at_bias_O + up, real_O)
    up_O = tl.sum(up_sums_OC, axis=1) if SWIGLU else 0.0
    y_O = gated(tl.sum(sums_OC, axis=1), up_O, bias_O, up_bias_O, y_ptr, SWIGLU, ACTIVATION)
    y_O += residual_O
    tl.store(y_ptr + at_row_O, y_O.to(y_ptr.dtype.element_ty), mask=in_O)
