"""The Triton kernel of ``decode_window``: a program for each query head, which a window is short
enough for.

N keys of a block, D channels. Exponentials are of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh
from ltconvert.kernels.overlap_kernels import fetch, let_go, take_turn

# Below every score, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(-1e38)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _block(ptr, n_N, d_D, stride, end, D: tl.constexpr):
    """Keys or values n [N, D] as they are stored, zeros past the end."""
    mask = (n_N < end)[:, None] & (d_D < D)[None, :]
    return tl.load(ptr + n_N.to(tl.int64)[:, None] * stride + d_D[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["slots"])
def window_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, other_ptr, rest_ptr, outside_ptr, y_ptr, factor, cap, slots,
    k_row, k_head, k_slot, v_row, v_head, v_slot, rest_row, rest_head,
    H: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Every row n of a block has a softmax of its own over the keys that pass it, so that threads
    exchange nothing but scores until the end.

    All slots are read: loads that wait for nothing start first, and a window is full before long.
    """
    let_go(OVERLAP)
    cell = tl.program_id(0).to(tl.int64)
    row, head = cell // H, cell % H
    n_N, d_D = tl.arange(0, BN), tl.arange(0, BD)
    in_D = d_D < D
    k_ptr += row * k_row + (head // GROUP) * k_head
    v_ptr += row * v_row + (head // GROUP) * v_head
    if FETCH:
        fetch(k_ptr, slots * D, OVERLAP)
        fetch(v_ptr, slots * D, OVERLAP)
    take_turn(OVERLAP)

    length = tl.minimum(tl.load(length_ptr + row), slots).to(tl.int32)
    q_D = tl.load(q_ptr + cell * D + d_D, mask=in_D, other=0.0).to(tl.float32) * factor
    other_D = tl.load(other_ptr + cell * D + d_D, mask=in_D, other=0.0).to(tl.float32)
    rest = tl.load(rest_ptr + row * rest_row + head * rest_head).to(tl.float32)
    outside = tl.load(outside_ptr + row)
    m_N = tl.full([BN], LOWEST, tl.float32)
    l_N = tl.zeros([BN], tl.float32)
    o_ND = tl.zeros([BN, BD], tl.float32)
    for start in tl.range(0, slots, BN, num_stages=STAGES):
        at_N = start + n_N
        k_ND = _block(k_ptr, at_N, d_D, k_slot, slots, D)
        v_ND = _block(v_ptr, at_N, d_D, v_slot, slots, D)
        s_N = tl.sum(k_ND.to(tl.float32) * q_D[None, :], axis=1)
        if CAPPED:
            s_N = tanh(s_N) * cap
        filled_N = at_N < length  # what stands in other slots, NaN too, counts as nothing
        s_N = tl.where(filled_N, s_N, float("-inf"))
        v_ND = tl.where(filled_N[:, None], v_ND.to(tl.float32), 0.0)
        top_N = tl.maximum(m_N, s_N)
        shrink_N, p_N = tl.exp2(m_N - top_N), tl.exp2(s_N - top_N)
        m_N, l_N = top_N, l_N * shrink_N + p_N
        o_ND = o_ND * shrink_N[:, None] + p_N[:, None] * v_ND

    m = tl.max(m_N, axis=0)
    weight_N = tl.exp2(m_N - m)
    total = tl.sum(l_N * weight_N, axis=0)
    local_D = tl.sum(o_ND * weight_N[:, None], axis=0) / total
    log_sum = (m + tl.log2(total)) * LN_2
    share = tl.where(outside, tl.sigmoid(log_sum - rest), 1.0)
    y_D = share * local_D + (1 - share) * other_D
    tl.store(y_ptr + cell * D + d_D, y_D.to(y_ptr.dtype.element_ty), mask=in_D)
