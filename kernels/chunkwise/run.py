"""Launching the chunkwise kernels, and the differentiable op over them.

B batch, T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.chunkwise.config import Shape, padded
from ltconvert.kernels.chunkwise.output import output_kernel
from ltconvert.kernels.chunkwise.prepare import prepare_kernel
from ltconvert.kernels.chunkwise.read_gradient import read_gradient_kernel
from ltconvert.kernels.chunkwise.scan import reverse_scan_kernel, scan_kernel
from ltconvert.kernels.chunkwise.write_gradient import write_gradient_kernel
from ltconvert.kernels.limits import CHUNK_TOKENS


class Inputs(NamedTuple):
    """One problem. ``beta`` makes it the delta rule; ``decay`` is [B, T, H] or [B, T, H, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    decay: Tensor
    initial: Tensor | None
    counts: Tensor | None
    scale: float
    l2norm: bool

    @property
    def per_channel(self) -> bool:
        """Whether every key channel has a decay of its own."""
        return self.decay.dim() == 4

    @property
    def shape(self) -> Shape:
        """Sizes and launch options."""
        batch, length, heads, key_width = self.q.shape
        return Shape(
            batch,
            length,
            heads,
            key_width,
            self.v.shape[-1],
            dtype=self.q.dtype,
            delta=self.beta is not None,
            per_channel=self.per_channel,
        )

    @property
    def flags(self) -> dict[str, Any]:
        """The kernels' compile-time switches."""
        return {
            "DELTA": self.beta is not None,
            "PER_CHANNEL": self.per_channel,
            "SEGMENTS": self.counts is not None,
            "L2NORM": self.l2norm,
        }


class Kept(NamedTuple):
    """What a backward pass takes from the forward one; empty where there is none.

    Inverting is most of the first kernel's time and its result a fraction of the inputs' size; all
    else is cheap or large, and computed again.
    """

    inverse: Tensor
    k_factor: Tensor

    @classmethod
    def of(cls, x: Inputs) -> Kept:
        """Room for it."""
        cells = x.shape.cells
        square = (cells, CHUNK_TOKENS, CHUNK_TOKENS) if x.beta is not None else (0,)
        row = (cells, CHUNK_TOKENS) if x.l2norm else (0,)
        return cls(x.q.new_empty(square), x.q.new_empty(row, dtype=torch.float32))


class States(NamedTuple):
    """What `_states` leaves for outputs and gradients; [B * H * chunks, ...], filled up."""

    sums: Tensor
    u: Tensor | None
    w: Tensor | None
    state: Tensor
    final: Tensor


def _states(x: Inputs, kept: Kept, *, known: bool) -> States:
    """The first two kernels: everything up to each chunk's incoming state.

    Args:
        known: ``kept`` holds what it is for; else it is written here.
    """
    s = x.shape
    cells = s.cells
    u = w = None
    size = (cells, CHUNK_TOKENS, s.key_padded) if x.per_channel else (cells, CHUNK_TOKENS)
    fast = x.per_channel and x.q.dtype != torch.float32
    sums = x.q.new_empty(size, dtype=torch.float32 if fast else torch.float64)
    if x.beta is not None:
        u = x.q.new_empty((cells, CHUNK_TOKENS, s.value_padded))
        w = x.q.new_empty((cells, CHUNK_TOKENS, s.key_padded))
    prepare_kernel[(cells,)](
        x.k, x.v, x.beta, x.decay, x.counts, sums, kept.k_factor, kept.inverse, u, w,
        *x.k.stride()[:3], *x.v.stride()[:3],
        *s.sizes, **s.blocks, **x.flags, **s.precision, KNOWN=known, num_warps=4,
    )  # fmt: skip
    state = x.q.new_empty((cells, s.key_padded, s.value_padded))
    final = x.q.new_empty((s.batch, s.heads, s.key_width, s.value_width), dtype=torch.float32)
    scan_kernel[(s.scan_programs,)](
        x.k, x.v, x.counts, sums, kept.k_factor, u, w, x.initial, final, state,
        *x.k.stride()[:3], *x.v.stride()[:3],
        *s.sizes, **s.scan_blocks, **x.flags, **s.precision, INITIAL=x.initial is not None,
        **s.scan_launch,
    )  # fmt: skip
    return States(sums, u, w, state, final)


def forward(x: Inputs) -> tuple[Tensor, Tensor, Kept]:
    """(outputs [B, T, H, V], final state [B, H, K, V] fp32, what `backward` needs of it)."""
    s, kept = x.shape, Kept.of(x)
    with torch.cuda.device_of(x.q):
        y = _states(x, kept, known=False)
        o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        blocks = s.blocks | {"BV": s.value_block}
        output_kernel[(s.cells * (s.value_padded // blocks["BV"]),)](
            x.q, x.k, x.v, x.counts, y.sums, kept.k_factor, y.u, y.state, o,
            *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3],
            *s.sizes, x.scale, **blocks, **x.flags, **s.precision, num_warps=4,
        )  # fmt: skip
    return o, y.final, kept


def backward(x: Inputs, kept: Kept, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta (None without one), decay and the initial state."""
    s = x.shape
    do, dfinal = (_aligned(t.contiguous()) for t in (do, dfinal))
    cells = s.cells
    with torch.cuda.device_of(x.q):
        y = _states(x, kept, known=True)
        q_factor = x.q.new_empty((cells, CHUNK_TOKENS), dtype=torch.float32) if x.l2norm else None
        du = x.q.new_empty((cells, CHUNK_TOKENS, s.value_padded))
        dp = x.q.new_empty((cells, CHUNK_TOKENS, CHUNK_TOKENS))
        dq, dk, dv = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)
        )
        dbeta = None if x.beta is None else torch.empty_like(x.beta)
        ddecay = torch.empty_like(x.decay)
        read_gradient_kernel[(cells,)](
            x.q, x.k, x.v, do, x.counts, y.sums, q_factor, kept.k_factor, y.u, y.state,
            du, dp, dq, ddecay,
            *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *s.sizes, x.scale,
            **s.blocks, **x.flags, **s.precision, num_warps=4,
        )  # fmt: skip
        dstate = torch.empty_like(y.state)
        dinitial = torch.empty_like(y.final)
        reverse_scan_kernel[(s.scan_programs,)](
            x.q, x.k, do, x.counts, y.sums, q_factor, kept.k_factor, y.w, du,
            dfinal, dinitial, dstate,
            *x.q.stride()[:3], *x.k.stride()[:3], *s.sizes, x.scale,
            **s.scan_blocks, **x.flags, **s.precision, **s.reverse_launch,
        )  # fmt: skip
        write_gradient_kernel[(cells,)](
            x.q, x.k, x.v, x.beta, x.counts, y.sums, kept.k_factor,
            kept.inverse, y.u, du, dp, y.state, dstate, dk, dv, dbeta, ddecay,
            *x.q.stride()[:3], *x.k.stride()[:3], *x.v.stride()[:3], *s.sizes,
            **s.write_launch, **x.flags, **s.precision,
        )  # fmt: skip
    return dq, dk, dv, dbeta, ddecay, dinitial


@torch.library.custom_op("ltconvert::chunkwise", mutates_args=())
def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor,
    initial: Tensor | None, counts: Tensor | None, scale: float, l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (_aligned(t) for t in (q, k, v))
    o, final, kept = forward(Inputs(q, k, v, beta, decay, initial, counts, scale, l2norm))
    return o, final, *kept


@_chunkwise.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    batch, _, heads, width = q.shape
    final = q.new_empty((batch, heads, width, v.shape[-1]), dtype=torch.float32)
    kept = Kept.of(Inputs(q, k, v, beta, decay, *rest))
    return torch.empty_like(v, memory_format=torch.contiguous_format), final, *kept


@torch.library.custom_op("ltconvert::chunkwise_backward", mutates_args=())
def _chunkwise_backward(
    do: Tensor, dfinal: Tensor, inverse: Tensor, k_factor: Tensor,
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor,
    initial: Tensor | None, counts: Tensor | None, scale: float, l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (_aligned(t) for t in (q, k, v))
    x = Inputs(q, k, v, beta, decay, initial, counts, scale, l2norm)
    grads = backward(x, Kept(inverse, k_factor), do, dfinal)
    # An op's results are tensors: empty ones stand for gradients that nobody asks for.
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@_chunkwise_backward.register_fake
def _(
    do: Tensor, dfinal: Tensor, inverse: Tensor, k_factor: Tensor,
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    dbeta = q.new_empty(0) if beta is None else torch.empty_like(beta)
    return (
        *like,
        dbeta,
        torch.empty_like(decay),
        torch.empty_like(dfinal, memory_format=torch.contiguous_format),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.l2norm = inputs
    o, final, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # no zeros for what is kept
    ctx.like = o.shape, final.shape
    ctx.save_for_backward(*kept, *tensors)


def _differentiate(
    ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    inverse, k_factor, *tensors = ctx.saved_tensors
    v = tensors[2]
    do = v.new_zeros(ctx.like[0]) if do is None else do
    dfinal = v.new_zeros(ctx.like[1], dtype=torch.float32) if dfinal is None else dfinal
    grads = _chunkwise_backward(do, dfinal, inverse, k_factor, *tensors, ctx.scale, ctx.l2norm)
    grads = [g if t is not None else None for g, t in zip(grads, tensors, strict=False)]
    return (*grads, None, None, None)


_chunkwise.register_autograd(_differentiate, setup_context=_setup)


def linear_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor | None,
    log_decay: Tensor | None, initial_state_BHKV: Tensor | None, counts_BT: Tensor | None,
    *, scale: float, l2norm_qk: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [B, T, H, V] in v's dtype and the final state in fp32.

    With ``beta_BTH`` the delta rule, without it decay attention. Widths are filled up with zeros,
    which changes nothing that is kept.
    """
    assert beta_BTH is not None or not l2norm_qk, "decay attention takes keys as they are"
    key_width, value_width = q_BTHK.shape[-1], v_BTHV.shape[-1]
    dtype = torch.promote_types(torch.promote_types(q_BTHK.dtype, k_BTHK.dtype), v_BTHV.dtype)
    q, k, v = (_filled(t.to(dtype)) for t in (q_BTHK, k_BTHK, v_BTHV))
    if log_decay is None:
        log_decay = q.new_zeros(q.shape[:3], dtype=torch.float32)
    decay = log_decay.float()
    decay = (_filled(decay) if decay.dim() == 4 else decay).contiguous()
    beta = None if beta_BTH is None else beta_BTH.float().contiguous()
    initial = initial_state_BHKV
    if initial is not None:
        initial = _filled(_filled(initial.float()).mT).mT.contiguous()
    counts = None if counts_BT is None else counts_BT.to(torch.int32).contiguous()
    o, final, *_ = _chunkwise(q, k, v, beta, decay, initial, counts, scale, l2norm_qk)
    return o[..., :value_width].to(v_BTHV.dtype), final[..., :key_width, :value_width]


def _filled(x: Tensor) -> Tensor:
    """Zeros behind the last axis, up to a width that whole blocks divide."""
    spare = padded(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, spare)) if spare else x


def _aligned(x: Tensor) -> Tensor:
    """The same with the last axis contiguous and rows at multiples of 16 elements.

    For other layouts Triton 3.6 compiles other code, whose gradient of k was wrong on an H200.
    """
    starts = (*x.stride()[:-1], x.storage_offset())
    even = x.stride(-1) == 1 and all(start % 16 == 0 for start in starts)
    return x if even else x.clone(memory_format=torch.contiguous_format)
