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

from ltconvert.kernels.chunkwise import NORM_EPS
from ltconvert.kernels.gdn_step.kernels import step_kernel

TILE = 4096  # elements of a state that a program holds at a time: few registers, many programs
MAX_WARPS = 4  # more threads than key channels would read every one of these several times


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
    key_block, value_block, blocks, warps = _plan(key_width, value_width)
    taps, state, history = 1, state_BHKV.contiguous(), None
    if conv_weight_CW is not None and conv_history_BCP is not None:
        taps, history = conv_weight_CW.shape[1], conv_history_BCP.contiguous()
        conv_weight_CW = conv_weight_CW.contiguous()
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
            key_block, value_block, blocks, num_warps=warps,
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
def _plan(key_width: int, value_width: int) -> tuple[int, int, int, int]:
    """(rows of a block of the state, its columns, blocks, warps)."""
    key_block = triton.next_power_of_2(key_width)
    value_block = min(triton.next_power_of_2(value_width), max(32, TILE // key_block))
    warps = max(1, min(MAX_WARPS, key_block // 32))
    return key_block, value_block, triton.cdiv(value_width, value_block), warps
