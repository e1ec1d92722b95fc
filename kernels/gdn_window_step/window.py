"""The window's part of ``gdn_window_step``: its keys and values, and attention of one query.

What earlier steps have left in the ring is read first; the new key and value come from the
projections, and what their slot held before counts as nothing.

N keys of a block, D channels. Exponentials are of 2.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_attention.parts import LOWEST, block, capped
from ltconvert.kernels.gdn_step.kernels import handed_on
from ltconvert.kernels.overlap_kernels import fetch

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _entries(ptr, row, d_D, D: tl.constexpr):
    """Row of a table [D] as it is stored; zeros where there is none."""
    entries_D = tl.zeros([d_D.shape[0]], tl.float32)
    if ptr is not None:
        entries_D = tl.load(ptr + row * D + d_D, mask=d_D < D, other=0.0, cache_modifier=".cg")
    return entries_D


@triton.jit
def _turned(x_ptr, cos_D, sin_D, d_D, D: tl.constexpr, ROPE: tl.constexpr):
    """A head of q or k at its position, [D] in fp32."""
    x_D = tl.load(x_ptr + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    if ROPE:
        half_D = tl.load(x_ptr + (d_D + D // 2) % D, mask=d_D < D, other=0.0).to(tl.float32)
        half_D = tl.where(d_D < D // 2, -half_D, half_D)
        x_D = x_D * cos_D.to(tl.float32) + half_D * sin_D.to(tl.float32)
    return x_D


@triton.jit
def _scores(k_ND, q_D, counts_N, cap, CAPPED: tl.constexpr):
    s_N = capped(tl.sum(k_ND.to(tl.float32) * q_D[None, :], axis=1), cap, CAPPED)
    return tl.where(counts_N, s_N, float("-inf"))


@triton.jit
def _counted(v_ND, s_N):
    """Values in fp32, 0 where a slot does not count: a weight of 0 is not enough beside NaN."""
    counts_N = s_N > float("-inf")
    return tl.where(counts_N[:, None], v_ND.to(tl.float32), 0.0)


@triton.jit
def _joined(m, l, o, m2, l2, o2):  # noqa: E741
    """Two softmaxes in one: maximum, the weights' sum, and the output times that."""
    top = tl.maximum(m, m2)
    weight, weight2 = tl.exp2(m - top), tl.exp2(m2 - top)
    return top, l * weight + l2 * weight2, o * weight + o2 * weight2


@triton.jit
def read_ahead(
    row, keys_ptr, values_ptr, slot_ptr, length_ptr, outside_ptr, cos_ptr, sin_ptr,
    slots, key_slot, value_slot, d_D,
    D: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """What earlier steps and kernels have left for the window, of keys and values AHEAD blocks."""
    n_N = tl.arange(0, BN)
    k_NDs, v_NDs = (), ()
    for n in tl.static_range(AHEAD):
        at_N = n * BN + n_N  # all slots: to wait for the length would take longer
        k_NDs = k_NDs + (block(keys_ptr, at_N, at_N < slots, d_D, key_slot, D, ".cg"),)
        v_NDs = v_NDs + (block(values_ptr, at_N, at_N < slots, d_D, value_slot, D, ".cg"),)
    if FETCH:
        fetch(keys_ptr + AHEAD * BN * D, (slots - AHEAD * BN) * D, OVERLAP)
        fetch(values_ptr + AHEAD * BN * D, (slots - AHEAD * BN) * D, OVERLAP)
    slot = tl.load(slot_ptr + row, cache_modifier=".cg").to(tl.int32)
    length = tl.minimum(tl.load(length_ptr + row, cache_modifier=".cg"), slots).to(tl.int32)
    outside = tl.load(outside_ptr + row, cache_modifier=".cg")
    cos_D, sin_D = _entries(cos_ptr, row, d_D, D), _entries(sin_ptr, row, d_D, D)
    return k_NDs, v_NDs, slot, length, outside, cos_D, sin_D


@triton.jit
def attend(
    k_NDs, v_NDs, slot, length, outside, cos_D, sin_D, qkv_ptr, keys_ptr, values_ptr, rest_ptr,
    factor, cap, slots, key_slot, value_slot, d_D,
    H: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, CAPPED: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, AHEAD: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The window's output [D] times its share of the softmax, and the share of what lies outside.

    Key and value are written into the ring. LONG: it has more than AHEAD blocks.
    FULL: where registers are, the query is handed on through shared memory; else threads read what
    they need of it for themselves.
    """
    n_N, in_D = tl.arange(0, BN), d_D < D
    rest = tl.load(rest_ptr).to(tl.float32)
    q_D = _turned(qkv_ptr, cos_D, sin_D, d_D, D, ROPE) * factor
    # As the ring holds them, where later steps find them.
    k_D = _turned(qkv_ptr + H * D, cos_D, sin_D, d_D, D, ROPE).to(keys_ptr.dtype.element_ty)
    v_D = tl.load(qkv_ptr + 2 * H * D + d_D, mask=in_D, other=0.0)
    v_D = v_D.to(values_ptr.dtype.element_ty)
    kept_D = d_D < tl.where(slot < slots, D, 0)  # a token too many is lost, and nothing else
    tl.store(keys_ptr + slot.to(tl.int64) * key_slot + d_D, k_D, mask=kept_D)
    tl.store(values_ptr + slot.to(tl.int64) * value_slot + d_D, v_D, mask=kept_D)
    own = capped(tl.sum(k_D.to(tl.float32) * q_D, axis=0), cap, CAPPED)
    if FULL:
        q_D = handed_on(q_D, BK)

    # Every row n has a softmax of its own over the keys that pass it, so that threads exchange
    # nothing but scores until the end.
    m_N = tl.full([BN], LOWEST, tl.float32)
    l_N = tl.zeros([BN], tl.float32)
    o_ND = tl.zeros([BN, BK], tl.float32)
    if LONG:
        for start in tl.range(AHEAD * BN, slots, BN, num_stages=STAGES):
            at_N = start + n_N
            counts_N = (at_N < length) & (at_N != slot)
            k_ND = block(keys_ptr, at_N, counts_N, d_D, key_slot, D, ".cg")
            v_ND = block(values_ptr, at_N, counts_N, d_D, value_slot, D, ".cg")
            s_N = _scores(k_ND, q_D, counts_N, cap, CAPPED)
            top_N = tl.maximum(m_N, s_N)
            shrink_N, p_N = tl.exp2(m_N - top_N), tl.exp2(s_N - top_N)
            m_N, l_N = top_N, l_N * shrink_N + p_N
            o_ND = o_ND * shrink_N[:, None] + p_N[:, None] * v_ND.to(tl.float32)
    scores, top_N = (), m_N
    for n in tl.static_range(AHEAD):
        at_N = n * BN + n_N
        counts_N = (at_N < length) & (at_N != slot)
        scores = scores + (_scores(k_NDs[n], q_D, counts_N, cap, CAPPED),)
        top_N = tl.maximum(top_N, scores[n])
    if LONG:
        shrink_N = tl.exp2(m_N - top_N)
        l_N, o_ND = l_N * shrink_N, o_ND * shrink_N[:, None]
    for n in tl.static_range(AHEAD):
        p_N = tl.exp2(scores[n] - top_N)
        l_N += p_N
        o_ND += p_N[:, None] * _counted(v_NDs[n], scores[n])
    # One exchange for all three, though each channel then has the same maximum and sum.
    m_ND = tl.broadcast_to(top_N[:, None], [BN, BK])
    l_ND = tl.broadcast_to(l_N[:, None], [BN, BK])
    m_D, l_D, o_D = tl.reduce((m_ND, l_ND, o_ND), 0, _joined)
    m, total = tl.max(m_D, axis=0), tl.max(l_D, axis=0)
    m, total, local_D = _joined(m, total, o_D, own, 1.0, v_D.to(tl.float32))
    log_sum = (m + tl.log2(total)) * LN_2
    share = tl.where(outside, tl.sigmoid(log_sum - rest), 1.0)
    return local_D * (share / total), 1 - share
