"""``decode_linear`` in Triton: one launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_linear.kernels import several_kernel, single_kernel
from ltconvert.kernels.decoding import processors
from ltconvert.kernels.limits import MOST_DECODED_ROWS

LEAST = {"single": 3.0, "several": 0.95}  # programs a multiprocessor, where outputs suffice
# For one row of x:
OUTPUTS = (4, 2, 1)  # of a program
WARPS = 4
ROW_BYTES = 2048  # of a row of the weight in a block: 16 a thread
AHEAD = 3  # such blocks on their way, paid in registers
READ_BYTES = 16  # that a thread reads at once
FETCH = False  # all weights of a program are asked for before x is there
# For several rows of x:
WIDE_OUTPUTS = (64, 32, 16)  # of a program
WIDE_WARPS = 4
BLOCK_BYTES = 8192  # of a block of the weight
WIDE_FETCH = True
STAGES = 5  # blocks on their way, the one at work counted; paid in shared memory


class Plan(NamedTuple):
    """How a shape is run: the kernel's constants, its launch options, all weights asked for."""

    constants: dict[str, Any]
    launch: dict[str, int]
    fetch: bool


def decode_linear(
    x_BC: Tensor,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    *,
    norm_weight_C: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    residual_BO: Tensor | None,
    swiglu: bool,
    activation: str,
) -> Tensor:
    """See ``ltconvert.kernels.decode_linear.decode_linear``."""
    y_BO = x_BC.new_empty(x_BC.shape[0], weight_OC.shape[0] // (2 if swiglu else 1))
    batch, outputs = y_BO.shape
    if not batch or not outputs:
        return y_BO
    kernel, find = (single_kernel, _plan_single) if batch == 1 else (several_kernel, _plan_several)
    channels = x_BC.shape[1]
    plan = find(outputs, channels, x_BC.element_size(), swiglu, processors(x_BC.device))
    small = [x if x is None else x.contiguous() for x in (bias_O, norm_weight_C, residual_BO)]
    with torch.cuda.device_of(x_BC):
        kernel[(triton.cdiv(outputs, plan.constants["BO"]),)](
            x_BC.contiguous(), weight_OC, *small, y_BO, batch, outputs, weight_OC.stride(0),
            norm_eps, norm_offset, C=channels, SWIGLU=swiglu, ACTIVATION=activation,
            **plan.constants, FETCH=plan.fetch and weight_OC.stride(0) == channels,
            **plan.launch, **overlap.options(x_BC.device, bias_O, norm_weight_C),
        )  # fmt: skip
    return y_BO


@cache
def _plan_single(
    outputs: int, channels: int, item_bytes: int, swiglu: bool, multiprocessors: int
) -> Plan:
    chosen = _most(_halved(OUTPUTS, swiglu), outputs, LEAST["single"] * multiprocessors)
    block = min(triton.next_power_of_2(channels), ROW_BYTES // item_bytes)
    constants = {
        "BO": chosen, "BC": block, "AHEAD": min(AHEAD, triton.cdiv(channels, block)),
        "VEC": min(block, READ_BYTES // item_bytes),
    }  # fmt: skip
    return Plan(constants, {"num_warps": WARPS}, FETCH)


@cache
def _plan_several(
    outputs: int, channels: int, item_bytes: int, swiglu: bool, multiprocessors: int
) -> Plan:
    choices = tuple(max(16, x) for x in _halved(WIDE_OUTPUTS, swiglu))
    chosen = _most(choices, outputs, LEAST["several"] * multiprocessors)
    full = item_bytes == 4
    # Narrower blocks in matrix units have given wrong results on Hopper (docs/negative-results.md);
    # in fp32 wider ones run out of registers.
    block = 64 if full else max(64, BLOCK_BYTES // (chosen * (2 if swiglu else 1) * item_bytes))
    constants = {
        "BO": chosen, "BC": block, "BB": MOST_DECODED_ROWS,
        "PRECISION": ("ieee" if torch.version.hip else "tf32x3") if full else "tf32",
    }  # fmt: skip
    launch = {"num_warps": WIDE_WARPS, "num_stages": 2 if full else STAGES}
    return Plan(constants, launch, WIDE_FETCH)


def _halved(choices: tuple[int, ...], swiglu: bool) -> tuple[int, ...]:
    """With a gate, an output has two rows of the weight."""
    return tuple(max(1, x // 2) for x in choices) if swiglu else choices


def _most(choices: tuple[int, ...], outputs: int, programs: float) -> int:
    """The most outputs a program that leave so many programs; else the fewest."""
    enough = (x for x in choices if triton.cdiv(outputs, x) >= programs)
    return next(enough, choices[-1])
