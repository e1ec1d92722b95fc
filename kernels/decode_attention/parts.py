"""What the kernels of ``decode_attention`` share: a part's keys, the token's own, and the sums.

N keys of a block, D channels, P parts. Exponentials are of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_heads.kernels import heads_of
from ltconvert.kernels.linear_kl.rows import tanh
from ltconvert.kernels.overlap_kernels import fetch

# Below every score, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def share(length_ptr, slots, part, parts, BN: tl.constexpr):
    """First and past-the-last key of a part: whole blocks, as even as these allow.

    An earlier kernel of the same step has left the length; it is read past the first-level cache,
    which may still hold that of the step before.
    """
    length = tl.minimum(tl.load(length_ptr, cache_modifier=".cg"), slots).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length, parts), BN) * BN
    begin = part * each
    return begin, tl.minimum(begin + each, length)


@triton.jit
def fetch_keys(
    k_ptr, v_ptr, begin, end, D: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Bring the first keys and values of a part, side by side, into the second-level cache."""
    count = tl.where(begin < 0, 0, tl.maximum(tl.minimum(end - begin, KEYS), 0)) * D
    fetch(k_ptr + begin.to(tl.int64) * D, count, OVERLAP)
    fetch(v_ptr + begin.to(tl.int64) * D, count, OVERLAP)


@triton.jit
def own(
    k_from, v_from, first, d_D, row, cos_ptr, sin_ptr, weight_ptr, eps, offset,
    k_to, v_to, mine, WIDTH: tl.constexpr, D: tl.constexpr, BW: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The token's key and value as the cache holds them; written there where that is ``mine``."""
    in_D = d_D < D
    k_D = heads_of(
        k_from, first, d_D, in_D, row, cos_ptr, sin_ptr, weight_ptr, eps, offset,
        WIDTH, D, BW, NORM,
    ).to(k_to.dtype.element_ty)  # fmt: skip
    v_D = tl.load(v_from + first + d_D, mask=in_D, other=0.0)
    written_D = d_D < tl.where(mine, D, 0)
    tl.store(k_to + d_D, k_D, mask=written_D)
    tl.store(v_to + d_D, v_D, mask=written_D)
    return k_D.to(tl.float32), v_D.to(tl.float32)


@triton.jit
def block(ptr, n_N, in_N, d_D, stride, D: tl.constexpr, CACHE: tl.constexpr):
    """Keys or values n [N, D] as they are stored, zeros in place of those left out.

    CACHE is `tl.load`'s modifier, to be given: a text as a default does not compile.
    """
    at_ND = n_N.to(tl.int64)[:, None] * stride + d_D[None, :]
    mask = in_N[:, None] & (d_D < D)[None, :]
    return tl.load(ptr + at_ND, mask=mask, other=0.0, cache_modifier=CACHE)


@triton.jit
def capped(score, cap, CAPPED: tl.constexpr):
    if CAPPED:
        score = tanh(score) * cap
    return score


@triton.jit
def summed(m_N, l_N, o_ND):
    """Softmaxes of their own in one: the maximum, the weights' sum, and outputs [D] times that."""
    m = tl.max(m_N, axis=0)
    weight_N = tl.exp2(m_N - m)
    return m, tl.sum(l_N * weight_N, axis=0), tl.sum(o_ND * weight_N[:, None], axis=0)


@triton.jit
def together(o_ptr, m_ptr, l_ptr, d_D, parts, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr):
    """Channels of a query head's output from what its parts have left.

    Read past the first-level cache: it is another program's work of a moment ago.
    """
    p_P = tl.arange(0, BP)
    m_P = tl.full([BP], LOWEST, tl.float32)
    l_P = tl.zeros([BP], tl.float32)
    o_PD = tl.zeros([BP, BD], tl.float32)
    for first in range(0, parts, BP):
        n_P = first + p_P
        in_P = n_P < parts
        part_P = tl.load(m_ptr + n_P, mask=in_P, other=LOWEST, cache_modifier=".cg")
        sum_P = tl.load(l_ptr + n_P, mask=in_P, other=0.0, cache_modifier=".cg")
        at_PD = n_P[:, None] * D + d_D[None, :]
        mask = in_P[:, None] & (d_D < D)[None, :]
        x_PD = tl.load(o_ptr + at_PD, mask=mask, other=0.0, cache_modifier=".cg")
        top_P = tl.maximum(m_P, part_P)
        shrink_P, weight_P = tl.exp2(m_P - top_P), tl.exp2(part_P - top_P)
        m_P, l_P = top_P, l_P * shrink_P + sum_P * weight_P
        o_PD = o_PD * shrink_P[:, None] + x_PD * weight_P[:, None]
    _, total, o_D = summed(m_P, l_P, o_PD)
    return o_D / total


@triton.jit
def is_last(arrived_ptr, parts):
    """Whether the other parts have left their sums before this one; to be asked once.

    Threads write, then meet, then one of them counts: it releases what all have written, and the
    last to count acquires it. The count is 0 again for the next kernel. That one may have begun,
    but comes here behind its turn, as every program came here behind its own: one count and one
    place for sums do for all kernels that follow each other in a stream.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last
