"""Triton kernels of ``decode_attention``: a program for each key/value head and part of its keys.

A program's part follows from the row's length, which it reads itself: every part has work however
many slots are empty, and no slot behind the length is read. What parts leave, the sums `o` and `l`
of weights relative to a maximum `m`, a second kernel puts together. Exponentials are of 2.

R query heads of a program, N keys of a block, D channels, P parts. Query heads of a key/value head:
GROUP, of which a program has up to 16; SETS programs share a key/value head and part then.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import tanh
from ltconvert.kernels.overlap_kernels import fetch, let_go, take_turn

# Below every score, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def _share(length_ptr, slots, part, parts, BN: tl.constexpr):
    """First and past-the-last key of a part: whole blocks, as even as these allow.

    An earlier kernel of the same step has left the length; it is read past the first-level cache,
    which may still hold that of the step before.
    """
    length = tl.minimum(tl.load(length_ptr, cache_modifier=".cg"), slots).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, parts), BN) * BN
    begin = part * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def _fetch(k_ptr, v_ptr, begin, end, D: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring the first keys and values of a part, side by side, into the second-level cache."""
    count = tl.where(begin < 0, 0, tl.maximum(tl.minimum(end - begin, KEYS), 0)) * D
    fetch(k_ptr + begin.to(tl.int64) * D, count, OVERLAP)
    fetch(v_ptr + begin.to(tl.int64) * D, count, OVERLAP)


@triton.jit
def _block(ptr, n_N, d_D, end, stride, D: tl.constexpr):
    """Keys or values n [N, D] as they are stored, zeros past the end."""
    mask = (n_N < end)[:, None] & (d_D < D)[None, :]
    at_ND = n_N.to(tl.int64)[:, None] * stride + d_D[None, :]
    return tl.load(ptr + at_ND, mask=mask, other=0.0)


@triton.jit
def _capped(score, cap, CAPPED: tl.constexpr):
    if CAPPED:
        score = tanh(score) * cap
    return score


@triton.jit(do_not_specialize=["parts", "slots"])
def single_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, o_ptr, m_ptr, l_ptr, factor, cap, parts, slots,
    k_row, k_head, k_slot, v_row, v_head, v_slot,
    H: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head a key/value head. Every row n of a block has a softmax of its own over the
    keys that pass it, so that threads exchange nothing but scores until the end."""
    let_go(OVERLAP)
    pid = tl.program_id(0)
    part, cell = pid % parts, (pid // parts).to(tl.int64)
    row, head = cell // H, cell % H
    begin, end = _share(length_ptr + row, slots, part, parts, BN)
    n_N, d_D = tl.arange(0, BN), tl.arange(0, BD)
    k_ptr += row * k_row + head * k_head
    v_ptr += row * v_row + head * v_head
    if FETCH:
        _fetch(k_ptr, v_ptr, begin, end, D, FETCH, OVERLAP)
    take_turn(OVERLAP)
    q_D = tl.load(q_ptr + cell * D + d_D, mask=d_D < D, other=0.0).to(tl.float32) * factor

    m_N = tl.full([BN], LOWEST, tl.float32)
    l_N = tl.zeros([BN], tl.float32)
    o_ND = tl.zeros([BN, BD], tl.float32)
    # Without matrix units nothing would be loaded ahead unless asked for here.
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        k_ND = _block(k_ptr, start + n_N, d_D, end, k_slot, D)
        v_ND = _block(v_ptr, start + n_N, d_D, end, v_slot, D)
        s_N = _capped(tl.sum(k_ND.to(tl.float32) * q_D[None, :], axis=1), cap, CAPPED)
        s_N = tl.where(start + n_N < end, s_N, float("-inf"))
        top_N = tl.maximum(m_N, s_N)
        shrink_N, p_N = tl.exp2(m_N - top_N), tl.exp2(s_N - top_N)
        m_N, l_N = top_N, l_N * shrink_N + p_N
        o_ND = o_ND * shrink_N[:, None] + p_N[:, None] * v_ND.to(tl.float32)

    m = tl.max(m_N, axis=0)
    weight_N = tl.exp2(m_N - m)
    total = tl.sum(l_N * weight_N, axis=0)
    o_D = tl.sum(o_ND * weight_N[:, None], axis=0)
    at = cell * parts + part
    if WHOLE:
        o_D = o_D / total
    else:
        tl.store(m_ptr + at, m)
        tl.store(l_ptr + at, total)
    tl.store(o_ptr + at * D + d_D, o_D.to(o_ptr.dtype.element_ty), mask=d_D < D)


@triton.jit(do_not_specialize=["parts", "slots"])
def grouped_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, o_ptr, m_ptr, l_ptr, factor, cap, parts, slots,
    k_row, k_head, k_slot, v_row, v_head, v_slot,
    H: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, SETS: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Several query heads a key/value head: keys and values go through matrix units once."""
    let_go(OVERLAP)
    pid = tl.program_id(0)
    part, cell = pid % parts, pid // parts
    first, cell = (cell % SETS) * R, (cell // SETS).to(tl.int64)
    row, head = cell // (H // GROUP), cell % (H // GROUP)
    begin, end = _share(length_ptr + row, slots, part, parts, BN)
    r_R, n_N, d_D = first + tl.arange(0, R), tl.arange(0, BN), tl.arange(0, BD)
    in_RD = (r_R < GROUP)[:, None] & (d_D < D)[None, :]
    h_R = cell * GROUP + r_R  # query heads of a row are in the order of their key/value heads
    k_ptr += row * k_row + head * k_head
    v_ptr += row * v_row + head * v_head
    if FETCH:
        _fetch(k_ptr, v_ptr, begin, end, D, FETCH, OVERLAP)
    take_turn(OVERLAP)
    q_RD = tl.load(q_ptr + h_R[:, None] * D + d_D[None, :], mask=in_RD, other=0.0)

    m_R = tl.full([R], LOWEST, tl.float32)
    l_R = tl.zeros([R], tl.float32)
    o_RD = tl.zeros([R, BD], tl.float32)
    for start in range(begin, end, BN):
        k_ND = _block(k_ptr, start + n_N, d_D, end, k_slot, D)
        v_ND = _block(v_ptr, start + n_N, d_D, end, v_slot, D)
        s_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * factor
        s_RN = _capped(s_RN, cap, CAPPED)
        s_RN = tl.where((start + n_N < end)[None, :], s_RN, float("-inf"))
        top_R = tl.maximum(m_R, tl.max(s_RN, axis=1))
        shrink_R, p_RN = tl.exp2(m_R - top_R), tl.exp2(s_RN - top_R[:, None])
        m_R, l_R = top_R, l_R * shrink_R + tl.sum(p_RN, axis=1)
        o_RD = tl.dot(
            p_RN.to(v_ND.dtype), v_ND, o_RD * shrink_R[:, None], input_precision=PRECISION
        )

    at_R = h_R * parts + part
    if WHOLE:
        o_RD = o_RD / l_R[:, None]
    else:
        tl.store(m_ptr + at_R, m_R, mask=r_R < GROUP)
        tl.store(l_ptr + at_R, l_R, mask=r_R < GROUP)
    o_RD = o_RD.to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + at_R[:, None] * D + d_D[None, :], o_RD, mask=in_RD)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(
    o_ptr, m_ptr, l_ptr, y_ptr, parts,
    D: tl.constexpr, BD: tl.constexpr, MOST: tl.constexpr, BP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query head and block of channels, over all parts; MOST is at least their number."""
    let_go(OVERLAP)
    cell = (tl.program_id(0) // tl.cdiv(D, BD)).to(tl.int64)
    d_D = (tl.program_id(0) % tl.cdiv(D, BD)) * BD + tl.arange(0, BD)
    m_ptr += cell * parts
    l_ptr += cell * parts
    o_ptr += cell * parts * D
    p_P = tl.arange(0, MOST)
    take_turn(OVERLAP)
    m_P = tl.load(m_ptr + p_P, mask=p_P < parts, other=LOWEST)
    l_P = tl.load(l_ptr + p_P, mask=p_P < parts, other=0.0)
    xs, ms = (), ()
    for first in tl.static_range(0, MOST, BP):  # all of them on their way before any is needed
        n_P = first + tl.arange(0, BP)
        mask = (n_P < parts)[:, None] & (d_D < D)[None, :]
        ms = ms + (tl.load(m_ptr + n_P, mask=n_P < parts, other=LOWEST),)
        xs = xs + (tl.load(o_ptr + n_P[:, None] * D + d_D[None, :], mask=mask, other=0.0),)
    m = tl.max(m_P, axis=0)
    total = tl.sum(l_P * tl.exp2(m_P - m), axis=0)
    o_PD = tl.zeros([BP, BD], tl.float32)
    for n in tl.static_range(MOST // BP):
        o_PD += tl.exp2(ms[n] - m)[:, None] * xs[n]
    y_D = tl.sum(o_PD, axis=0) / total
    tl.store(y_ptr + cell * D + d_D, y_D.to(y_ptr.dtype.element_ty), mask=d_D < D)
