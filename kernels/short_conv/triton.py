"""``short_conv`` in Triton: registration for autograd and ``torch.compile``, and launches.

The gradient of the weight is summed by program into a buffer and then over programs: no atomics, so
runs repeat bit by bit. B batch, T tokens, D channels, W taps, H = W - 1 tokens of history.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels.segments import padding_mask, segment_counts
from ltconvert.kernels.short_conv.kernels import backward_kernel, forward_kernel

CHANNELS = {"forward": 512, "backward": 256}  # of a program; 128 a warp
ROWS = {"forward": 8, "backward": 4}  # a step: how many reads are in flight, paid in registers
WALK = {"forward": 64, "backward": 128}  # rows of a program: less read twice, but fewer programs


def short_conv(
    x_BTD: Tensor,
    weight_DW: Tensor,
    *,
    history_BDH: Tensor | None,
    segment_ids_BT: Tensor | None,
    keep_BT: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.short_conv.short_conv``."""
    keep_BT = padding_mask(keep_BT)
    counts_BT = segment_counts(segment_ids_BT, keep_BT)
    return _short_conv(x_BTD, weight_DW, history_BDH, counts_BT, keep_BT, activation == "silu")


@torch.library.custom_op("ltconvert::short_conv", mutates_args=())
def _short_conv(
    x_BTD: Tensor,
    weight_DW: Tensor,
    history_BDH: Tensor | None,
    counts_BT: Tensor | None,
    keep_BT: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    y_BTD, last_BDH = _outputs(x_BTD, weight_DW, history_BDH, counts_BT, keep_BT, silu)
    batch, length, channels = x_BTD.shape
    x_BTD = _rows(x_BTD)
    rows, steps, width = _plan("forward", length, channels)
    grid = (batch * triton.cdiv(length, rows * steps) * triton.cdiv(channels, width),)
    with torch.cuda.device_of(x_BTD):
        forward_kernel[grid](
            x_BTD, weight_DW.t().contiguous(), *_flat(history_BDH, counts_BT, keep_BT),
            y_BTD, last_BDH, length, channels, x_BTD.stride(0), x_BTD.stride(1),
            W=weight_DW.shape[1], SILU=silu, R=rows, STEPS=steps, D=width,
            num_warps=triton.cdiv(width, 128),
        )  # fmt: skip
    return y_BTD, last_BDH


@_short_conv.register_fake
def _outputs(
    x_BTD: Tensor,
    weight_DW: Tensor,
    history_BDH: Tensor | None,
    counts_BT: Tensor | None,
    keep_BT: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    batch, _, channels = x_BTD.shape
    return x_BTD.new_empty(x_BTD.shape), x_BTD.new_empty(batch, channels, weight_DW.shape[1] - 1)


@torch.library.custom_op("ltconvert::short_conv_backward", mutates_args=())
def _short_conv_backward(
    dy_BTD: Tensor,
    dlast_BDH: Tensor | None,
    x_BTD: Tensor,
    weight_DW: Tensor,
    history_BDH: Tensor | None,
    counts_BT: Tensor | None,
    keep_BT: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and history; the last is empty without history."""
    dx_BTD, dweight_DW, dhistory_BDH = _gradients(
        dy_BTD, dlast_BDH, x_BTD, weight_DW, history_BDH, counts_BT, keep_BT, silu
    )
    batch, length, channels = x_BTD.shape
    taps = weight_DW.shape[1]
    x_BTD = _rows(x_BTD)
    rows, steps, width = _plan("backward", length + taps - 1, channels, halo=taps - 1)
    parts = batch * triton.cdiv(length + taps - 1, rows * steps - (taps - 1))
    partial_PWD = dy_BTD.new_empty(parts, taps, channels, dtype=torch.float32)
    with torch.cuda.device_of(x_BTD):
        backward_kernel[(parts * triton.cdiv(channels, width),)](
            *_flat(dy_BTD, dlast_BDH), x_BTD, weight_DW.t().contiguous(),
            *_flat(history_BDH, counts_BT, keep_BT), dx_BTD, dhistory_BDH, partial_PWD,
            length, channels, x_BTD.stride(0), x_BTD.stride(1),
            W=taps, SILU=silu, R=rows, STEPS=steps, D=width, num_warps=triton.cdiv(width, 128),
        )  # fmt: skip
    dweight_DW.copy_(partial_PWD.sum(0).t())
    return dx_BTD, dweight_DW, dhistory_BDH


@_short_conv_backward.register_fake
def _gradients(
    dy_BTD: Tensor,
    dlast_BDH: Tensor | None,
    x_BTD: Tensor,
    weight_DW: Tensor,
    history_BDH: Tensor | None,
    counts_BT: Tensor | None,
    keep_BT: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dhistory = (
        x_BTD.new_empty(0) if history_BDH is None else history_BDH.new_empty(history_BDH.shape)
    )
    return x_BTD.new_empty(x_BTD.shape), weight_DW.new_empty(weight_DW.shape), dhistory


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.silu = inputs[5]
    ctx.set_materialize_grads(False)  # nearly always the new history has no gradient


def _backward(ctx: Any, dy_BTD: Tensor | None, dlast_BDH: Tensor | None) -> tuple[Any, ...]:
    x_BTD, weight_DW, history_BDH, counts_BT, keep_BT = ctx.saved_tensors
    if dy_BTD is None:
        dy_BTD = torch.zeros_like(x_BTD)
    dx_BTD, dweight_DW, dhistory_BDH = _short_conv_backward(
        dy_BTD, dlast_BDH, x_BTD, weight_DW, history_BDH, counts_BT, keep_BT, ctx.silu
    )
    return dx_BTD, dweight_DW, None if history_BDH is None else dhistory_BDH, None, None, None


_short_conv.register_autograd(_backward, setup_context=_keep_inputs)


def _plan(pass_name: str, length: int, channels: int, halo: int = 0) -> tuple[int, int, int]:
    """(rows a step, steps, channels) of a program; short rows get short walks."""
    rows, walk = ROWS[pass_name], WALK[pass_name]
    if length <= walk // 2:
        walk = triton.next_power_of_2(length + halo)
    rows = min(rows, walk)
    return rows, walk // rows, min(CHANNELS[pass_name], max(32, triton.next_power_of_2(channels)))


def _rows(x_BTD: Tensor) -> Tensor:
    """x with contiguous channels; batch and token axes may lie anywhere."""
    return x_BTD if x_BTD.stride(-1) == 1 else x_BTD.contiguous()


def _flat(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
