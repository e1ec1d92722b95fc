"""The Triton kernel of ``decode_norm``; C channels."""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, residual_ptr, y_ptr, eps, offset, C: tl.constexpr, BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_go(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, BC)
    in_C = c_C < C
    at_C = row * C + c_C
    weight_C = tl.load(weight_ptr + c_C, mask=in_C, other=0.0).to(tl.float32) + offset
    take_turn(OVERLAP)
    x_C = tl.load(x_ptr + at_C, mask=in_C, other=0.0).to(tl.float32)
    residual_C = tl.zeros([BC], tl.float32)
    if residual_ptr is not None:
        residual_C = tl.load(residual_ptr + at_C, mask=in_C, other=0.0).to(tl.float32)
    y_C = residual_C + x_C * tl.rsqrt(tl.sum(x_C * x_C, axis=0) / C + eps) * weight_C
    tl.store(y_ptr + at_C, y_C.to(y_ptr.dtype.element_ty), mask=in_C)
