"""``norm_gate`` in plain PyTorch; the backward keeps the inputs alone and recomputes the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ltconvert.kernels.untraced import untraced


def norm_gate(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, gate_fn: str) -> Tensor:
    """See ``ltconvert.kernels.norm_gate.norm_gate``."""
    return _norm_gate(x, weight, gate, eps, gate_fn)


class _NormGate(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.gate_fn = eps, gate_fn
        normed, _ = _norm(x, eps)
        opened, _ = _open(gate.to(normed.dtype), gate_fn, slope=False)
        return normed.mul_(weight.to(normed.dtype)).mul_(opened).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        normed, factor = _norm(x, ctx.eps)
        work = normed.dtype
        opened, slope = _open(gate.to(work), ctx.gate_fn, slope=True)
        dy, scale = dy.to(work), weight.to(work)
        dgate = (slope.mul_(normed).mul_(scale)).mul_(dy)
        dscaled = opened.mul_(dy)  # of normed * weight
        dweight = (dscaled * normed).sum_to_size(weight.shape)
        dnormed = dscaled.mul_(scale)
        pull = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.addcmul_(normed, pull, value=-1).mul_(factor)
        return dx.to(x.dtype), dweight.to(weight.dtype), dgate.to(gate.dtype), None, None


@untraced
def _norm_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str) -> Tensor:
    return _NormGate.apply(x, weight, gate, eps, gate_fn)


def _norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x over its root mean square, the factor applied), in fp32 (fp64 for fp64)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * factor, factor


def _open(gate: Tensor, gate_fn: str, *, slope: bool) -> tuple[Tensor, Tensor]:
    """The gate's function and, if asked for, its derivative (else the function once more)."""
    opened = torch.sigmoid(gate)
    if gate_fn == "silu":
        value = gate * opened
        return value, (1 - opened).mul_(gate).add_(1).mul_(opened) if slope else value
    factor = 2.0 if gate_fn == "2sigmoid" else 1.0
    return opened * factor, (1 - opened).mul_(opened).mul_(factor) if slope else opened
