"""The Triton kernel of ``gdn_step``: a program for each row and head.

``recur`` is all of it but the last store; ``gdn_window_step`` goes on from there.

Whatever an earlier step has left, state, history and parameters, is read first, so that it is on
its way while the projections are still being made. The state passes through registers once, a
block of columns at a time (one where it fits): with S the decayed state,
``o = S^T q + (k.q) write`` needs no second look at what is written.

D channels of a vector, K key width, V value width, W taps.
"""

# ruff: noqa: RUF005 (Triton has no unpacking in tuples)

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.norm_gate.kernels import open_gate
from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit
def _past(history_ptr, c_D, in_D, W: tl.constexpr, BW: tl.constexpr):
    """The W - 1 inputs of channels c before this one, oldest first; zeros beside them [D, BW]."""
    past_DW = tl.zeros([c_D.shape[0], BW], tl.float32)
    if history_ptr is not None:
        p_W = tl.arange(0, BW)
        at_DW = c_D[:, None] * (W - 1) + p_W[None, :]
        mask = in_D[:, None] & (p_W < W - 1)[None, :]
        past_DW = tl.load(history_ptr + at_DW, mask=mask, other=0.0, cache_modifier=".cg")
    return past_DW


@triton.jit
def _taps(weight_ptr, c_D, in_D, W: tl.constexpr, BW: tl.constexpr, SINGLY: tl.constexpr):
    """The convolution's weights of channels c [D, BW]; without one, the new input as it is.

    SINGLY: a number at a time. Threads then hold of taps and past what they write of the history;
    read in pairs, it would have to change hands.
    """
    p_W = tl.arange(0, BW)
    taps_DW = tl.zeros([c_D.shape[0], BW], tl.float32) + 1.0
    if weight_ptr is not None:
        mask = in_D[:, None] & (p_W < W)[None, :]
        at_DW = c_D[:, None] * W + p_W[None, :]
        if SINGLY:
            at_DW = tl.multiple_of(at_DW, [1, 1])
        taps_DW = tl.load(weight_ptr + at_DW, mask=mask, other=0.0)
    return taps_DW


@triton.jit
def _window(past_DW, x_ptr, c_D, in_D, W: tl.constexpr, BW: tl.constexpr):
    """The last W inputs of channels c, oldest first, zeros beside them [D, BW] in fp32."""
    is_new_W = tl.arange(0, BW) == W - 1
    new_D = tl.load(x_ptr + c_D, mask=in_D, other=0.0).to(tl.float32)
    past_DW = past_DW.to(x_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(is_new_W[None, :], new_D[:, None], past_DW)


@triton.jit
def _convolve(window_DW, taps_DW, SILU: tl.constexpr):
    x_D = tl.sum(window_DW * taps_DW.to(tl.float32), axis=1)
    if SILU:
        x_D = x_D / (1 + tl.exp(-x_D))
    return x_D


@triton.jit
def handed_on(x_D, BD: tl.constexpr):
    """The same numbers, through shared memory to the threads that need them.

    Left to itself the compiler would let every thread read and convolve all channels that it needs,
    or turn the whole state around instead.
    """
    return tl.gather(x_D, tl.arange(0, BD), 0)


@triton.jit
def _shift(history_ptr, window_DW, c_D, in_D, W: tl.constexpr, BW: tl.constexpr):
    """Store the last W - 1 inputs of channels c where the W - 1 before were."""
    if history_ptr is not None:
        p_W = tl.arange(0, BW)
        at_DW = c_D[:, None] * (W - 1) + p_W[None, :] - 1
        mask = in_D[:, None] & ((p_W > 0) & (p_W < W))[None, :]
        tl.store(history_ptr + at_DW, window_DW.to(history_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, also where it is small: slow decays need its digits."""
    tail = tl.exp(-tl.abs(x))
    u = 1 + tail  # what rounding takes from u, tail / (u - 1) gives back
    log_u = tl.where(u == 1, tail, tl.log(u) * (tail / tl.where(u == 1, 1.0, u - 1)))
    return tl.maximum(x, 0.0) + log_u


@triton.jit
def _channels(ptr, c_D, mask_D):
    return tl.load(ptr + c_D, mask=mask_D, other=0.0).to(tl.float32)


@triton.jit
def _tile(state_ptr, at_KV, in_K, in_V):
    mask = in_K[:, None] & in_V[None, :]
    return tl.load(state_ptr + at_KV, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def keep(
    state_ptr, new, pid, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store what ``recur`` has left to do so."""
    i_K, n_V = tl.arange(0, BK), (BLOCKS - 1) * BV + tl.arange(0, BV)
    state_ptr += pid.to(tl.int64) * K * V
    mask = (i_K < K)[:, None] & (n_V < V)[None, :]
    at_KV = i_K[:, None] * V + n_V[None, :]
    tl.store(state_ptr + at_KV, new.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def recur(
    pid, qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr,
    state_ptr, norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row, decay_row,
    gate_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GATE_FN: tl.constexpr, NORM_EPS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr,
    SINGLY: tl.constexpr, LATER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of row and head ``pid``: the gated output in BLOCKS of BV columns, in fp32.

    Waits its turn; state and history are written. LATER: but for the state's last block, which is
    the second thing returned and left to the caller to ``keep``.
    """
    head, row = pid % H, (pid // H).to(tl.int64)
    qkv_ptr += row * qkv_row
    if history_ptr is not None:
        history_ptr += row * (H * (2 * K + V)) * (W - 1)
    state_ptr += pid.to(tl.int64) * K * V
    gate_ptr += row * gate_row + head * V
    norm_weight_ptr += head * V
    i_K, v_V = tl.arange(0, BK), tl.arange(0, BV)
    in_K = i_K < K
    at_KV = i_K[:, None] * V + v_V[None, :]
    q_c, k_c, v_c = head * K + i_K, H * K + head * K + i_K, 2 * H * K + head * V + v_V

    state = _tile(state_ptr, at_KV, in_K, v_V < V)
    q_past = _past(history_ptr, q_c, in_K, W, BW)
    q_taps = _taps(weight_ptr, q_c, in_K, W, BW, SINGLY)
    k_past = _past(history_ptr, k_c, in_K, W, BW)
    k_taps = _taps(weight_ptr, k_c, in_K, W, BW, SINGLY)
    v_past = _past(history_ptr, v_c, v_V < V, W, BW)
    v_taps = _taps(weight_ptr, v_c, v_V < V, W, BW, SINGLY)
    norm_weight_V = _channels(norm_weight_ptr, v_V, v_V < V)
    bias = tl.load(rate_bias_ptr + head).to(tl.float32)
    factor = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    take_turn(OVERLAP)

    q_window = _window(q_past, qkv_ptr, q_c, in_K, W, BW)
    k_window = _window(k_past, qkv_ptr, k_c, in_K, W, BW)
    v_window = _window(v_past, qkv_ptr, v_c, v_V < V, W, BW)
    beta = beta_factor * tl.sigmoid(tl.load(beta_ptr + row * beta_row + head).to(tl.float32))
    rate = tl.load(decay_ptr + row * decay_row + head).to(tl.float32)
    decay = tl.exp(-factor * _softplus(rate + bias))
    gate_V = _channels(gate_ptr, v_V, v_V < V)
    q_K, k_K = (
        _convolve(q_window, q_taps, SILU and W > 1),
        _convolve(k_window, k_taps, SILU and W > 1),
    )
    q_size, k_size, kq = tl.reduce((q_K * q_K, k_K * k_K, k_K * q_K), 0, _add_three)
    q_factor, k_factor = tl.rsqrt(q_size + NORM_EPS) * scale, tl.rsqrt(k_size + NORM_EPS)
    kq *= q_factor * k_factor
    q_K, k_K = handed_on(q_K * q_factor, BK), handed_on(k_K * k_factor, BK)

    # Several threads may hold the same number: all have to read before one of them writes.
    tl.debug_barrier()
    _shift(history_ptr, q_window, q_c, in_K, W, BW)
    _shift(history_ptr, k_window, k_c, in_K, W, BW)
    outputs, squares = (), 0.0
    for n in tl.static_range(BLOCKS):
        n_V, n_c = n * BV + v_V, n * BV + v_c
        in_V = n_V < V
        if n > 0:
            state = _tile(state_ptr, n * BV + at_KV, in_K, in_V)
            v_window = _window(_past(history_ptr, n_c, in_V, W, BW), qkv_ptr, n_c, in_V, W, BW)
            v_taps = _taps(weight_ptr, n_c, in_V, W, BW, SINGLY)
            tl.debug_barrier()
        x_V = handed_on(_convolve(v_window, v_taps, SILU and W > 1), BV)
        old = state.to(tl.float32)
        of_k_V, of_q_V = tl.reduce((k_K[:, None] * old, q_K[:, None] * old), 0, _add_two)
        write_V = beta * (x_V - decay * of_k_V)
        o_V = decay * of_q_V + kq * write_V
        new = decay * old + k_K[:, None] * write_V[None, :]
        if not LATER or n < BLOCKS - 1:
            mask = in_K[:, None] & in_V[None, :]
            tl.store(state_ptr + n * BV + at_KV, new.to(state_ptr.dtype.element_ty), mask=mask)
        _shift(history_ptr, v_window, n_c, in_V, W, BW)
        outputs = outputs + (o_V,)
        squares += tl.sum(o_V * o_V, axis=0)

    factor = tl.rsqrt(squares / V + eps)
    gated = ()
    for n in tl.static_range(BLOCKS):
        n_V = n * BV + v_V
        if n > 0:
            norm_weight_V = _channels(norm_weight_ptr, n_V, n_V < V)
            gate_V = _channels(gate_ptr, n_V, n_V < V)
        opened_V, _ = open_gate(gate_V, GATE_FN)
        gated = gated + (outputs[n] * factor * norm_weight_V * opened_V,)
    return gated, new


@triton.jit
def step_kernel(
    qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr, state_ptr,
    norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row, decay_row, gate_row,
    y_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GATE_FN: tl.constexpr, NORM_EPS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr,
    SINGLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_go(OVERLAP)
    pid = tl.program_id(0)
    y_ptr += pid.to(tl.int64) * V
    gated, _ = recur(
        pid, qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr,
        state_ptr, norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row,
        decay_row, gate_row, H, K, V, W, SILU, GATE_FN, NORM_EPS, BK, BV, BW, BLOCKS, SINGLY,
        False, OVERLAP,
    )  # fmt: skip
    for n in tl.static_range(BLOCKS):
        n_V = n * BV + tl.arange(0, BV)
        tl.store(y_ptr + n_V, gated[n].to(y_ptr.dtype.element_ty), mask=n_V < V)
