"""What every chunkwise Triton kernel shares: tiles, the decays of a chunk, the UT transform.

A program works on one chunk of C tokens of one row and head. Tensors of the caller are [B, T, H, D]
with strides; what the kernels keep between them is [B * H, chunks, ...], filled up to whole chunks
and blocks, so that it needs no masks.

Decays are a number a token and head, or with PER_CHANNEL one for each key channel. G is the running
sum of their logarithms within the chunk. Without decay they are zeros: with constants instead, key
gradients were wrong on an H200 under Triton 3.6, as accumulators went from one product straight
into the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels import chunkwise

# exp of these is 0 in fp32; they keep -inf - -inf out, and running sums short of coarse steps.
LEAST_HEAD = tl.constexpr(-1000.0)  # summed in fp64
LEAST_CHANNEL = tl.constexpr(-90.0)  # summed in fp32, for fp32 inputs in fp64
NORM_EPS = tl.constexpr(chunkwise.NORM_EPS)


@triton.jit
def tile(ptr, rows, columns, stride, row_limit, column_limit):
    """[rows, columns] of a matrix with contiguous rows; zeros past the limits."""
    mask = (rows[:, None] < row_limit) & (columns[None, :] < column_limit)
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def tile_t(ptr, rows, columns, stride, row_limit, column_limit):
    """The same, transposed: [columns, rows]."""
    mask = (rows[None, :] < row_limit) & (columns[:, None] < column_limit)
    return tl.load(ptr + rows[None, :] * stride + columns[:, None], mask=mask, other=0.0)


@triton.jit
def save(ptr, value, rows, columns, stride, row_limit, column_limit):
    """Store [rows, columns] into a matrix with contiguous rows, within the limits."""
    mask = (rows[:, None] < row_limit) & (columns[None, :] < column_limit)
    value = value.to(ptr.dtype.element_ty)
    tl.store(ptr + rows[:, None] * stride + columns[None, :], value, mask=mask)


@triton.jit
def written(
    u_ptr, v_ptr, v_stride, index, columns, rows, V,
    C: tl.constexpr, VP: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """What the tokens of chunk `index` write, [C, BV]: corrections U, or without them values."""
    i = tl.arange(0, C)
    if DELTA:
        u = tl.load(u_ptr + (index * C + i[:, None]) * VP + columns[None, :])
    else:
        u = tile(v_ptr, i, columns, v_stride, rows, V)
    return u


@triton.jit
def sums_of(sum_ptr, index, C: tl.constexpr, KP: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Where the running sums of chunk `index` lie."""
    return sum_ptr + index * (C * KP if PER_CHANNEL else C)


@triton.jit
def segment_of(counts_ptr, row, chunk, T, C: tl.constexpr):
    """Segment counts of a chunk: (each token [C], the token before the chunk, the last token)."""
    counts_ptr += row * T
    start = chunk * C
    here = tl.load(counts_ptr + tl.minimum(start + tl.arange(0, C), T - 1))
    before = tl.load(counts_ptr + tl.maximum(start - 1, 0))
    before = tl.where(start == 0, 0, before)
    last = tl.load(counts_ptr + tl.minimum(start + C, T) - 1)
    return here, before, last


@triton.jit
def living(counts_ptr, row, chunk, T, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """0 or 1: the incoming state lives at each token [C], each token at the end [C], both []."""
    if SEGMENTS:
        here, before, last = segment_of(counts_ptr, row, chunk, T, C)
        into = (here == before).to(tl.float32)
        out = (here == last).to(tl.float32)
        through = (before == last).to(tl.float32)
    else:
        into = tl.full([C], 1.0, tl.float32)
        out = into
        through = 1.0
    return into, out, through


@triton.jit
def head_decays(
    sum_ptr, counts_ptr, row, chunk, T,
    C: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Decay of the incoming state up to each token [C], from each token to the end [C], through [].

    With PER_CHANNEL only the segments' part, 0 or 1: the rest is on the tiles.
    """
    into, out, through = living(counts_ptr, row, chunk, T, C, SEGMENTS)
    if not PER_CHANNEL:
        sums = tl.load(sum_ptr + tl.arange(0, C))
        total = tl.load(sum_ptr + C - 1)
        into *= tl.exp(sums.to(tl.float32))
        out *= tl.exp((total - sums).to(tl.float32))
        through *= tl.exp(total.to(tl.float32))
    return into, out, through


@triton.jit
def between(
    sum_ptr, counts_ptr, row, chunk, T,
    C: tl.constexpr, PER_CHANNEL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """[C, C]: decay from token j (column) to i (row), 0 above the diagonal and across segments.

    With PER_CHANNEL 0 or 1.
    """
    i = tl.arange(0, C)
    read = i[:, None] >= i[None, :]
    if SEGMENTS:
        here, _, _ = segment_of(counts_ptr, row, chunk, T, C)
        read = read & (here[:, None] == here[None, :])
    if not PER_CHANNEL:
        sums = tl.load(sum_ptr + i)
        # Differences in fp64: a strong decay must not cost those after it their digits.
        gap = (sums[:, None] - sums[None, :]).to(tl.float32)
        decay = tl.exp(tl.where(read, gap, -float("inf")))
    else:
        decay = read.to(tl.float32)
    return decay


@triton.jit
def level_factor(sum_ptr, columns, width, level, C: tl.constexpr):
    """Decay of each token [C, D] to or from the middle of its block of 2^(level + 1) tokens.

    For a token i of a block's second half and j of its first, decay from j to i is the product of
    their factors, and neither is above 1: exp(G_i - G_j) itself cannot be split safely otherwise.
    Every pair j < i is in the two halves of one block at exactly one level.
    """
    i = tl.arange(0, C)
    middle = ((i >> (level + 1)) << (level + 1)) + (1 << level) - 1  # last token of the first half
    here = tl.load(sum_ptr + i[:, None] * width + columns[None, :])
    there = tl.load(sum_ptr + middle[:, None] * width + columns[None, :])
    return tl.exp(-tl.abs(here - there).to(tl.float32))


@triton.jit
def level_mask(level, C: tl.constexpr):
    """[C, C]: row in the second half and column in the first half of one block of that level."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)


@triton.jit
def invert(a, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 for a strictly lower [C, C], by merging inverted blocks into ones twice the size.

    [[P, 0], [M, Q]]^-1 = [[P^-1, 0], [-Q^-1 M P^-1, Q^-1]]. Unlike a series in powers of a, whose
    terms grow like binomials and cancel, it is as stable as substitution. HALF: products of fp16
    operands, which have the digits of tf32 and move in half the time; for entries of bounded size.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i >> 1 == j >> 1, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = tl.where(level_mask(level, C), a, 0.0)
        if HALF:
            low = inverse.to(tl.float16)
            left = tl.dot(low, corner.to(tl.float16)).to(tl.float16)
            inverse -= tl.dot(left, low)
        else:
            left = tl.dot(inverse, corner, input_precision=PRECISION)
            inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse
