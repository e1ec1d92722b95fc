"""Triton kernels over rows of logits: a program reads a row of both models once to add it up, and
once more to write the gradient over the student's logits.

A block of columns is [LANES, GROUP]. A thread holds whole groups, so that a running maximum and sum
for each lane costs one more exponential a group and no word between threads until the row ends.
s and t are capped logits over the temperature, q and p their softmax; m a maximum, l a sum of
exp(x - m). All arithmetic is in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.linear_kl import blocks

GROUP = tl.constexpr(8)
# A maximum that every logit exceeds, and finite: -inf less -inf is NaN.
LOWEST = tl.constexpr(blocks.LOWEST)
FORWARD, REVERSE, JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tanh(x):
    """By exponentials; near 0, where their difference cancels, by its series."""
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(x2 < 0.0625, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def columns(start, LANES: tl.constexpr):
    """Columns [LANES, GROUP] of the block that starts there."""
    return start + tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_logits(row_ptr, cols, width, vocab, cap, CAPPED: tl.constexpr):
    """(capped logits, -inf from ``vocab`` on; the cap's slope). ``width`` columns can be read."""
    raw = tl.load(row_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    slope = 1.0
    if CAPPED:
        share = tanh(raw / cap)
        raw = share * cap
        slope = 1 - share * share
    return tl.where(cols < vocab, raw, float("-inf")), slope


@triton.jit
def load_teacher(row_ptr, cols, width, vocab, cap, CAPPED: tl.constexpr):
    """As ``load_logits``; a probability of 0 inside the vocabulary leaves differences finite."""
    raw, _slope = load_logits(row_ptr, cols, width, vocab, cap, CAPPED)
    return tl.where((cols < vocab) & (raw < LOWEST), LOWEST, raw)


@triton.jit
def advance(x, m, mass):
    """Maximum and sum with a block more; what older sums shrink by; the block's exponentials."""
    top = tl.maximum(m, tl.max(x, 1))
    shrink = tl.exp(m - top)
    e = tl.exp(x - top[:, None])
    return top, mass * shrink + tl.sum(e, 1), shrink, e


@triton.jit
def total(m, mass):
    """Maximum and sum of the row; what each lane's sums weigh in it."""
    top = tl.max(m, 0)
    weight = tl.exp(m - top)
    return top, tl.sum(mass * weight, 0), weight


@triton.jit
def load_label(row_ptr, label, vocab, cap, CAPPED: tl.constexpr):
    """The capped logit of a label; NaN of one past the vocabulary."""
    inside = (label >= 0) & (label < vocab)
    raw = tl.load(row_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    if CAPPED:
        raw = tanh(raw / cap) * cap
    return raw


@triton.jit
def compare_rows(
    z_ptr,  # student's logits [rows, z_width], overwritten with their gradient if GRAD
    y_ptr,  # teacher's logits [rows, y_width]
    kl_ptr,  # [rows] fp32
    nll_ptr,  # [rows] fp32, if LABELS
    label_ptr,  # [rows] int64, if LABELS
    mask_ptr,  # [rows] uint8, if MASK
    weight_ptr,  # [2] fp32: of the KL's gradient in s, of the cross-entropy's in the logits
    z_stride, y_stride, z_width, y_width, vocab, inv_temperature, beta, z_cap, y_cap,
    KIND: tl.constexpr, GRAD: tl.constexpr, CE_GRAD: tl.constexpr, LABELS: tl.constexpr,
    MASK: tl.constexpr,
    HOT: tl.constexpr,  # the temperature is not 1
    Z_CAPPED: tl.constexpr, Y_CAPPED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    y_ptr += row * y_stride
    keep = row >= 0
    if MASK:
        keep = tl.load(mask_ptr + row) != 0
    read = tl.where(keep, vocab, 0)  # a row that does not count is not added up

    label = -1
    label_logit = 0.0
    if LABELS:
        label = tl.load(label_ptr + row).to(tl.int32)
        label_logit = load_label(z_ptr, label, vocab, z_cap, Z_CAPPED)

    zero = tl.zeros([LANES], tl.float32)
    m_s, l_s, m_t, l_t = zero + LOWEST, zero, zero + LOWEST, zero
    m_c, l_c, gap = zero + LOWEST, zero, zero
    for start in range(0, read, LANES * GROUP):
        cols = columns(start, LANES)
        c, slope = load_logits(z_ptr, cols, z_width, vocab, z_cap, Z_CAPPED)
        s = c * inv_temperature
        t = load_teacher(y_ptr, cols, y_width, vocab, y_cap, Y_CAPPED) * inv_temperature
        m_s, l_s, shrink_s, e_s = advance(s, m_s, l_s)
        m_t, l_t, shrink_t, e_t = advance(t, m_t, l_t)
        if KIND == FORWARD:  # != and not >, so that NaN stays
            gap = gap * shrink_t + tl.sum(tl.where(e_t != 0, e_t * (t - s), 0.0), 1)
        if KIND == REVERSE:
            gap = gap * shrink_s + tl.sum(tl.where(e_s != 0, e_s * (s - t), 0.0), 1)
        if LABELS and HOT:
            m_c, l_c, _shrink_c, _e_c = advance(c, m_c, l_c)
    m_s, l_s, weight_s = total(m_s, l_s)
    m_t, l_t, weight_t = total(m_t, l_t)
    if LABELS and HOT:
        m_c, l_c, _weight_c = total(m_c, l_c)
    else:
        m_c, l_c = m_s, l_s
    log_l_s, log_l_t = tl.log(l_s), tl.log(l_t)
    # log sum exp s - log sum exp t; of a ratio near 1, the logarithm keeps the digits
    log_ratio = (m_s - m_t) + tl.log(l_s / l_t)

    pull = 0.0  # what the gradient of the softmax takes off: a mean over q
    if KIND == FORWARD:
        kl = tl.sum(gap * weight_t, 0) / l_t + log_ratio
    elif KIND == REVERSE:
        pull = tl.sum(gap * weight_s, 0) / l_s
        kl = pull - log_ratio
    else:
        to_p, to_q = zero, zero
        for start in range(0, read, LANES * GROUP):
            cols = columns(start, LANES)
            s, slope = load_logits(z_ptr, cols, z_width, vocab, z_cap, Z_CAPPED)
            s = s * inv_temperature - m_s
            t = load_teacher(y_ptr, cols, y_width, vocab, y_cap, Y_CAPPED) * inv_temperature - m_t
            q, p = tl.exp(s) / l_s, tl.exp(t) / l_t
            log_mix = tl.log(tl.maximum(beta * p + (1 - beta) * q, 1.2e-38))
            to_p += tl.sum(tl.where(p != 0, p * (t - log_l_t - log_mix), 0.0), 1)
            to_q += tl.sum(tl.where(q != 0, q * (s - log_l_s - log_mix), 0.0), 1)
        pull = tl.sum(to_q, 0)
        kl = beta * tl.sum(to_p, 0) + (1 - beta) * pull
    tl.store(kl_ptr + row, tl.where(keep, kl, 0.0))
    if LABELS:
        nll = m_c + tl.log(l_c) - label_logit
        tl.store(nll_ptr + row, tl.where(keep & (label >= 0), nll, 0.0))

    if GRAD:
        kl_weight = tl.load(weight_ptr)
        ce_weight = 0.0
        if CE_GRAD:
            ce_weight = tl.where(label >= 0, tl.load(weight_ptr + 1), 0.0)
        inv_s, inv_t, inv_c = 1 / l_s, 1 / l_t, 1 / l_c
        for start in range(0, vocab, LANES * GROUP):
            cols = columns(start, LANES)
            c, slope = load_logits(z_ptr, cols, z_width, vocab, z_cap, Z_CAPPED)
            t = load_teacher(y_ptr, cols, y_width, vocab, y_cap, Y_CAPPED) * inv_temperature
            s = c * inv_temperature
            q = tl.exp(s - m_s) * inv_s
            p = tl.exp(t - m_t) * inv_t
            if KIND == FORWARD:
                grad = q - p
            elif KIND == REVERSE:
                grad = tl.where(q != 0, q * (s - t - pull), 0.0)
            else:
                log_mix = tl.log(tl.maximum(beta * p + (1 - beta) * q, 1.2e-38))
                gap_q = (s - m_s - log_l_s) - log_mix - pull
                grad = tl.where(q != 0, (1 - beta) * q * gap_q, 0.0)
            grad *= kl_weight
            if CE_GRAD:
                r = q
                if HOT:
                    r = tl.exp(c - m_c) * inv_c
                grad += ce_weight * (r - tl.where(cols == label, 1.0, 0.0))
            if Z_CAPPED:
                grad *= slope
            grad = tl.where(keep, grad, 0.0).to(z_ptr.dtype.element_ty)
            tl.store(z_ptr + cols, grad, mask=cols < z_width)
