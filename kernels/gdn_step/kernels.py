"""The Triton kernel of ``gdn_step``: a program for each row and head.

The state passes through registers once, a block of columns at a time: with S the decayed state,
``o = S^T q + (k.q) write`` needs no second look at what is written.

D channels of a vector, K key width, V value width, W taps.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.norm_gate.kernels import open_gate


@triton.jit
def _window(qkv_ptr, history_ptr, c_D, mask_D, W: tl.constexpr):
    """The last W inputs of channels c, oldest first: W vectors [D] in fp32."""
    window = ()
    for p in tl.static_range(W - 1):
        past_D = tl.load(history_ptr + c_D * (W - 1) + p, mask=mask_D, other=0.0)
        window = window + (past_D.to(qkv_ptr.dtype.element_ty).to(tl.float32),)
    return window + (tl.load(qkv_ptr + c_D, mask=mask_D, other=0.0).to(tl.float32),)


@triton.jit
def _convolve(weight_ptr, window, c_D, mask_D, W: tl.constexpr, SILU: tl.constexpr):
    """Channels c after the convolution [D]; as they are without a weight (W is 1 then)."""
    if weight_ptr is None:
        x_D = window[0]
    else:
        x_D = tl.zeros(c_D.shape, tl.float32)
        for tap in tl.static_range(W):
            weight_D = tl.load(weight_ptr + c_D * W + tap, mask=mask_D, other=0.0)
            x_D += window[tap] * weight_D.to(tl.float32)
        if SILU:
            x_D = x_D / (1 + tl.exp(-x_D))
    return x_D


@triton.jit
def _shift(history_ptr, window, c_D, mask_D, W: tl.constexpr):
    """Store the last W - 1 inputs of channels c where the W - 1 before were."""
    for p in tl.static_range(W - 1):
        x_D = window[p + 1].to(history_ptr.dtype.element_ty)
        tl.store(history_ptr + c_D * (W - 1) + p, x_D, mask=mask_D)


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, also where it is small: slow decays need its digits."""
    tail = tl.exp(-tl.abs(x))
    u = 1 + tail  # what rounding takes from u, tail / (u - 1) gives back
    log_u = tl.where(u == 1, tail, tl.log(u) * (tail / tl.where(u == 1, 1.0, u - 1)))
    return tl.maximum(x, 0.0) + log_u


@triton.jit
def step_kernel(
    qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr, state_ptr,
    norm_weight_ptr, gate_ptr, y_ptr, scale, eps, beta_factor, qkv_row, beta_row, decay_row,
    gate_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GATE_FN: tl.constexpr, NORM_EPS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head, row = pid % H, (pid // H).to(tl.int64)
    channels = H * (2 * K + V)
    qkv_ptr += row * qkv_row
    if history_ptr is not None:
        history_ptr += row * channels * (W - 1)
    state_ptr += pid.to(tl.int64) * K * V
    gate_ptr += row * gate_row + head * V
    y_ptr += pid.to(tl.int64) * V
    k_K, v_V = tl.arange(0, BK), tl.arange(0, BV)
    in_K = k_K < K
    at_KV = k_K[:, None] * V + v_V[None, :]
    state = tl.load(state_ptr + at_KV, mask=in_K[:, None] & (v_V < V)[None, :], other=0.0)

    beta = beta_factor * tl.sigmoid(tl.load(beta_ptr + row * beta_row + head).to(tl.float32))
    rate = tl.load(decay_ptr + row * decay_row + head).to(tl.float32)
    rate += tl.load(rate_bias_ptr + head).to(tl.float32)
    rate = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32)) * _softplus(rate)
    decay = tl.exp(-rate)
    q_c, k_c = head * K + k_K, H * K + head * K + k_K
    q_window = _window(qkv_ptr, history_ptr, q_c, in_K, W)
    k_window = _window(qkv_ptr, history_ptr, k_c, in_K, W)
    q_K = _convolve(weight_ptr, q_window, q_c, in_K, W, SILU)
    k_K = _convolve(weight_ptr, k_window, k_c, in_K, W, SILU)
    q_K *= tl.rsqrt(tl.sum(q_K * q_K, axis=0) + NORM_EPS) * scale
    k_K *= tl.rsqrt(tl.sum(k_K * k_K, axis=0) + NORM_EPS)
    kq = tl.sum(k_K * q_K, axis=0)

    # Several threads may hold the same channel: all have to read before one of them writes.
    tl.debug_barrier()
    _shift(history_ptr, q_window, q_c, in_K, W)
    _shift(history_ptr, k_window, k_c, in_K, W)
    outputs, squares = (), 0.0
    for n in tl.static_range(BLOCKS):
        n_V = n * BV + v_V
        in_V = n_V < V
        mask = in_K[:, None] & in_V[None, :]
        if n > 0:
            state = tl.load(state_ptr + n * BV + at_KV, mask=mask, other=0.0)
        v_c = 2 * H * K + head * V + n_V
        v_window = _window(qkv_ptr, history_ptr, v_c, in_V, W)
        x_V = _convolve(weight_ptr, v_window, v_c, in_V, W, SILU)
        decayed = decay * state.to(tl.float32)
        write_V = beta * (x_V - tl.sum(k_K[:, None] * decayed, axis=0))
        o_V = tl.sum(q_K[:, None] * decayed, axis=0) + kq * write_V
        decayed += k_K[:, None] * write_V[None, :]
        tl.debug_barrier()
        tl.store(state_ptr + n * BV + at_KV, decayed.to(state_ptr.dtype.element_ty), mask=mask)
        _shift(history_ptr, v_window, v_c, in_V, W)
        outputs = outputs + (o_V,)
        squares += tl.sum(o_V * o_V, axis=0)

    factor = tl.rsqrt(squares / V + eps)
    for n in tl.static_range(BLOCKS):
        n_V = n * BV + v_V
        in_V = n_V < V
        weight_V = tl.load(norm_weight_ptr + head * V + n_V, mask=in_V, other=0.0).to(tl.float32)
        gate_V = tl.load(gate_ptr + n_V, mask=in_V, other=0.0).to(tl.float32)
        opened_V, _ = open_gate(gate_V, GATE_FN)
        y_V = outputs[n] * factor * weight_V * opened_V
        tl.store(y_ptr + n_V, y_V.to(y_ptr.dtype.element_ty), mask=in_V)
