"""The Triton kernel of ``decode_window``: a program for each query head, which a window is short
enough for.

N keys of a block, D channels. Exponentials are of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh

# Below every score, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(-1e38)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["slots"])
def window_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, other_ptr, rest_ptr, outside_ptr, y_ptr, factor, cap, slots,
    k_row, k_head, k_slot, v_row, v_head, v_slot, rest_row, rest_head,
    H: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Every row n of a block has a softmax of its own over the keys that pass it, so that threads
    exchange nothing but scores until the end."""
    cell = tl.program_id(0).to(tl.int64)
    row, head = cell // H, cell % H
    length = tl.minimum(tl.load(length_ptr + row), slots).to(tl.int32)
    n_N, d_D = tl.arange(0, BN), tl.arange(0, BD)
    in_D = d_D < D
    q_D = tl.load(q_ptr + cell * D + d_D, mask=in_D, other=0.0).to(tl.float32) * factor
    k_ptr += row * k_row + (head // GROUP) * k_head
    v_ptr += row * v_row + (head // GROUP) * v_head

    m_N = tl.full([BN], LOWEST, tl.float32)
    l_N = tl.zeros([BN], tl.float32)
    o_ND = tl.zeros([BN, BD], tl.float32)
    for start in range(0, length, BN):
        at_N = start + n_N
        mask = (at_N < length)[:, None] & in_D[None, :]
        at_N1 = at_N.to(tl.int64)[:, None]
        k_ND = tl.load(k_ptr + at_N1 * k_slot + d_D[None, :], mask=mask, other=0.0)
        v_ND = tl.load(v_ptr + at_N1 * v_slot + d_D[None, :], mask=mask, other=0.0)
        s_N = tl.sum(k_ND.to(tl.float32) * q_D[None, :], axis=1)
        if CAPPED:
            s_N = tanh(s_N) * cap
        s_N = tl.where(at_N < length, s_N, float("-inf"))
        top_N = tl.maximum(m_N, s_N)
        shrink_N, p_N = tl.exp2(m_N - top_N), tl.exp2(s_N - top_N)
        m_N, l_N = top_N, l_N * shrink_N + p_N
        o_ND = o_ND * shrink_N[:, None] + p_N[:, None] * v_ND.to(tl.float32)

    m = tl.max(m_N, axis=0)
    weight_N = tl.exp2(m_N - m)
    total = tl.sum(l_N * weight_N, axis=0)
    local_D = tl.sum(o_ND * weight_N[:, None], axis=0) / total
    log_sum = (m + tl.log2(total)) * LN_2
    rest = tl.load(rest_ptr + row * rest_row + head * rest_head).to(tl.float32)
    share = tl.where(tl.load(outside_ptr + row), tl.sigmoid(log_sum - rest), 1.0)
    other_D = tl.load(other_ptr + cell * D + d_D, mask=in_D, other=0.0).to(tl.float32)
    y_D = share * local_D + (1 - share) * other_D
    tl.store(y_ptr + cell * D + d_D, y_D.to(y_ptr.dtype.element_ty), mask=in_D)
