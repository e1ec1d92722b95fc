"""Gated delta rule in plain PyTorch: chunks of C tokens as matrix products, no loop over tokens.

Within a chunk, with G the running sum of log decays, L_ij = exp(G_i - G_j) for j <= i in the same
segment (else 0), d_i = exp(G_i) while the incoming state S lives (else 0), and u_t the correction
that token t writes (S_t = a_t S_{t-1} + k_t u_t^T), section 3.3 of arXiv 2412.06464 reads::

    (I + A) U = beta * (V - d * K S),   A = beta * strictly_lower(K K^T * L)      (UT transform)
    O  = d * Q S + (Q K^T * L) U
    S' = d_C S + (L_C * K)^T U

Everything but the recurrence S -> S' is batched over chunks. The backward is written out: it keeps
the inputs and each chunk's incoming state and recomputes the rest, so memory stays at a few times
the inputs, and both directions work on a bounded span of chunks at a time (also kinder to caches).

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, K key width,
V value width. q arrives here multiplied by the scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.kernels.delta_rule.chunks import (
    CHUNK_TOKENS,
    Chunks,
    Options,
    arithmetic,
    bmm,
    dot,
    from_chunks,
    inverse_length,
    prepare,
    spans,
    to_chunks,
)
from ltconvert.kernels.segments import padding_mask, segment_counts


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor | None,
    *,
    initial_state_BHKV: Tensor | None,
    segment_ids_BT: Tensor | None,
    keep_BT: Tensor | None,
    scale: float,
    l2norm_qk: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.delta_rule.delta_rule`."""
    keep_BT = padding_mask(keep_BT)
    counts_BT = segment_counts(segment_ids_BT, keep_BT)
    if log_decay_BTH is None:
        log_decay_BTH = torch.zeros_like(beta_BTH)
    if keep_BT is not None:
        keep_BT1, keep_BT11 = keep_BT[..., None], keep_BT[..., None, None]
        q_BTHK, k_BTHK, v_BTHV = (x.where(keep_BT11, 0) for x in (q_BTHK, k_BTHK, v_BTHV))
        beta_BTH, log_decay_BTH = (x.where(keep_BT1, 0) for x in (beta_BTH, log_decay_BTH))
    if initial_state_BHKV is None:
        batch, _, heads, width = q_BTHK.shape
        initial_state_BHKV = q_BTHK.new_zeros(
            (batch, heads, width, v_BTHV.shape[-1]), dtype=arithmetic(q_BTHK.dtype)
        )
    return _DeltaRule.apply(
        q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, initial_state_BHKV, counts_BT,
        Options(scale, l2norm_qk, min(chunk_size or CHUNK_TOKENS, q_BTHK.shape[1])),
    )  # fmt: skip


def delta_rule_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    beta_BH: Tensor,
    log_decay_BH: Tensor | None,
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
        if log_decay_BH is not None:
            state_BHKV = state_BHKV * log_decay_BH.to(dtype).exp()[..., None, None]
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
            for x in (q, k, v, beta.unsqueeze(-1), log_decay.unsqueeze(-1))
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
        dq, dk, dv, dbeta, dlog_decay = grads
        return dq, dk, dv, dbeta.squeeze(-1), dlog_decay.squeeze(-1), dinitial_BHKV, None, None


def _forward_span(x: Chunks, state_RKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, incoming states and the outgoing state of a span."""
    u_NRCV = bmm(x.inverse_NRCC, x.beta_NRC1 * x.v_NRCV)  # less W S below: then U
    w_NRCK = bmm(x.inverse_NRCC, (x.beta_NRC1 * x.carry_NRC1) * x.k_NRCK)
    write_NRKC = (x.to_end_NRC1 * x.k_NRCK).mT
    carry_NR11, count = x.carry_out_NR11, len(u_NRCV)
    states_NRKV = state_RKV.new_empty((count + 1, *state_RKV.shape))  # the last one goes out
    states_NRKV[0] = state_RKV
    for n in range(count):
        u_NRCV[n].baddbmm_(w_NRCK[n], states_NRKV[n], alpha=-1)
        torch.mul(carry_NR11[n], states_NRKV[n], out=states_NRKV[n + 1])
        states_NRKV[n + 1].baddbmm_(write_NRKC[n], u_NRCV[n])
    states_NRKV, state_RKV = states_NRKV[:count], states_NRKV[count].clone()
    scores_NRCC = bmm(x.q_NRCK, x.k_NRCK.mT).mul_(x.decay_NRCC)
    o_NRCV = bmm(x.carry_NRC1 * x.q_NRCK, states_NRKV, plus=bmm(scores_NRCC, u_NRCV))
    return o_NRCV, states_NRKV, state_RKV


def _backward_span(
    x: Chunks, states_NRKV: Tensor, do_NRCV: Tensor, dstate_RKV: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta, log decay (chunk layout) and of the state that came in."""
    q, k, beta, carry = x.q_NRCK, x.k_NRCK, x.beta_NRC1, x.carry_NRC1
    error_NRCV = torch.addcmul(x.v_NRCV, carry, bmm(k, states_NRKV), value=-1)  # V - d K S
    u_NRCV = bmm(x.inverse_NRCC, beta * error_NRCV)
    w_NRCK = bmm(x.inverse_NRCC, (beta * carry) * k)
    scores_NRCC = bmm(q, k.mT).mul_(x.decay_NRCC)
    du_NRCV = bmm(scores_NRCC.mT, do_NRCV)
    dread_NRKV = bmm((carry * q).mT, do_NRCV)
    # The recurrence, backwards: dstates[n] is the gradient of the state before chunk n.
    write_NRCK, carry_NR11, count = x.to_end_NRC1 * k, x.carry_out_NR11, len(u_NRCV)
    dstates_NRKV = dstate_RKV.new_empty((count + 1, *dstate_RKV.shape))
    dstates_NRKV[count] = dstate_RKV
    for n in reversed(range(count)):
        du_NRCV[n].baddbmm_(write_NRCK[n], dstates_NRKV[n + 1])
        torch.addcmul(
            dread_NRKV[n], carry_NR11[n], dstates_NRKV[n + 1], out=dstates_NRKV[n]
        ).baddbmm_(w_NRCK[n].mT, du_NRCV[n], alpha=-1)
    dstate_RKV, dstates_NRKV = dstates_NRKV[0].clone(), dstates_NRKV[1:]  # now: after chunk n

    drhs_NRCV = bmm(x.inverse_NRCC.mT, du_NRCV)  # of beta * error
    dv_NRCV = beta * drhs_NRCV
    da_NRCC = bmm(drhs_NRCV, u_NRCV.mT).mul_(x.decay_NRCC).tril_(-1)  # of -(K K^T)
    dscores_NRCC = bmm(do_NRCV, u_NRCV.mT).mul_(x.decay_NRCC)
    dq_NRCK = carry * bmm(do_NRCV, states_NRKV.mT)
    dq_NRCK = bmm(dscores_NRCC, k, plus=dq_NRCK)
    # k appears as the reader of earlier writes (rows of A, the incoming state) and as the key that
    # later tokens read (columns). The decay's gradient needs the two apart.
    seen_NRCK = bmm(da_NRCC, k)
    dk_row = -(carry * bmm(dv_NRCV, states_NRKV.mT)).addcmul_(beta, seen_NRCK)
    dk_col = x.to_end_NRC1 * bmm(u_NRCV, dstates_NRKV.mT)
    dsum_end_NR1 = dot(k, dk_col).sum(-2)
    dk_col = bmm(dscores_NRCC.mT, q, plus=dk_col)
    dk_col = bmm(da_NRCC.mT, beta * k, plus=dk_col, alpha=-1)
    dbeta_NRC1 = dot(drhs_NRCV, error_NRCV) - dot(k, seen_NRCK)

    # A running sum G_i multiplies, through exp, everything that row i reads, and divides all that
    # later rows read of token i: dG_i is rows minus columns. G_C also carries the state out.
    q_dot, row_dot, col_dot = dot(q, dq_NRCK), dot(k, dk_row), dot(k, dk_col)
    dsum_NRC1 = q_dot + row_dot - col_dot
    kept_NR1 = dot(dstates_NRKV.flatten(2), states_NRKV.flatten(2))
    dsum_NRC1[..., -1, :] += dsum_end_NR1 + carry_NR11[..., 0] * kept_NR1
    dlog_decay_NRC1 = dsum_NRC1.flip(-2).cumsum(-2).flip(-2)

    dk_NRCK = dk_row + dk_col
    if options.l2norm_qk:
        dq_NRCK.addcmul_(q, q_dot, value=-(options.scale**-2))
        dk_NRCK.addcmul_(k, row_dot + col_dot, value=-1)
    dq_NRCK *= x.q_factor_NRC1
    dk_NRCK *= x.k_factor_NRC1
    return dq_NRCK, dk_NRCK, dv_NRCV, dbeta_NRC1, dlog_decay_NRC1, dstate_RKV
