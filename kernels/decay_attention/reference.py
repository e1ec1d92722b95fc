"""Decayed linear attention in plain PyTorch: chunks of tokens as matrix products.

Within a chunk, with G the running sum of log decays, L_ij = exp(G_i - G_j) for j <= i in the same
segment (else 0), and d_i = exp(G_i) while the incoming state S lives (else 0), the block form of
section 6 of arXiv 2405.21060 reads::

    O  = d * Q S + (Q K^T * L) V
    S' = d_C S + (L_C * K)^T V

Everything but the recurrence S -> S' is batched over chunks. The backward is written out: it keeps
the inputs and each chunk's incoming state and recomputes the rest, a bounded span at a time.

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, K key width,
V value width, D decays of a token (1 here). q is multiplied by the scale when a span is prepared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.kernels.chunkwise.decays import ScalarDecay, decays
from ltconvert.kernels.chunkwise.spans import (
    CHUNK_TOKENS,
    arithmetic,
    bmm,
    from_chunks,
    spans,
    to_chunks,
)
from ltconvert.kernels.untraced import untraced


def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    initial_state_BHKV: Tensor | None,
    counts_BT: Tensor | None,
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.decay_attention.decay_attention`; padding holds zeros."""
    log_decay_BTH1 = log_decay_BTH.unsqueeze(-1)
    if initial_state_BHKV is None:
        batch, _, heads, width = q_BTHK.shape
        initial_state_BHKV = q_BTHK.new_zeros(
            (batch, heads, width, v_BTHV.shape[-1]), dtype=arithmetic(q_BTHK.dtype)
        )
    return _decayed(
        q_BTHK, k_BTHK, v_BTHV, log_decay_BTH1, initial_state_BHKV, counts_BT,
        scale, min(chunk_size or CHUNK_TOKENS, q_BTHK.shape[1]),
    )  # fmt: skip


def decay_attention_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    log_decay_BH: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.decay_attention.decay_attention_step`."""
    dtype = arithmetic(q_BHK.dtype)
    with torch.autocast(q_BHK.device.type, enabled=False):
        decay_BH11 = log_decay_BH.to(dtype).exp()[..., None, None]
        write_BHKV = k_BHK.to(dtype).unsqueeze(-1) * v_BHV.to(dtype).unsqueeze(-2)
        state_BHKV = torch.addcmul(write_BHKV, decay_BH11, state_BHKV.to(dtype))
        o_BHV = ((q_BHK.to(dtype) * scale).unsqueeze(-2) @ state_BHKV).squeeze(-2)
    return o_BHV.to(v_BHV.dtype), state_BHKV


class _Span(NamedTuple):
    """One span, laid out for batched products."""

    q_NRCK: Tensor  # times the scale
    k_NRCK: Tensor
    v_NRCV: Tensor
    decay: ScalarDecay


class _DecayAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay_BTH1: Tensor,
        initial_state: Tensor, counts: Tensor | None, scale: float, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o_BTHV = torch.empty_like(v, memory_format=torch.contiguous_format)
        incoming = []
        with torch.autocast(q.device.type, enabled=False):
            state_RKV = initial_state.to(arithmetic(q.dtype)).flatten(0, 1)
            for span in spans(q, chunk):
                x = _prepare(q, k, v, log_decay_BTH1, counts, scale, chunk, span)
                o_NRCV, states_NRKV, state_RKV = _forward_span(x, state_RKV)
                from_chunks(o_NRCV, o_BTHV, span)
                if any(ctx.needs_input_grad):
                    incoming.append(states_NRKV)
        ctx.save_for_backward(q, k, v, log_decay_BTH1, counts, *incoming)
        ctx.scale, ctx.chunk, ctx.state_dtype = scale, chunk, initial_state.dtype
        return o_BTHV, state_RKV.view(initial_state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BTHV: Tensor, dstate_BHKV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, counts, *incoming = ctx.saved_tensors
        grads = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, log_decay)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dstate_RKV = dstate_BHKV.flatten(0, 1)
            for span in reversed(spans(q, ctx.chunk)):
                x = _prepare(q, k, v, log_decay, counts, ctx.scale, ctx.chunk, span)
                do_NRCV = to_chunks(do_BTHV, span, ctx.chunk, dstate_RKV.dtype)
                *span_grads, dstate_RKV = _backward_span(x, incoming.pop(), do_NRCV, dstate_RKV)
                span_grads[0] *= ctx.scale
                for grad, out in zip(span_grads, grads, strict=True):
                    from_chunks(grad, out, span)
        dinitial_BHKV = dstate_RKV.view(dstate_BHKV.shape).to(ctx.state_dtype)
        return *grads, dinitial_BHKV, None, None, None


@untraced
def _decayed(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _DecayAttention.apply(*arguments)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay_BTH1: Tensor,
    counts_BT: Tensor | None, scale: float, chunk: int, span: slice,
) -> _Span:  # fmt: skip
    dtype = arithmetic(q.dtype)
    q_NRCK, k_NRCK, v_NRCV = (to_chunks(x, span, chunk, dtype) for x in (q, k, v))
    decay = decays(log_decay_BTH1, counts_BT, span, chunk, dtype)
    return _Span(q_NRCK.mul_(scale), k_NRCK, v_NRCV, decay)


def _forward_span(x: _Span, state_RKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, incoming states and the outgoing state of a span."""
    writes_NRKV = bmm((x.decay.to_end_NRCD * x.k_NRCK).mT, x.v_NRCV)
    carry_NRD1, count = x.decay.carry_out_NRD1, len(writes_NRKV)
    states_NRKV = state_RKV.new_empty((count + 1, *state_RKV.shape))  # the last one goes out
    states_NRKV[0] = state_RKV
    for n in range(count):
        torch.addcmul(writes_NRKV[n], carry_NRD1[n], states_NRKV[n], out=states_NRKV[n + 1])
    states_NRKV, state_RKV = states_NRKV[:count], states_NRKV[count].clone()
    o_NRCV = bmm(x.decay.products(x.q_NRCK, x.k_NRCK), x.v_NRCV)
    return bmm(x.decay.carry_NRCD * x.q_NRCK, states_NRKV, plus=o_NRCV), states_NRKV, state_RKV


def _backward_span(
    x: _Span, states_NRKV: Tensor, do_NRCV: Tensor, dstate_RKV: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log decay (chunk layout) and of the state that came in."""
    q, k, v, decay = x
    dread_NRKV = bmm((decay.carry_NRCD * q).mT, do_NRCV)
    # The recurrence, backwards: dstates[n] is the gradient of the state before chunk n.
    carry_NRD1, count = decay.carry_out_NRD1, len(dread_NRKV)
    dstates_NRKV = dstate_RKV.new_empty((count + 1, *dstate_RKV.shape))
    dstates_NRKV[count] = dstate_RKV
    for n in reversed(range(count)):
        torch.addcmul(dread_NRKV[n], carry_NRD1[n], dstates_NRKV[n + 1], out=dstates_NRKV[n])
    dstate_RKV, dstates_NRKV = dstates_NRKV[0].clone(), dstates_NRKV[1:]  # now: after chunk n

    dv_NRCV = bmm(decay.to_end_NRCD * k, dstates_NRKV)
    dv_NRCV = bmm(decay.products(q, k).mT, do_NRCV, plus=dv_NRCV)
    dscores_NRCC = decay.weigh(bmm(do_NRCV, v.mT))
    dq_NRCK = decay.carry_NRCD * bmm(do_NRCV, states_NRKV.mT)
    dq_NRCK = decay.rows(dscores_NRCC, k, plus=dq_NRCK)
    dk_NRCK = decay.to_end_NRCD * bmm(v, dstates_NRKV.mT)
    dsum_end_NRD = decay.fold(k * dk_NRCK).sum(-2)
    dk_NRCK = decay.columns(dscores_NRCC, q, plus=dk_NRCK)
    dlog_decay_NRCD = decay.log_gradient(
        decay.fold(q * dq_NRCK - k * dk_NRCK), dsum_end_NRD, states_NRKV, dstates_NRKV
    )
    return dq_NRCK, dk_NRCK, dv_NRCV, dlog_decay_NRCD, dstate_RKV
