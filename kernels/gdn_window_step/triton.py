"""``gdn_window_step`` in Triton: one launch."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.chunkwise import NORM_EPS
from ltconvert.kernels.gdn_step.triton import operands, plan
from ltconvert.kernels.gdn_window_step import Ring
from ltconvert.kernels.gdn_window_step.kernels import apart_kernel, window_step_kernel
from ltconvert.kernels.scores import base_two

TILE, ELEMENTS = 16384, 32  # as in gdn_step
# Whether recurrence and window have a program each, given room to count. A row alone leaves most
# of a GPU idle, several do not.
APART = {"single": True, "several": False}
WARPS = {"single": 8, "several": 16, "apart": 4}  # of a program at most, as in gdn_step
REGISTERS: int | None = None  # as in gdn_step
SHARE = 2  # blocks of the ring have so many times fewer keys than tiles of the state have columns
AHEAD_BYTES = 2**15  # of keys that are read before anything else: all of 128 by 128 in bf16
MOST_AHEAD = 4  # in as many blocks
STAGES = 3  # blocks of the others on their way, the one at work counted


def gdn_window_step(
    ring: Ring,
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHDD: Tensor,
    norm_weight_HD: Tensor,
    gate_BHD: Tensor,
    *,
    eps: float,
    gate_fn: str,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
    activation: str | None,
    beta_factor: float,
    scale: float,
) -> Tensor:
    """See ``ltconvert.kernels.gdn_window_step.gdn_window_step``."""
    batch, heads, width, _ = state_BHDD.shape
    kind = _kind(batch, ring.arrivals_BH)
    y_BHD = qkv_BC.new_empty(batch, heads, width)
    given = operands(
        qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHDD, norm_weight_HD, gate_BHD,
        conv_weight_CW, conv_history_BCP,
    )  # fmt: skip
    small = [ring.slots_B, ring.lengths_B, ring.outside_B, ring.cos_BD, ring.sin_BD]
    early = overlap.options(qkv_BC.device, *given.early, *small)
    slots_B, lengths_B, outside_B, cos_BD, sin_BD = (
        None if x is None else x.contiguous() for x in small
    )
    rest_BH = ring.rest_BH if ring.rest_BH.stride(1) == 1 else ring.rest_BH.contiguous()
    keys_BHSD, values_BHSD = ring.keys_BHSD, ring.values_BHSD
    side_by_side = keys_BHSD.stride(2) == values_BHSD.stride(2) == width
    slots, bytes_each = keys_BHSD.shape[2], keys_BHSD.element_size()
    units = base_two(ring.scale, ring.soft_cap)
    constants = _plan(width, given.taps, slots, bytes_each, side_by_side, WARPS[kind])
    kernel = apart_kernel if kind == "apart" else window_step_kernel
    room = _room(y_BHD, ring.arrivals_BH) if kind == "apart" else ()
    with torch.cuda.device_of(qkv_BC):
        kernel[(batch * heads * (2 if kind == "apart" else 1),)](
            *given.tensors, scale, eps, beta_factor, *given.rows, keys_BHSD, values_BHSD, slots_B,
            lengths_B, outside_B, rest_BH, cos_BD, sin_BD, y_BHD, *units,
            slots, *keys_BHSD.stride()[:3], *values_BHSD.stride()[:3],
            rest_BH.stride(0), heads, width, given.taps, activation == "silu", gate_fn, NORM_EPS,
            ring.soft_cap is not None, *room, **constants, **early,
        )  # fmt: skip
    given.put_back(state_BHDD, conv_history_BCP)
    return y_BHD


def _kind(batch: int, arrivals_BH: Tensor | None) -> str:
    """Which of ``WARPS`` holds; "apart" for two programs."""
    rows = "single" if batch == 1 else "several"
    return "apart" if arrivals_BH is not None and APART[rows] else rows


def _room(y_BHD: Tensor, arrivals_BH: Tensor | None) -> tuple[Tensor | None, ...]:
    """For two programs to count in, for their parts of the output, and for a weight."""
    other_BHD, local_BHD = y_BHD.new_empty(2, *y_BHD.shape, dtype=torch.float32)
    left_BH = y_BHD.new_empty(y_BHD.shape[:2], dtype=torch.float32)
    return arrivals_BH, other_BHD, local_BHD, left_BH


@cache
def _plan(
    width: int, taps: int, slots: int, bytes_each: int, side_by_side: bool, warps: int
) -> dict[str, int]:
    """The kernel's constants and its launch options."""
    block = triton.next_power_of_2(width)
    elements = ELEMENTS if block <= 128 else 2 * ELEMENTS
    state = plan(width, width, taps, TILE, elements, warps, REGISTERS)
    keys = max(16, min(state["BV"] // SHARE, triton.next_power_of_2(slots)))
    fitting = max(1, AHEAD_BYTES // (keys * block * bytes_each))
    ahead = min(triton.cdiv(slots, keys), fitting, MOST_AHEAD)
    long = slots > ahead * keys
    ahead = max(1, ahead // 2) if long else ahead  # a loop needs registers as well
    return {
        "BN": keys, "AHEAD": ahead, "LONG": long, "STAGES": STAGES,
        "FETCH": long and side_by_side,
        **state,
    }  # fmt: skip
