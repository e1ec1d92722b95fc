"""Triton kernels over rows of logits for a teacher's top-k, and for scores without gradients.

The first reads rows whose top-k logits were taken out and set to -inf, which leaves the tail: all
that the teacher has no probability of. Letters and helpers as in ``rows``; K tokens of a top-k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl.rows import (
    GROUP,
    LOWEST,
    advance,
    columns,
    load_label,
    load_logits,
    load_teacher,
    tanh,
    total,
)


@triton.jit
def load_tail(row_ptr, cols, width, vocab, cap, CAPPED: tl.constexpr):
    """As ``load_logits``; -inf stays, also under a cap."""
    raw = tl.load(row_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    capped, slope = load_logits(row_ptr, cols, width, vocab, cap, CAPPED)
    return tl.where(raw == float("-inf"), raw, capped), slope


@triton.jit
def compare_tails(
    z_ptr,  # student's logits [rows, width], -inf at the top-k; overwritten with their gradient
    top_ptr,  # student's logits at the top-k [rows, K]; overwritten with their gradient
    log_p_ptr,  # teacher's log-probabilities [rows, K]
    index_ptr,  # tokens of the top-k [rows, K] int64
    kl_ptr,  # [rows] fp32
    nll_ptr,  # [rows] fp32, if LABELS
    label_ptr,  # [rows] int64, if LABELS
    label_logit_ptr,  # the student's logit there [rows], if LABELS
    mask_ptr,  # [rows] uint8, if MASK
    weight_ptr,  # [2] fp32: of the KL's gradient in s, of the cross-entropy's in the logits
    stride,
    width,
    vocab,
    inv_temperature,
    cap,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GRAD: tl.constexpr,
    CE_GRAD: tl.constexpr,
    LABELS: tl.constexpr,
    MASK: tl.constexpr,
    HOT: tl.constexpr,
    CAPPED: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    keep = row >= 0
    if MASK:
        keep = tl.load(mask_ptr + row) != 0
    read = tl.where(keep, vocab, 0)
    k = tl.arange(0, K_BLOCK)
    known = k < K
    top_ptr += row * K + k
    top_c = tl.load(top_ptr, mask=known, other=0.0).to(tl.float32)
    top_slope = 1.0
    if CAPPED:
        share = tanh(top_c / cap)
        top_c = share * cap
        top_slope = 1 - share * share
    top_c = tl.where(known, top_c, float("-inf"))
    top_s = top_c * inv_temperature

    zero = tl.zeros([LANES], tl.float32)
    m_s, l_s, m_c, l_c = zero + LOWEST, zero, zero + LOWEST, zero
    for start in range(0, read, LANES * GROUP):
        c, slope = load_tail(z_ptr, columns(start, LANES), width, vocab, cap, CAPPED)
        m_s, l_s, _shrink_s, _e_s = advance(c * inv_temperature, m_s, l_s)
        if LABELS and HOT:
            m_c, l_c, _shrink_c, _e_c = advance(c, m_c, l_c)
    m_tail, l_tail, _weight_s = total(m_s, l_s)
    m_s = tl.maximum(m_tail, tl.max(top_s, 0))
    l_s = l_tail * tl.exp(m_tail - m_s) + tl.sum(tl.exp(top_s - m_s), 0)
    if LABELS and HOT:
        m_t, l_t, _weight_c = total(m_c, l_c)
        m_c = tl.maximum(m_t, tl.max(top_c, 0))
        l_c = l_t * tl.exp(m_t - m_c) + tl.sum(tl.exp(top_c - m_c), 0)
    else:
        m_c, l_c = m_s, l_s

    log_p = tl.load(log_p_ptr + row * K + k, mask=known, other=float("-inf")).to(tl.float32)
    p = tl.exp(log_p)
    mass = tl.sum(p, 0)
    rest = tl.where((l_tail > 0) & (mass < 1), 1 - mass, 0.0)
    log_sum = m_s + tl.log(l_s)
    kl = tl.sum(tl.where(p != 0, p * (log_p - top_s + log_sum), 0.0), 0)
    log_rest = tl.log(rest) - (m_tail + tl.log(l_tail)) + log_sum
    kl += tl.where(rest != 0, rest * log_rest, 0.0)
    mass += rest
    tl.store(kl_ptr + row, tl.where(keep, kl, 0.0))
    label = -1
    if LABELS:
        label = tl.load(label_ptr + row).to(tl.int32)
        label_logit = tl.load(label_logit_ptr + row).to(tl.float32)
        if CAPPED:
            label_logit = tanh(label_logit / cap) * cap
        nll = m_c + tl.log(l_c) - label_logit
        tl.store(nll_ptr + row, tl.where(keep & (label >= 0), nll, 0.0))

    if GRAD:
        kl_weight = tl.load(weight_ptr)
        ce_weight = 0.0
        if CE_GRAD:
            ce_weight = tl.where(label >= 0, tl.load(weight_ptr + 1), 0.0)
        inv_s, inv_c = mass / l_s, 1 / l_c
        inv_tail = tl.where(rest != 0, rest / l_tail, 0.0)
        top_grad = kl_weight * (tl.exp(top_s - m_s) * inv_s - p)
        if CE_GRAD:
            index = tl.load(index_ptr + row * K + k, mask=known, other=-1)
            hit = tl.where(index == label, 1.0, 0.0)
            top_grad += ce_weight * (tl.exp(top_c - m_c) * inv_c - hit)
        top_grad = tl.where(keep, top_grad * top_slope, 0.0)
        tl.store(top_ptr, top_grad.to(top_ptr.dtype.element_ty), mask=known)
        for start in range(0, vocab, LANES * GROUP):
            cols = columns(start, LANES)
            c, slope = load_tail(z_ptr, cols, width, vocab, cap, CAPPED)
            s = c * inv_temperature
            grad = kl_weight * (tl.exp(s - m_s) * inv_s - tl.exp(s - m_tail) * inv_tail)
            if CE_GRAD:
                grad += ce_weight * (tl.exp(c - m_c) * inv_c - tl.where(cols == label, 1.0, 0.0))
            grad = tl.where(keep, grad * slope, 0.0).to(z_ptr.dtype.element_ty)
            tl.store(z_ptr + cols, grad, mask=cols < width)


@triton.jit
def track(x, cols, m, first):
    """The first column of each lane's maximum, which only a larger value replaces."""
    top = tl.max(x, 1)
    where = tl.min(tl.where(x == top[:, None], cols, 2147483647), 1)
    return tl.where(top > m, where, first)


@triton.jit
def score_rows(
    z_ptr,  # student's logits [rows, width]
    y_ptr,  # teacher's logits [rows, width]
    kl_ptr,  # [rows] fp32, as the next two
    z_nll_ptr,
    y_nll_ptr,
    agree_ptr,  # [rows] uint8
    label_ptr,  # [rows] int64
    stride,
    width,
    vocab,
    z_cap,
    y_cap,
    Z_CAPPED: tl.constexpr,
    Y_CAPPED: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    y_ptr += row * stride
    label = tl.load(label_ptr + row).to(tl.int32)
    z_label = load_label(z_ptr, label, vocab, z_cap, Z_CAPPED)
    y_label = load_label(y_ptr, label, vocab, y_cap, Y_CAPPED)
    zero = tl.zeros([LANES], tl.float32)
    m_s, l_s, m_t, l_t, gap = zero + LOWEST, zero, zero + LOWEST, zero, zero
    first_s = tl.zeros([LANES], tl.int32)
    first_t = first_s
    for start in range(0, vocab, LANES * GROUP):
        cols = columns(start, LANES)
        s, _slope = load_logits(z_ptr, cols, width, vocab, z_cap, Z_CAPPED)
        t = load_teacher(y_ptr, cols, width, vocab, y_cap, Y_CAPPED)
        first_s = track(s, cols, m_s, first_s)
        first_t = track(t, cols, m_t, first_t)
        m_s, l_s, _shrink_s, _e_s = advance(s, m_s, l_s)
        m_t, l_t, shrink, e_t = advance(t, m_t, l_t)
        gap = gap * shrink + tl.sum(tl.where(e_t != 0, e_t * (t - s), 0.0), 1)
    lanes = m_s, m_t
    m_s, l_s, _weight_s = total(m_s, l_s)
    m_t, l_t, weight = total(m_t, l_t)
    kl = tl.sum(gap * weight, 0) / l_t + (m_s - m_t) + tl.log(l_s / l_t)
    tl.store(kl_ptr + row, kl)
    tl.store(z_nll_ptr + row, m_s + tl.log(l_s) - z_label)
    tl.store(y_nll_ptr + row, m_t + tl.log(l_t) - y_label)
    best_s = tl.min(tl.where(lanes[0] == m_s, first_s, 2147483647), 0)
    best_t = tl.min(tl.where(lanes[1] == m_t, first_t, 2147483647), 0)
    tl.store(agree_ptr + row, (best_s == best_t).to(tl.uint8))
