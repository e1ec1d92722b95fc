"""The Triton kernel of ``decode_heads``.

D channels of a head, W channels of a whole projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit
def _scale(
    row_ptr, x_D, head, d_D, q_weight_ptr, k_weight_ptr, eps, offset,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BW: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What channels d of a head of q or k are multiplied by, [D]."""
    is_q = head < H
    if NORM == "head":
        mean, first = tl.sum(x_D * x_D, axis=0) / D, 0
    else:
        start, width = tl.where(is_q, 0, H * D), tl.where(is_q, H * D, G * D)
        w_W = tl.arange(0, BW)
        whole_W = tl.load(row_ptr + start + w_W, mask=w_W < width, other=0.0).to(tl.float32)
        mean, first = tl.sum(whole_W * whole_W, axis=0) / width, tl.where(is_q, head, head - H) * D
    q_width, k_width = tl.where(is_q, D, 0), tl.where(is_q | (head >= H + G), 0, D)
    weight_D = tl.load(q_weight_ptr + first + d_D, mask=d_D < q_width, other=0.0).to(tl.float32)
    weight_D += tl.load(k_weight_ptr + first + d_D, mask=d_D < k_width, other=0.0).to(tl.float32)
    return tl.rsqrt(mean + eps) * (weight_D + offset)


@triton.jit
def heads_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr,
    eps, offset, qkv_row, q_row, q_head, key_row, key_head, key_slot, value_row, value_head,
    value_slot, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BW: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_go(OVERLAP)
    head = tl.program_id(0) % (H + 2 * G)
    row = (tl.program_id(0) // (H + 2 * G)).to(tl.int64)
    is_v = head >= H + G
    d_D = tl.arange(0, BD)
    in_D = d_D < D
    row_ptr = qkv_ptr + row * qkv_row
    take_turn(OVERLAP)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    x_D = tl.load(row_ptr + head * D + d_D, mask=in_D, other=0.0).to(tl.float32)
    y_D = x_D
    if NORM != "none":
        scale_D = _scale(
            row_ptr, x_D, head, d_D, q_weight_ptr, k_weight_ptr, eps, offset, H, G, D, BW, NORM
        )
        y_D = y_D * scale_D
    if cos_ptr is not None:
        other_D = (d_D + D // 2) % D
        turned_D = tl.load(row_ptr + head * D + other_D, mask=in_D, other=0.0).to(tl.float32)
        if NORM != "none":
            turned_D *= _scale(
                row_ptr, x_D, head, other_D, q_weight_ptr, k_weight_ptr, eps, offset,
                H, G, D, BW, NORM,
            )  # fmt: skip
        turned_D = tl.where(d_D < D // 2, -turned_D, turned_D)
        cos_D = tl.load(cos_ptr + row * D + d_D, mask=in_D, other=0.0).to(tl.float32)
        sin_D = tl.load(sin_ptr + row * D + d_D, mask=in_D, other=0.0).to(tl.float32)
        y_D = y_D * cos_D + turned_D * sin_D
    y_D = tl.where(is_v, x_D, y_D)

    head = head.to(tl.int64)
    if head < H:
        to_ptr = q_ptr + row * q_row + head * q_head
        tl.store(to_ptr + d_D, y_D.to(q_ptr.dtype.element_ty), mask=in_D)
    elif head < H + G:
        to_ptr = keys_ptr + row * key_row + (head - H) * key_head + slot * key_slot
        tl.store(to_ptr + d_D, y_D.to(keys_ptr.dtype.element_ty), mask=in_D)
    else:
        to_ptr = values_ptr + row * value_row + (head - H - G) * value_head + slot * value_slot
        tl.store(to_ptr + d_D, y_D.to(values_ptr.dtype.element_ty), mask=in_D)
