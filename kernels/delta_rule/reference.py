"""Gated delta rule in plain PyTorch: chunks of C tokens as matrix products, no loop over tokens.

Within a chunk, with G the running sum of log decays, L_ij = exp(G_i - G_j) for j <= i in the same
segment (else 0), d_i = exp(G_i) while the incoming state S lives (else 0), and u_t the correction
that token t writes (S_t = a_t S_{t-1} + k_t u_t^T), section 3.3 of arXiv 2412.06464 reads::

    (I + A) U = beta * (V - d * K S),   A = beta * strictly_lower(K K^T * L)      (UT transform)
    O  = d * Q S + (Q K^T * L) U
    S' = d_C S + (L_C * K)^T U

With a decay per key channel (section 3 of arXiv 2510.26692) G and d have the channels of K, and L
stands inside the sums over them; `ltconvert.kernels.chunkwise.decays` has those products.

Everything but the recurrence S -> S' is batched over chunks. The backward is written out: it keeps
the inputs and each chunk's incoming state and recomputes the rest, so memory stays at a few times
the inputs, and both directions work on a bounded span of chunks at a time (also kinder to caches).

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, K key width,
V value width, D decays of a token (1 or K). q arrives here multiplied by the scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.kernels.chunkwise.spans import (
    CHUNK_TOKENS,
    arithmetic,
    bmm,
    dot,
    from_chunks,
    spans,
    to_chunks,
)
from ltconvert.kernels.delta_rule.chunks import Chunks, Options, inverse_length, prepare
from ltconvert.kernels.untraced import untraced


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None,
    initial_state_BHKV: Tensor | None,
    counts_BT: Tensor | None,
    *,
    scale: float,
    l2norm_qk: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.delta_rule.delta_rule`; padding holds zeros."""
    beta_BTH1 = beta_BTH.unsqueeze(-1)
    if log_decay is None:
        log_decay = torch.zeros_like(beta_BTH)
    log_decay_BTHD = log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay
    if initial_state_BHKV is None:
        batch, _, heads, width = q_BTHK.shape
        initial_state_BHKV = q_BTHK.new_zeros(
            (batch, heads, width, v_BTHV.shape[-1]), dtype=arithmetic(q_BTHK.dtype)
        )
    chunk = min(chunk_size or CHUNK_TOKENS, q_BTHK.shape[1])
    if log_decay_BTHD.shape[-1] > 1:
        chunk = 1 << (chunk - 1).bit_length()
    return _corrected(
        q_BTHK, k_BTHK, v_BTHV, beta_BTH1, log_decay_BTHD, initial_state_BHKV, counts_BT,
        scale, l2norm_qk, chunk,
    )  # fmt: skip


def delta_rule_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    beta_BH: Tensor,
    log_decay: Tensor | None,
    state_BHKV: Tensor,
    *,
    scale: float,
    l2norm_qk: bool,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.delta_rule.delta_rule_step`."""
    dtype = arithmetic(q_BHK.dtype)
    with torch.autocast(q_BHK.device.type, enabled=False):
        q_BHK1, k_BHK1 = (x.to(dtype).unsqueeze(-1) for x in (q_BHK, k_BHK))
        if l2norm_qk:
            q_BHK1, k_BHK1 = (x * inverse_length(x.mT) for x in (q_BHK1, k_BHK1))
        state_BHKV = state_BHKV.to(dtype)
        if log_decay is not None:
            log_decay_BHD = log_decay.unsqueeze(-1) if log_decay.dim() == 2 else log_decay
            state_BHKV = state_BHKV * log_decay_BHD.to(dtype).exp().unsqueeze(-1)
        seen_BH1V = k_BHK1.mT @ state_BHKV
        error_BH1V = v_BHV.to(dtype).unsqueeze(-2) - seen_BH1V
        write_BH1V = beta_BH.to(dtype)[..., None, None] * error_BH1V
        state_BHKV = state_BHKV + k_BHK1 * write_BH1V
        o_BHV = ((q_BHK1 * scale).mT @ state_BHKV).squeeze(-2)
    return o_BHV.to(v_BHV.dtype), state_BHKV


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor,
        initial_state: Tensor, counts: Tensor | None, options: Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o_BTHV = torch.empty_like(v, memory_format=torch.contiguous_format)
        incoming = []
        with torch.autocast(q.device.type, enabled=False):
            state_RKV = initial_state.to(arithmetic(q.dtype)).flatten(0, 1)
            for span in spans(q, options.chunk):
                x = prepare(q, k, v, beta, log_decay, counts, options, span)
                o_NRCV, states_NRKV, state_RKV = _forward_span(x, state_RKV)
                from_chunks(o_NRCV, o_BTHV, span)
                if any(ctx.needs_input_grad):
                    incoming.append(states_NRKV)
        ctx.save_for_backward(q, k, v, beta, log_decay, counts, *incoming)
        ctx.options, ctx.state_dtype = options, initial_state.dtype
        return o_BTHV, state_RKV.view(initial_state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BTHV: Tensor, dstate_BHKV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, log_decay, counts, *incoming = ctx.saved_tensors
        grads = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (q, k, v, beta, log_decay)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dstate_RKV = dstate_BHKV.flatten(0, 1)
            for span in reversed(spans(q, ctx.options.chunk)):
                x = prepare(q, k, v, beta, log_decay, counts, ctx.options, span)
                do_NRCV = to_chunks(do_BTHV, span, ctx.options.chunk, dstate_RKV.dtype)
                *span_grads, dstate_RKV = _backward_span(
                    x, incoming.pop(), do_NRCV, dstate_RKV, ctx.options
                )
                for grad, out in zip(span_grads, grads, strict=True):
                    from_chunks(grad, out, span)
        dinitial_BHKV = dstate_RKV.view(dstate_BHKV.shape).to(ctx.state_dtype)
        return *grads, dinitial_BHKV, None, None


@untraced
def _corrected(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, scale, l2norm_qk, chunk = arguments
    return _DeltaRule.apply(*tensors, Options(scale, l2norm_qk, chunk))


def _forward_span(x: Chunks, state_RKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, incoming states and the outgoing state of a span."""
    u_NRCV = bmm(x.inverse_NRCC, x.beta_NRC1 * x.v_NRCV)  # less W S below: then U
    w_NRCK = bmm(x.inverse_NRCC, (x.beta_NRC1 * x.decay.carry_NRCD) * x.k_NRCK)
    write_NRKC = (x.decay.to_end_NRCD * x.k_NRCK).mT
    carry_NRD1, count = x.decay.carry_out_NRD1, len(u_NRCV)
    states_NRKV = state_RKV.new_empty((count + 1, *state_RKV.shape))  # the last one goes out
    states_NRKV[0] = state_RKV
    for n in range(count):
        u_NRCV[n].baddbmm_(w_NRCK[n], states_NRKV[n], alpha=-1)
        torch.mul(carry_NRD1[n], states_NRKV[n], out=states_NRKV[n + 1])
        states_NRKV[n + 1].baddbmm_(write_NRKC[n], u_NRCV[n])
    states_NRKV, state_RKV = states_NRKV[:count], states_NRKV[count].clone()
    scores_NRCC = x.decay.products(x.q_NRCK, x.k_NRCK)
    o_NRCV = bmm(x.decay.carry_NRCD * x.q_NRCK, states_NRKV, plus=bmm(scores_NRCC, u_NRCV))
    return o_NRCV, states_NRKV, state_RKV


def _backward_span(
    x: Chunks, states_NRKV: Tensor, do_NRCV: Tensor, dstate_RKV: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta, log decay (chunk layout) and of the state that came in."""
    q, k, beta, decay = x.q_NRCK, x.k_NRCK, x.beta_NRC1, x.decay
    carry = decay.carry_NRCD
    carried_k = carry * k
    error_NRCV = bmm(carried_k, states_NRKV, plus=x.v_NRCV.clone(), alpha=-1)  # V - d K S
    u_NRCV = bmm(x.inverse_NRCC, beta * error_NRCV)
    w_NRCK = bmm(x.inverse_NRCC, beta * carried_k)
    du_NRCV = bmm(decay.products(q, k).mT, do_NRCV)
    dread_NRKV = bmm((carry * q).mT, do_NRCV)
    # The recurrence, backwards: dstates[n] is the gradient of the state before chunk n.
    write_NRCK, carry_NRD1, count = decay.to_end_NRCD * k, decay.carry_out_NRD1, len(u_NRCV)
    dstates_NRKV = dstate_RKV.new_empty((count + 1, *dstate_RKV.shape))
    dstates_NRKV[count] = dstate_RKV
    for n in reversed(range(count)):
        du_NRCV[n].baddbmm_(write_NRCK[n], dstates_NRKV[n + 1])
        torch.addcmul(
            dread_NRKV[n], carry_NRD1[n], dstates_NRKV[n + 1], out=dstates_NRKV[n]
        ).baddbmm_(w_NRCK[n].mT, du_NRCV[n], alpha=-1)
    dstate_RKV, dstates_NRKV = dstates_NRKV[0].clone(), dstates_NRKV[1:]  # now: after chunk n

    drhs_NRCV = bmm(x.inverse_NRCC.mT, du_NRCV)  # of beta * error
    dv_NRCV = beta * drhs_NRCV
    da_NRCC = decay.weigh(bmm(drhs_NRCV, u_NRCV.mT)).tril_(-1)  # of -(K K^T)
    dscores_NRCC = decay.weigh(bmm(do_NRCV, u_NRCV.mT))
    dq_NRCK = decay.rows(dscores_NRCC, k, plus=carry * bmm(do_NRCV, states_NRKV.mT))
    # k appears as the reader of earlier writes (rows of A, the incoming state) and as the key that
    # later tokens read (columns). The decay's gradient needs the two apart.
    seen_NRCK = decay.rows(da_NRCC, k)
    dk_row = -(carry * bmm(dv_NRCV, states_NRKV.mT)).addcmul_(beta, seen_NRCK)
    dk_col = decay.to_end_NRCD * bmm(u_NRCV, dstates_NRKV.mT)
    dsum_end_NRD = decay.fold(k * dk_col).sum(-2)
    dk_col = decay.columns(dscores_NRCC, q, plus=dk_col)
    dk_col = decay.columns(da_NRCC, beta * k, plus=dk_col, alpha=-1)
    dbeta_NRC1 = dot(drhs_NRCV, error_NRCV) - dot(k, seen_NRCK)

    q_dot, row_dot, col_dot = (
        decay.fold(y * dy) for y, dy in ((q, dq_NRCK), (k, dk_row), (k, dk_col))
    )
    dlog_decay_NRCD = decay.log_gradient(
        q_dot + row_dot - col_dot, dsum_end_NRD, states_NRKV, dstates_NRKV
    )
    dk_NRCK = dk_row + dk_col
    if options.l2norm_qk:
        dq_NRCK.addcmul_(q, q_dot.sum(-1, keepdim=True), value=-(options.scale**-2))
        dk_NRCK.addcmul_(k, (row_dot + col_dot).sum(-1, keepdim=True), value=-1)
    dq_NRCK *= x.q_factor_NRC1
    dk_NRCK *= x.k_factor_NRC1
    return dq_NRCK, dk_NRCK, dv_NRCV, dbeta_NRC1, dlog_decay_NRCD, dstate_RKV
