"""The Triton kernel of ``decode_norm``; C channels."""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.overlap_kernels import let_go, take_turn

# Where less than this of the residual's square is left of a sum's, it is added up again: what
# cancels takes digits with it.
LEAST_LEFT = tl.constexpr(2.0**-10)


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, residual_ptr, y_ptr, next_weight_ptr, z_ptr, eps, offset, next_eps,
    next_offset, C: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """z is the norm of y as it is stored, where there is a weight for it.

    Its size is known before y is: with y = r + f b, sum(y^2) = sum(r^2) + 2 f sum(r b) + f^2
    sum(b^2), so that threads meet once and not once more. That of y before it is rounded, which
    differs by less than z is rounded by.
    """
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
    branch_C = x_C * weight_C
    if next_weight_ptr is None:
        factor = tl.rsqrt(tl.sum(x_C * x_C, axis=0) / C + eps)
    else:
        size, kept, mixed, added = tl.reduce(
            (x_C * x_C, residual_C * residual_C, residual_C * branch_C, branch_C * branch_C),
            0,
            _add_four,
        )
        factor = tl.rsqrt(size / C + eps)
    y_C = (residual_C + factor * branch_C).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at_C, y_C, mask=in_C)
    if next_weight_ptr is not None:
        y_C = y_C.to(tl.float32)
        size = kept + 2 * factor * mixed + factor * factor * added
        if size < LEAST_LEFT * kept:
            size = tl.sum(y_C * y_C, axis=0)
        z_C = y_C * tl.rsqrt(size / C + next_eps) * next_C
        tl.store(z_ptr + at_C, z_C.to(z_ptr.dtype.element_ty), mask=in_C)
