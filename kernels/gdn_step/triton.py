"""``gdn_step`` in Triton: one launch.

Decoding launches it for every layer and token, so eager calls go to the kernel directly; only
``torch.compile`` sees a registered op.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.chunkwise import NORM_EPS
from ltconvert.kernels.gdn_step.kernels import step_kernel

TILE = 16384  # elements of a state that a program holds at a time: all of a head of 128 by 128
ELEMENTS = 32  # of it a thread
MOST_WARPS = 16
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
    taps, state, history = 1, state_BHKV.contiguous(), None
    if conv_weight_CW is not None and conv_history_BCP is not None:
        taps, history = conv_weight_CW.shape[1], conv_history_BCP.contiguous()
        conv_weight_CW = conv_weight_CW.contiguous()
    constants, launch = _plan(key_width, value_width, taps)
    early = overlap.options(
        qkv_BC.device, state_BHKV, conv_history_BCP, conv_weight_CW, log_rate_H, rate_bias_H,
        norm_weight_HV,
    )  # fmt: skip
    # Rows may lie apart: all four are often columns of one product.
    qkv_BC, beta_BH, decay_BH = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (qkv_BC, beta_BH, decay_BH)
    )
    if gate_BHV.stride()[1:] != (value_width, 1):
        gate_BHV = gate_BHV.contiguous()
    with torch.cuda.device_of(qkv_BC):
        step_kernel[(batch * heads,)](
            qkv_BC, conv_weight_CW, history, beta_BH, decay_BH, log_rate_H.contiguous(),
            rate_bias_H.contiguous(), state, norm_weight_HV.contiguous(), gate_BHV, y_BHV, scale,
            eps, beta_factor, qkv_BC.stride(0), beta_BH.stride(0), decay_BH.stride(0),
            gate_BHV.stride(0), heads, key_width, value_width, taps, silu, gate_fn, NORM_EPS,
            **constants, **launch, **early,
        )  # fmt: skip
    if state is not state_BHKV:
        state_BHKV.copy_(state)
    if conv_history_BCP is not None and history is not None and history is not conv_history_BCP:
        conv_history_BCP.copy_(history)
    return y_BHV


_registered_step = torch.library.custom_op(
    "ltconvert::gdn_step", _step, mutates_args=("state_BHKV", "conv_history_BCP")
)


@_registered_step.register_fake
def _output(qkv_BC: Tensor, *inputs: Any) -> Tensor:
    return qkv_BC.new_empty(inputs[6].shape)  # the gate's


@cache
def _plan(key_width: int, value_width: int, taps: int) -> tuple[dict[str, int], dict[str, int]]:
    """The kernel's constants and its launch options."""
    keys = triton.next_power_of_2(key_width)
    values = min(triton.next_power_of_2(value_width), max(16, TILE // keys))
    warps = max(1, min(MOST_WARPS, keys * values // (32 * ELEMENTS)))
    # A number of a window a thread: with fewer, threads would read them again and again.
    window = max(triton.next_power_of_2(taps), 32 * warps // min(keys, values))
    constants = {"BK": keys, "BV": values, "BW": window, "BLOCKS": triton.cdiv(value_width, values)}
    launch = {"num_warps": warps}
    if REGISTERS is not None and torch.version.hip is None:
        launch["maxnreg"] = REGISTERS
    return constants, launch
