"""What the Triton kernels of ``decode_linear`` share.

B rows of x, C channels, O outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh
from ltconvert.kernels.overlap_kernels import fetch


@triton.jit
def rounded(x, ptr):
    """In fp32, with the digits that a tensor of ptr's dtype keeps."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def scaled(x, factor, weight_C, offset, x_ptr):
    """x [..., C] after the norm, as it would be stored; ``factor`` is one over its size."""
    return rounded(x.to(tl.float32) * factor * (weight_C.to(tl.float32) + offset), x_ptr)


@triton.jit
def optional(ptr, at, mask):
    """Elements in fp32, zeros where there is no tensor."""
    if ptr is None:
        value = tl.zeros(at.shape, tl.float32)
    else:
        value = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        value = x / (1 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        value = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return value


@triton.jit
def gated(sums, up_sums, bias, up_bias, y_ptr, SWIGLU: tl.constexpr, ACTIVATION: tl.constexpr):
    """Of sums [..., O] what the layers behind make, rounded where they hand it on."""
    value = rounded(sums + bias, y_ptr)
    if SWIGLU:
        up = rounded(up_sums + up_bias, y_ptr)
        value = rounded(rounded(_activated(value, ACTIVATION), y_ptr) * up, y_ptr)
    return value


@triton.jit
def weights(ptr, at_O, c_C, in_O, C: tl.constexpr):
    """Weights [O, C] of a block, zeros past the end; rows start where at_O says.

    They pass by the first-level cache, where x stays.
    """
    mask = in_O[:, None] & (c_C < C)[None, :]
    at_OC = at_O[:, None] + c_C[None, :]
    return tl.load(ptr + at_OC, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def fetch_rows(
    ptr, up_ptr, first, outputs, stride, C: tl.constexpr, BO: tl.constexpr, SWIGLU: tl.constexpr
):
    """Bring a program's weights into the second-level cache; rows lie side by side."""
    count = tl.minimum(outputs - first, BO) * C
    fetch(ptr + first.to(tl.int64) * stride, count, True)
    if SWIGLU:
        fetch(up_ptr + first.to(tl.int64) * stride, count, True)
