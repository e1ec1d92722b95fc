"""``norm_gate`` in Triton; the backward reads the inputs again and recomputes the rest.

Rows are seen as [N, G, D], G the heads of a weight [H, D] and 1 for a weight [D], so that a program
has one row of the weight. Its gradient is summed by program and then over programs: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels.norm_gate.kernels import backward_kernel, forward_kernel

ELEMENTS = {"forward": 4096, "backward": 2048}  # of a tile
TILES = 8  # that a program of the backward walks over


def norm_gate(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, gate_fn: str) -> Tensor:
    """See ``ltconvert.kernels.norm_gate.norm_gate``."""
    return _norm_gate(x, weight, gate, eps, gate_fn)


@torch.library.custom_op("ltconvert::norm_gate", mutates_args=())
def _norm_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str) -> Tensor:
    y = _output(x, weight, gate, eps, gate_fn)
    x_NGD, gate_NGD = _rows(x, weight), _rows(gate, weight)
    rows, groups, width = x_NGD.shape
    tile, block, warps = _plan("forward", rows, width)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(rows, tile) * groups,)](
            x_NGD, weight.contiguous(), gate_NGD, y, rows, groups, eps,
            *x_NGD.stride()[:2], *gate_NGD.stride()[:2],
            D=width, GATE_FN=gate_fn, BN=tile, BD=block, num_warps=warps,
        )  # fmt: skip
    return y


@_norm_gate.register_fake
def _output(x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("ltconvert::norm_gate_backward", mutates_args=())
def _norm_gate_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dgate = _gradients(dy, x, weight, gate, eps, gate_fn)
    x_NGD, gate_NGD = _rows(x, weight), _rows(gate, weight)
    rows, groups, width = x_NGD.shape
    tile, block, warps = _plan("backward", rows, width)
    parts = triton.cdiv(rows, tile * TILES)
    partial_PGD = x.new_empty(parts, groups, width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[(parts * groups,)](
            dy.contiguous(), x_NGD, weight.contiguous(), gate_NGD, dx, dgate, partial_PGD,
            rows, groups, eps, *x_NGD.stride()[:2], *gate_NGD.stride()[:2],
            D=width, GATE_FN=gate_fn, BN=tile, BD=block, TILES=TILES, num_warps=warps,
        )  # fmt: skip
    dweight.copy_(partial_PGD.sum(0).view_as(dweight))
    return dx, dweight, dgate


@_norm_gate_backward.register_fake
def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor, eps: float, gate_fn: str
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gate.new_empty(gate.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps, ctx.gate_fn = inputs[3:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads = _norm_gate_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.gate_fn)
    return (*grads, None, None)


_norm_gate.register_autograd(_backward, setup_context=_keep_inputs)


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """x as [N, G, D] with contiguous channels: a view wherever there is one."""
    x_NGD = x.reshape(-1, weight.shape[0] if weight.dim() == 2 else 1, x.shape[-1])
    return x_NGD if x_NGD.stride(-1) == 1 else x_NGD.contiguous()


def _plan(pass_name: str, rows: int, width: int) -> tuple[int, int, int]:
    """(rows of a tile, its width, warps): a bounded number of elements, less for few rows."""
    block = triton.next_power_of_2(width)
    tile = min(max(1, ELEMENTS[pass_name] // block), triton.next_power_of_2(max(1, rows)))
    return tile, block, max(1, min(4, tile * block // 256))
