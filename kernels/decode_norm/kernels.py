"""The Triton kernel of ``decode_norm``; C channels."""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, residual_ptr, y_ptr, next_weight_ptr, z_ptr, eps, offset, next_eps,
    next_offset, C: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """z is the norm of y as it is stored, where there is a weight for it."""
    let_go(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, BC)
    in_C = c_C < C
    at_C = row * C + c_C
    weight_C = tl.load(weight_ptr + c_C, mask=in_C, other=0.0).to(tl.float32) + offset
    if next_weight_ptr is not None:
        next_C = tl.load(next_weight_ptr + c_C, mask=in_C, other=0.0).to(tl.float32) + next_offset
    take_turn(OVERLAP)
    x_C = tl.load(x_ptr + at_C, mask=in_C, other=0.0).to(tl.float32)
    residual_C = tl.zeros([BC], tl.float32)
    if residual_ptr is not None:
        residual_C = tl.load(residual_ptr + at_C, mask=in_C, other=0.0).to(tl.float32)
    y_C = residual_C + x_C * tl.rsqrt(tl.sum(x_C * x_C, axis=0) / C + eps) * weight_C
    y_C = y_C.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at_C, y_C, mask=in_C)
    if next_weight_ptr is not None:
        y_C = y_C.to(tl.float32)
        z_C = y_C * tl.rsqrt(tl.sum(y_C * y_C, axis=0) / C + next_eps) * next_C
        tl.store(z_ptr + at_C, z_C.to(z_ptr.dtype.element_ty), mask=in_C)
