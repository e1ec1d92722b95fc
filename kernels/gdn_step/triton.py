"""``gdn_step`` in Triton: one launch.

Decoding launches it for every layer and token, so eager calls go to the kernel directly; only
``torch.compile`` sees a registered op.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.chunkwise import NORM_EPS
from ltconvert.kernels.gdn_step.kernels import step_kernel

TILE = 16384  # elements of a state that a program holds at a time: all of a head of 128 by 128
ELEMENTS = 32  # of it a thread, or more for want of warps
WARPS = {"single": 4, "several": 16}  # at most, of a row alone and of several
REGISTERS: int | None = None  # of a thread at most; None leaves it to the compiler


def gdn_step(
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHKV: Tensor,
    norm_weight_HV: Tensor,
    gate_BHV: Tensor,
    *,
    eps: float,
    gate_fn: str,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
    activation: str | None,
    beta_factor: float,
    scale: float,
) -> Tensor:
    """See ``ltconvert.kernels.gdn_step.gdn_step``."""
    step = _registered_step if torch.compiler.is_compiling() else _step
    return step(
        qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHKV, norm_weight_HV, gate_BHV,
        conv_weight_CW, conv_history_BCP, eps, gate_fn, activation == "silu", beta_factor, scale,
    )  # fmt: skip


def _step(
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHKV: Tensor,
    norm_weight_HV: Tensor,
    gate_BHV: Tensor,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
    eps: float,
    gate_fn: str,
    silu: bool,
    beta_factor: float,
    scale: float,
) -> Tensor:
    batch, heads, key_width, value_width = state_BHKV.shape
    y_BHV = qkv_BC.new_empty(batch, heads, value_width)
    given = operands(
        qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHKV, norm_weight_HV, gate_BHV,
        conv_weight_CW, conv_history_BCP,
    )  # fmt: skip
    early = overlap.options(qkv_BC.device, *given.early)
    warps = WARPS["single" if batch == 1 else "several"]
    with torch.cuda.device_of(qkv_BC):
        step_kernel[(batch * heads,)](
            *given.tensors, scale, eps, beta_factor, *given.rows, y_BHV,
            heads, key_width, value_width, given.taps, silu, gate_fn, NORM_EPS,
            **plan(key_width, value_width, given.taps, TILE, ELEMENTS, warps, REGISTERS), **early,
        )  # fmt: skip
    given.put_back(state_BHKV, conv_history_BCP)
    return y_BHV


_registered_step = torch.library.custom_op(
    "ltconvert::gdn_step", _step, mutates_args=("state_BHKV", "conv_history_BCP")
)


@_registered_step.register_fake
def _output(qkv_BC: Tensor, *inputs: Any) -> Tensor:
    return qkv_BC.new_empty(inputs[6].shape)  # the gate's


class Operands(NamedTuple):
    """What a kernel of a recurrent token is given.

    Attributes:
        tensors: in the kernel's order.
        rows: strides of the rows of four of them.
        taps: of the convolution; 1 without one.
        early: what the kernel reads before its turn, as the caller has it.
    """

    tensors: tuple[Tensor | None, ...]
    rows: tuple[int, ...]
    taps: int
    early: tuple[Tensor | None, ...]

    def put_back(self, state_BHKV: Tensor, history_BCP: Tensor | None) -> None:
        """Copy state and history to where the caller has them, unless the kernel wrote there."""
        _, _, history, *_, state, _, _ = self.tensors
        for made, wanted in ((state, state_BHKV), (history, history_BCP)):
            if made is not None and wanted is not None and made is not wanted:
                wanted.copy_(made)


def operands(
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHKV: Tensor,
    norm_weight_HV: Tensor,
    gate_BHV: Tensor,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
) -> Operands:
    """The tensors in the layouts and the order of the kernel."""
    early = (
        conv_weight_CW, conv_history_BCP, state_BHKV, log_rate_H, rate_bias_H, norm_weight_HV,
    )  # fmt: skip
    # Rows may lie apart: all four are often columns of one product.
    qkv_BC, beta_BH, decay_BH = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (qkv_BC, beta_BH, decay_BH)
    )
    if gate_BHV.stride()[1:] != (gate_BHV.shape[-1], 1):
        gate_BHV = gate_BHV.contiguous()
    weight, history, state, log_rate, rate_bias, norm_weight = (
        None if x is None else x.contiguous() for x in early
    )
    return Operands(
        (qkv_BC, weight, history, beta_BH, decay_BH, log_rate, rate_bias, state, norm_weight,
         gate_BHV),
        tuple(x.stride(0) for x in (qkv_BC, beta_BH, decay_BH, gate_BHV)),
        1 if conv_weight_CW is None else conv_weight_CW.shape[1],
        early,
    )  # fmt: skip


@cache
def plan(
    key_width: int,
    value_width: int,
    taps: int,
    tile: int,
    elements: int,
    most_warps: int,
    registers: int | None,
) -> dict[str, int]:
    """The kernel's constants and its launch options, from what ``TILE`` and its like say."""
    keys = triton.next_power_of_2(key_width)
    values = min(triton.next_power_of_2(value_width), max(16, tile // keys))
    # Of fewer warps than one for 32 keys, threads have too few registers.
    warps = max(1, min(max(most_warps, keys // 32), keys * values // (32 * elements)))
    # A number of a window a thread: with fewer, threads would read them again and again.
    window = max(triton.next_power_of_2(taps), 32 * warps // min(keys, values))
    # Of four a thread, pairs save more registers than a change of hands costs.
    singly = keys * window <= 2 * 32 * warps
    made = {
        "BK": keys, "BV": values, "BW": window, "BLOCKS": triton.cdiv(value_width, values),
        "SINGLY": singly, "num_warps": warps,
    }  # fmt: skip
    if registers is not None and torch.version.hip is None:
        made["maxnreg"] = registers
    return made
