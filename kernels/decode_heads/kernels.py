"""The Triton kernel of ``decode_heads``, and the heads that attention makes in the same way.

D channels of a head, W channels of a whole projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit
def heads_of(
    x_ptr, first, d, mask, row, cos_ptr, sin_ptr, weight_ptr, eps, offset,
    WIDTH: tl.constexpr, D: tl.constexpr, BW: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Channels ``d`` of heads of q or of k, normed and at their position, in fp32.

    ``x_ptr`` is the projection of ``row``, WIDTH channels, of which a head's begin at ``first``;
    of several heads ``first`` is a column, ``d`` a row and ``mask`` both.
    """
    x = tl.load(x_ptr + first + d, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM == "head":
        scale = tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) / D + eps)
    elif NORM == "full":
        w_W = tl.arange(0, BW)
        whole_W = tl.load(x_ptr + w_W, mask=w_W < WIDTH, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole_W * whole_W, axis=0) / WIDTH + eps)
    y = _weighted(x, scale, first, d, mask, weight_ptr, offset, NORM)
    if cos_ptr is not None:
        other = (d + D // 2) % D
        turned = tl.load(x_ptr + first + other, mask=mask, other=0.0).to(tl.float32)
        turned = _weighted(turned, scale, first, other, mask, weight_ptr, offset, NORM)
        turned = tl.where(d < D // 2, -turned, turned)
        cos = tl.load(cos_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        y = y * cos + turned * sin
    return y


@triton.jit
def _weighted(x, scale, first, d, mask, weight_ptr, offset, NORM: tl.constexpr):
    """x as a norm leaves it, with one weight for all heads or each channel's own."""
    if NORM != "none":
        at = (first if NORM == "full" else first * 0) + d
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x *= scale * (weight + offset)
    return x


@triton.jit(do_not_specialize=["slots"])
def heads_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr,
    eps, offset, slots, qkv_row, q_row, q_head, key_row, key_head, key_slot, value_row, value_head,
    value_slot, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BW: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_go(OVERLAP)
    head = tl.program_id(0) % (H + 2 * G)
    row = (tl.program_id(0) // (H + 2 * G)).to(tl.int64)
    d_D = tl.arange(0, BD)
    in_D = d_D < D
    q_from = qkv_ptr + row * qkv_row
    k_from, v_from = q_from + H * D, q_from + (H + G) * D
    take_turn(OVERLAP)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    kept_D = d_D < tl.where(slot < slots, D, 0)  # a token too many is lost, and nothing else
    if head < H:
        q_D = heads_of(
            q_from, head * D, d_D, in_D, row, cos_ptr, sin_ptr, q_weight_ptr, eps, offset,
            H * D, D, BW, NORM,
        )  # fmt: skip
        to_q = q_ptr + row * q_row + head.to(tl.int64) * q_head
        tl.store(to_q + d_D, q_D.to(q_ptr.dtype.element_ty), mask=in_D)
    elif head < H + G:
        head = head - H
        k_D = heads_of(
            k_from, head * D, d_D, in_D, row, cos_ptr, sin_ptr, k_weight_ptr, eps, offset,
            G * D, D, BW, NORM,
        )  # fmt: skip
        to_k = keys_ptr + row * key_row + head.to(tl.int64) * key_head + slot * key_slot
        tl.store(to_k + d_D, k_D.to(keys_ptr.dtype.element_ty), mask=kept_D)
    else:
        head = head - H - G
        v_D = tl.load(v_from + head * D + d_D, mask=in_D, other=0.0)
        to_v = values_ptr + row * value_row + head.to(tl.int64) * value_head + slot * value_slot
        tl.store(to_v + d_D, v_D.to(values_ptr.dtype.element_ty), mask=kept_D)
