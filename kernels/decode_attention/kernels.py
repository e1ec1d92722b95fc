"""Triton kernels of ``decode_attention``: a program for each key/value head and part of its keys.

A program's part follows from the row's length, which it reads itself: every part has work however
many slots are empty, and no slot behind the length is read. What parts leave are the sums `o` and
`l` of weights relative to a maximum `m`. Exponentials are of 2.

With OWN the queries, a key and a value come as the token's projections. Every program makes its
queries and the key, which is less work than waiting for another kernel that does; the program whose
part has the token's slot puts key and value there and begins its sums with them.

R query heads of a program, N keys of a block, D channels, P parts. Query heads of a key/value head:
GROUP, of which a program has up to 16; SETS programs share a key/value head and part then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_attention.parts import (
    LOWEST,
    block,
    capped,
    fetch_keys,
    is_last,
    own,
    share,
    summed,
    together,
)
from ltconvert.kernels.decode_heads.kernels import heads_of
from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit(do_not_specialize=["parts", "slots"])
def single_kernel(
    x_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slot_ptr, k_ptr, v_ptr, length_ptr,
    o_ptr, m_ptr, l_ptr, y_ptr, factor, cap, eps, offset, parts, slots, x_row,
    k_row, k_head, k_slot, v_row, v_head, v_slot, arrived_ptr,
    H: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr, CAPPED: tl.constexpr,
    WHOLE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    BP: tl.constexpr, STAGES: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head a key/value head. Every row n of a block has a softmax of its own over the
    keys that pass it, so that threads exchange nothing but scores until the end."""
    let_go(OVERLAP)
    pid = tl.program_id(0)
    part, cell = pid % parts, (pid // parts).to(tl.int64)
    row, head = cell // H, cell % H
    begin, end = share(length_ptr + row, slots, part, parts, BN)
    n_N, d_D = tl.arange(0, BN), tl.arange(0, BD)
    x_ptr += row * x_row
    k_ptr += row * k_row + head * k_head
    v_ptr += row * v_row + head * v_head
    if FETCH:
        fetch_keys(k_ptr, v_ptr, begin, end, D, FETCH, OVERLAP)
    take_turn(OVERLAP)
    q_D = heads_of(
        x_ptr, head * D, d_D, d_D < D, row, cos_ptr, sin_ptr, q_weight_ptr, eps, offset,
        H * D, D, BW, NORM,
    )  # fmt: skip
    q_D = q_D.to(x_ptr.dtype.element_ty).to(tl.float32) * factor

    m_N = tl.full([BN], LOWEST, tl.float32)
    l_N = tl.zeros([BN], tl.float32)
    o_ND = tl.zeros([BN, BD], tl.float32)
    if OWN:
        slot = tl.load(slot_ptr + row).to(tl.int32)
        mine = (begin <= slot) & (slot < end)
        k_D, v_D = own(
            x_ptr + H * D, x_ptr + 2 * H * D, head * D, d_D, row, cos_ptr, sin_ptr, k_weight_ptr,
            eps, offset, k_ptr + slot.to(tl.int64) * k_slot, v_ptr + slot.to(tl.int64) * v_slot,
            mine, H * D, D, BW, NORM,
        )  # fmt: skip
        one_N = (n_N == 0) & mine
        m_N = tl.where(one_N, capped(tl.sum(q_D * k_D, axis=0), cap, CAPPED), m_N)
        l_N = tl.where(one_N, 1.0, l_N)
        o_ND = tl.where(one_N[:, None], v_D[None, :], o_ND)
    # Without matrix units nothing would be loaded ahead unless asked for here.
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        at_N = start + n_N
        in_N = at_N < end
        if OWN:
            in_N &= at_N != slot
        k_ND = block(k_ptr, at_N, in_N, d_D, k_slot, D, "")
        v_ND = block(v_ptr, at_N, in_N, d_D, v_slot, D, "")
        s_N = capped(tl.sum(k_ND.to(tl.float32) * q_D[None, :], axis=1), cap, CAPPED)
        s_N = tl.where(in_N, s_N, float("-inf"))
        top_N = tl.maximum(m_N, s_N)
        shrink_N, p_N = tl.exp2(m_N - top_N), tl.exp2(s_N - top_N)
        m_N, l_N = top_N, l_N * shrink_N + p_N
        o_ND = o_ND * shrink_N[:, None] + p_N[:, None] * v_ND.to(tl.float32)

    m, total, o_D = summed(m_N, l_N, o_ND)
    y_ptr += cell * D
    if WHOLE:
        tl.store(y_ptr + d_D, (o_D / total).to(y_ptr.dtype.element_ty), mask=d_D < D)
    else:
        at = cell * parts + part
        tl.store(m_ptr + at, m)
        tl.store(l_ptr + at, total)
        tl.store(o_ptr + at * D + d_D, o_D, mask=d_D < D)
        if arrived_ptr is not None:  # noqa: SIM102 (this one is decided by the compiler)
            if is_last(arrived_ptr + cell, parts):
                at = cell * parts
                y_D = together(o_ptr + at * D, m_ptr + at, l_ptr + at, d_D, parts, D, BD, BP)
                tl.store(y_ptr + d_D, y_D.to(y_ptr.dtype.element_ty), mask=d_D < D)


@triton.jit(do_not_specialize=["parts", "slots"])
def grouped_kernel(
    x_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slot_ptr, k_ptr, v_ptr, length_ptr,
    o_ptr, m_ptr, l_ptr, y_ptr, factor, cap, eps, offset, parts, slots, x_row,
    k_row, k_head, k_slot, v_row, v_head, v_slot,
    H: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr, CAPPED: tl.constexpr,
    WHOLE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, SETS: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Several query heads a key/value head: keys and values go through matrix units once."""
    let_go(OVERLAP)
    G: tl.constexpr = H // GROUP
    pid = tl.program_id(0)
    part, cell = pid % parts, pid // parts
    first, cell = (cell % SETS) * R, (cell // SETS).to(tl.int64)
    row, head = cell // G, cell % G
    begin, end = share(length_ptr + row, slots, part, parts, BN)
    r_R, n_N, d_D = first + tl.arange(0, R), tl.arange(0, BN), tl.arange(0, BD)
    in_RD = (r_R < GROUP)[:, None] & (d_D < D)[None, :]
    x_ptr += row * x_row
    k_ptr += row * k_row + head * k_head
    v_ptr += row * v_row + head * v_head
    if FETCH:
        fetch_keys(k_ptr, v_ptr, begin, end, D, FETCH, OVERLAP)
    take_turn(OVERLAP)
    q_RD = heads_of(
        x_ptr, ((head * GROUP + r_R) * D)[:, None], d_D[None, :], in_RD, row, cos_ptr, sin_ptr,
        q_weight_ptr, eps, offset, H * D, D, BW, NORM,
    ).to(x_ptr.dtype.element_ty)  # fmt: skip

    m_R = tl.full([R], LOWEST, tl.float32)
    l_R = tl.zeros([R], tl.float32)
    o_RD = tl.zeros([R, BD], tl.float32)
    if OWN:
        slot = tl.load(slot_ptr + row).to(tl.int32)
        mine = (begin <= slot) & (slot < end)
        k_D, v_D = own(
            x_ptr + H * D, x_ptr + (H + G) * D, head * D, d_D, row, cos_ptr, sin_ptr,
            k_weight_ptr, eps, offset, k_ptr + slot.to(tl.int64) * k_slot,
            v_ptr + slot.to(tl.int64) * v_slot, mine, G * D, D, BW, NORM,
        )  # fmt: skip
        s_R = capped(tl.sum(q_RD.to(tl.float32) * k_D[None, :], axis=1) * factor, cap, CAPPED)
        m_R = tl.where(mine, s_R, m_R)
        l_R += tl.where(mine, 1.0, 0.0)
        o_RD += tl.where(mine, v_D, 0.0)[None, :]
    for start in range(begin, end, BN):
        at_N = start + n_N
        in_N = at_N < end
        if OWN:
            in_N &= at_N != slot
        k_ND = block(k_ptr, at_N, in_N, d_D, k_slot, D, "")
        v_ND = block(v_ptr, at_N, in_N, d_D, v_slot, D, "")
        s_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * factor
        s_RN = tl.where(in_N[None, :], capped(s_RN, cap, CAPPED), float("-inf"))
        top_R = tl.maximum(m_R, tl.max(s_RN, axis=1))
        shrink_R, p_RN = tl.exp2(m_R - top_R), tl.exp2(s_RN - top_R[:, None])
        m_R, l_R = top_R, l_R * shrink_R + tl.sum(p_RN, axis=1)
        o_RD = tl.dot(
            p_RN.to(v_ND.dtype), v_ND, o_RD * shrink_R[:, None], input_precision=PRECISION
        )

    h_R = cell * GROUP + r_R  # query heads of a row are in the order of their key/value heads
    if WHOLE:
        o_RD = (o_RD / l_R[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + h_R[:, None] * D + d_D[None, :], o_RD, mask=in_RD)
    else:
        at_R = h_R * parts + part
        tl.store(m_ptr + at_R, m_R, mask=r_R < GROUP)
        tl.store(l_ptr + at_R, l_R, mask=r_R < GROUP)
        tl.store(o_ptr + at_R[:, None] * D + d_D[None, :], o_RD, mask=in_RD)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(
    o_ptr, m_ptr, l_ptr, y_ptr, parts,
    D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head and block of channels, over all parts."""
    let_go(OVERLAP)
    cell = (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64)
    d_D = (tl.program_id(0) % tl.cdiv(D, BD)) * BD + tl.arange(0, BD)
    at = cell * parts
    take_turn(OVERLAP)
    y_D = together(o_ptr + at * D, m_ptr + at, l_ptr + at, d_D, parts, D, BD, BP)
    tl.store(y_ptr + cell * D + d_D, y_D.to(y_ptr.dtype.element_ty), mask=d_D < D)
