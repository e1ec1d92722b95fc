"""Triton kernels of ``depth_attention``: a program is one token and one key/value head.

Tokens share no depth keys, so nothing is reused but by the query heads of a group: the kernels read
each slot once and are bound by memory. Blocks of slots stay below 64 rows: 64 make Triton use
Hopper's warp-group products, which were wrong for operands as narrow as these.

H query heads, G key/value heads, R query heads of a group (filled up), N slots of a block, D head
width, filled up to E.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-18)  # its square is still a normal number


@triton.jit
def _place(T, H, G):
    """Row, token and group of this program, and the group's first query head."""
    group = tl.program_id(0) % G
    token = tl.program_id(0) // G % T
    row = tl.program_id(0) // G // T
    return row.to(tl.int64), token.to(tl.int64), group, group * (H // G)


@triton.jit
def _scores(q_RE, k_NE, slot, slots, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a block of slots in fp32, -inf behind the valid ones."""
    s_RN = tl.dot(q_RE, tl.trans(k_NE), input_precision=PRECISION) * scale
    if CAP > 0.0:
        s_RN = CAP * (2.0 * tl.sigmoid(2.0 * s_RN / CAP) - 1.0)  # tanh
    return tl.where((slot < slots)[None, :], s_RN, float("-inf"))


@triton.jit
def _slot_tiles(k, v, slot, slots, k_slot, v_slot, D: tl.constexpr, E: tl.constexpr):
    """Keys and values of a block of slots, [N, E] each; zeros behind the valid ones."""
    column = tl.arange(0, E)[None, :]
    inside_NE = (slot < slots)[:, None] & (column < D)
    far_N1 = slot.to(tl.int64)[:, None]
    k_NE = tl.load(k + far_N1 * k_slot + column, mask=inside_NE, other=0.0)
    return k_NE, tl.load(v + far_N1 * v_slot + column, mask=inside_NE, other=0.0)


@triton.jit
def _store_tile(to, x_NE, slot, slots, stride, ADD: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """A block of slots' gradients; with ADD on top of what is there."""
    column = tl.arange(0, E)[None, :]
    inside_NE = (slot < slots)[:, None] & (column < D)
    at_NE = to + slot.to(tl.int64)[:, None] * stride + column
    if ADD:
        x_NE += tl.load(at_NE, mask=inside_NE, other=0.0).to(tl.float32)
    tl.store(at_NE, x_NE.to(to.dtype.element_ty), mask=inside_NE)


@triton.jit
def _ahead(depth_sum_R, log_sum_R, bias, head_R, real_R, BIAS: tl.constexpr):
    """Depth's log odds against the sequence, a query head."""
    ahead_R = depth_sum_R - log_sum_R
    if BIAS:
        ahead_R += tl.load(bias + head_R, mask=real_R, other=0.0).to(tl.float32)
    return ahead_R


@triton.jit
def _blend(ahead_R, schedule):
    """Depth's share; the share in what the sequence's backward takes for its output; what is left.

    With sigma = sigmoid(ahead): w = s sigma, c = w (1 - sigma) / (1 - w), and (1 - sigma).
    """
    sigma_R = tl.sigmoid(ahead_R)
    left_R = tl.maximum(tl.sigmoid(-ahead_R), TINY)
    share_R = schedule * sigma_R
    return share_R, share_R * left_R / (1.0 - schedule + schedule * left_R), left_R


@triton.jit(do_not_specialize=["slots"])  # it changes with every layer
def forward_kernel(
    q, k, v, o, log_sum, schedule, bias, merged, joint, share, depth_sum, slots, T, H, G, scale,
    q_row, q_token, q_head, k_row, k_token, k_slot, k_head, v_row, v_token, v_slot, v_head,
    MERGE: tl.constexpr, JOINT: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Depth attention of a token; with MERGE put together with the sequence's output ``o``.

    Then ``merged`` gets the output and ``o``, in place, what the sequence's backward needs for it;
    with JOINT (a schedule of 1) these are the same, and only ``o`` is written.
    """
    row, token, group, first_head = _place(T, H, G)
    head_R = first_head + tl.arange(0, R)
    real_R = tl.arange(0, R) < H // G
    column = tl.arange(0, E)[None, :]
    inside_RE = real_R[:, None] & (column < D)
    at_RE = row * q_row + token * q_token + head_R[:, None] * q_head + column
    q_RE = tl.load(q + at_RE, mask=inside_RE, other=0.0)
    k += row * k_row + token * k_token + group * k_head
    v += row * v_row + token * v_token + group * v_head
    highest_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    depth_RE = tl.zeros([R, E], tl.float32)
    for first in range(0, slots, N):
        slot = first + tl.arange(0, N)
        k_NE, v_NE = _slot_tiles(k, v, slot, slots, k_slot, v_slot, D, E)
        s_RN = _scores(q_RE, k_NE, slot, slots, scale, CAP, PRECISION)
        now_R = tl.maximum(highest_R, tl.max(s_RN, 1))
        weight_RN = tl.exp2((s_RN - now_R[:, None]) * LOG2E)
        faded_R = tl.exp2((highest_R - now_R) * LOG2E)
        total_R = total_R * faded_R + tl.sum(weight_RN, 1)
        depth_RE = depth_RE * faded_R[:, None]
        depth_RE += tl.dot(weight_RN.to(v_NE.dtype), v_NE, input_precision=PRECISION)
        highest_R = now_R
    depth_RE = depth_RE / tl.where(total_R > 0.0, total_R, 1.0)[:, None]
    depth_sum_R = highest_R + tl.log(total_R)  # -inf without slots
    at_R = (row * H + head_R) * T + token
    tl.store(depth_sum + at_R, depth_sum_R, mask=real_R)
    out_RE = ((row * T + token) * H + head_R[:, None]) * D + column
    if MERGE:
        log_sum_R = tl.load(log_sum + at_R, mask=real_R, other=0.0)
        ahead_R = _ahead(depth_sum_R, log_sum_R, bias, head_R, real_R, BIAS)
        s = 1.0
        if not JOINT:
            s = tl.load(schedule).to(tl.float32)
        share_R, inner_R, left_R = _blend(ahead_R, s)
        grown_R = tl.maximum(ahead_R, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(ahead_R)))
        if not JOINT:
            grown_R = tl.where(s == 1.0, grown_R, -tl.log(1.0 - s + s * left_R))
        tl.store(joint + at_R, log_sum_R + grown_R, mask=real_R)
        tl.store(share + at_R, share_R, mask=real_R)
        o_RE = tl.load(o + out_RE, mask=inside_RE, other=0.0).to(tl.float32)
        gap_RE = depth_RE - o_RE
        if not JOINT:
            made_RE = o_RE + share_R[:, None] * gap_RE
            tl.store(merged + out_RE, made_RE.to(merged.dtype.element_ty), mask=inside_RE)
        depth_RE = o_RE + inner_R[:, None] * gap_RE
    tl.store(o + out_RE, depth_RE.to(o.dtype.element_ty), mask=inside_RE)


@triton.jit(do_not_specialize=["slots"])
def gradient_kernel(
    q, k, v, o, do, log_sum, depth_sum, dsum, schedule, bias, dq, dk, dv, dbias,
    slots, T, H, G, scale,
    q_row, q_token, q_head, k_row, k_token, k_slot, k_head, v_row, v_token, v_slot, v_head,
    dq_row, dq_token, dq_head, dk_row, dk_token, dk_slot, dk_head,
    dv_row, dv_token, dv_slot, dv_head,
    MERGE: tl.constexpr, JOINT: tl.constexpr, BIAS: tl.constexpr, HAS_SUM: tl.constexpr,
    ADD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of a token's query heads, depth keys and values, and bias.

    ``o`` is what the forward left there. With MERGE the query's gradient is added to that of the
    sequence; with ADD those of the slots to what later layers left.
    """
    row, token, group, first_head = _place(T, H, G)
    head_R = first_head + tl.arange(0, R)
    real_R = tl.arange(0, R) < H // G
    column = tl.arange(0, E)[None, :]
    inside_RE = real_R[:, None] & (column < D)
    at_RE = row * q_row + token * q_token + head_R[:, None] * q_head + column
    q_RE = tl.load(q + at_RE, mask=inside_RE, other=0.0)
    out_RE = ((row * T + token) * H + head_R[:, None]) * D + column
    do_RE = tl.load(do + out_RE, mask=inside_RE, other=0.0)
    o_RE = tl.load(o + out_RE, mask=inside_RE, other=0.0).to(tl.float32)
    mean_R = tl.sum(o_RE * do_RE.to(tl.float32), 1)
    at_R = (row * H + head_R) * T + token
    depth_sum_R = tl.load(depth_sum + at_R, mask=real_R, other=0.0)
    k += row * k_row + token * k_token + group * k_head
    v += row * v_row + token * v_token + group * v_head
    dk += row * dk_row + token * dk_token + group * dk_head
    dv += row * dv_row + token * dv_token + group * dv_head
    share_R = tl.full([R], 1.0, tl.float32)
    if HAS_SUM:
        mean_R -= tl.load(dsum + at_R, mask=real_R, other=0.0)
    if MERGE:
        s = 1.0
        if not JOINT:
            s = tl.load(schedule).to(tl.float32)
        log_sum_R = tl.load(log_sum + at_R, mask=real_R, other=0.0)
        ahead_R = _ahead(depth_sum_R, log_sum_R, bias, head_R, real_R, BIAS)
        share_R, inner_R, left_R = _blend(ahead_R, s)
    if MERGE and not JOINT:
        # What depth alone would have for a mean, from a pass of its own over the slots.
        depth_R = tl.zeros([R], tl.float32)
        for first in range(0, slots, N):
            slot = first + tl.arange(0, N)
            k_NE, v_NE = _slot_tiles(k, v, slot, slots, k_slot, v_slot, D, E)
            s_RN = _scores(q_RE, k_NE, slot, slots, scale, CAP, PRECISION)
            p_RN = tl.exp2((s_RN - depth_sum_R[:, None]) * LOG2E)
            dp_RN = tl.dot(do_RE, tl.trans(v_NE), input_precision=PRECISION)
            depth_R += tl.sum(p_RN * dp_RN, 1)
        # mean = sigma depth + (1 - sigma) sequence, with mean_R = sequence + c (depth - sequence)
        kept_R = left_R * (1.0 - s + s * left_R) / (1.0 - s + s * left_R * left_R)
        mean_R = kept_R * mean_R + (tl.sigmoid(ahead_R) - kept_R * inner_R) * depth_R
    dq_RE = tl.zeros([R, E], tl.float32)
    dbias_R = tl.zeros([R], tl.float32)
    for first in range(0, slots, N):
        slot = first + tl.arange(0, N)
        k_NE, v_NE = _slot_tiles(k, v, slot, slots, k_slot, v_slot, D, E)
        s_RN = _scores(q_RE, k_NE, slot, slots, scale, CAP, PRECISION)
        p_RN = tl.exp2((s_RN - depth_sum_R[:, None]) * LOG2E) * share_R[:, None]
        p_RN = tl.where(real_R[:, None], p_RN, 0.0)
        dv_NE = tl.dot(tl.trans(p_RN).to(do_RE.dtype), do_RE, input_precision=PRECISION)
        _store_tile(dv, dv_NE, slot, slots, dv_slot, ADD, D, E)
        dp_RN = tl.dot(do_RE, tl.trans(v_NE), input_precision=PRECISION)
        ds_RN = p_RN * (dp_RN - mean_R[:, None])
        dbias_R += tl.sum(ds_RN, 1)
        if CAP > 0.0:
            s_RN = tl.where((slot < slots)[None, :], s_RN, 0.0)
            ds_RN *= 1.0 - (s_RN / CAP) * (s_RN / CAP)
        ds_RN = ds_RN * scale
        dq_RE += tl.dot(ds_RN.to(k_NE.dtype), k_NE, input_precision=PRECISION)
        dk_NE = tl.dot(tl.trans(ds_RN).to(q_RE.dtype), q_RE, input_precision=PRECISION)
        _store_tile(dk, dk_NE, slot, slots, dk_slot, ADD, D, E)
    at_RE = dq + row * dq_row + token * dq_token + head_R[:, None] * dq_head + column
    if MERGE:
        dq_RE += tl.load(at_RE, mask=inside_RE, other=0.0).to(tl.float32)
    tl.store(at_RE, dq_RE.to(dq.dtype.element_ty), mask=inside_RE)
    if BIAS:
        tl.store(dbias + at_R, dbias_R, mask=real_R)
