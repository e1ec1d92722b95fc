"""``decode_attention`` in Triton: one launch over parts of the keys, one that puts them together.

The number of parts follows from sizes that the host knows, never from the lengths: a CUDA graph
replays the same grid while a sequence grows. As in `gdn_step`, eager calls go to the kernels
directly and only ``torch.compile`` sees a registered op.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_attention.kernels import (
    combine_kernel,
    grouped_kernel,
    single_kernel,
)
from ltconvert.kernels.decoding import processors

TILE = 4096  # keys times channels of a block that does without matrix units: 32 keys of 128
STAGES = 3  # such blocks read ahead, the one at work counted
KEYS = 64  # of a block that goes through matrix units
HEADS = 16  # rows of the smallest matrix unit
RESIDENT = {"single": 4, "grouped": 2}  # programs a multiprocessor that keep its memory busy
MOST_PARTS = 256
FETCHED = 64  # keys and values of a part that are asked for before the query is there
COMBINE = (32, 32)  # parts and channels of a block of the second kernel


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_attention.decode_attention``."""
    attend = _registered_attend if torch.compiler.is_compiling() else _attend
    return attend(q_BHD, k_BGSD, v_BGSD, lengths_B, scale, soft_cap)


def decode_attention_with_sum(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.decode_attention.decode_attention_with_sum``; not compiled."""
    y_BHD, m, l = _in_parts(q_BHD, k_BGSD, v_BGSD, lengths_B, scale, soft_cap, summed=True)  # noqa: E741
    log_sum_BH = (m * math.log(2) + l.log()).logsumexp(-1).unflatten(0, q_BHD.shape[:2])
    return y_BHD, log_sum_BH


class Plan(NamedTuple):
    """How a shape is run: parts of the keys, the kernel's constants, its launch options."""

    parts: int
    programs: int
    grouped: bool
    constants: dict[str, Any]
    launch: dict[str, int]


def _attend(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    return _in_parts(q_BHD, k_BGSD, v_BGSD, lengths_B, scale, soft_cap, summed=False)[0]


def _in_parts(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    scale: float,
    soft_cap: float | None,
    *,
    summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs; where ``summed`` also each part's largest score and sum, [B * H, parts], base 2."""
    batch, heads, width = q_BHD.shape
    groups, slots = k_BGSD.shape[1:3]
    y_BHD = q_BHD.new_empty(q_BHD.shape)
    if not batch:
        return y_BHD, *y_BHD.new_empty(2, 0, 1, dtype=torch.float32)
    plan = _plan(
        batch, heads, groups, slots, width, q_BHD.dtype == torch.float32, processors(q_BHD.device)
    )
    whole = plan.parts == 1 and not summed
    o, m, l = (y_BHD,) * 3  # noqa: E741
    if not whole:
        o = q_BHD.new_empty(batch * heads, plan.parts, width, dtype=torch.float32)
        m, l = q_BHD.new_empty(2, batch * heads, plan.parts, dtype=torch.float32)  # noqa: E741
    factor = scale * math.log2(math.e) if soft_cap is None else scale / soft_cap
    cap = 1.0 if soft_cap is None else soft_cap * math.log2(math.e)
    kernel = grouped_kernel if plan.grouped else single_kernel
    early = overlap.options(q_BHD.device, lengths_B)
    side_by_side = k_BGSD.stride(2) == v_BGSD.stride(2) == width
    with torch.cuda.device_of(q_BHD):
        kernel[(plan.programs,)](
            q_BHD.contiguous(), k_BGSD, v_BGSD, lengths_B.contiguous(), o, m, l, factor, cap,
            plan.parts, slots, *k_BGSD.stride()[:3], *v_BGSD.stride()[:3],
            H=heads, CAPPED=soft_cap is not None, WHOLE=whole, D=width,
            FETCH=FETCHED if side_by_side else 0, **plan.constants, **plan.launch, **early,
        )  # fmt: skip
        if not whole:
            parts, channels = COMBINE
            combine_kernel[(batch * heads * triton.cdiv(width, channels),)](
                o, m, l, y_BHD, plan.parts, D=width, BD=channels,
                MOST=max(parts, triton.next_power_of_2(plan.parts)), BP=parts, num_warps=4,
                **early,
            )  # fmt: skip
    return y_BHD, m, l


_registered_attend = torch.library.custom_op(
    "ltconvert::decode_attention", _attend, mutates_args=()
)


@_registered_attend.register_fake
def _output(q_BHD: Tensor, *inputs: Any) -> Tensor:
    return q_BHD.new_empty(q_BHD.shape)


@cache
def _plan(
    batch: int, heads: int, groups: int, slots: int, width: int, full: bool, multiprocessors: int
) -> Plan:
    """``full``: the inputs are fp32."""
    group = heads // groups
    cells = batch * groups
    if group == 1:
        block = max(16, triton.next_power_of_2(width))
        keys = max(16, TILE // block)
        parts = _parts(cells, slots, keys, RESIDENT["single"] * multiprocessors)
        constants = {"BD": block, "BN": keys, "STAGES": STAGES}
        return Plan(parts, cells * parts, False, constants, {"num_warps": 4})
    # Narrower blocks in matrix units have given wrong results on Hopper (docs/negative-results.md).
    block = max(64, triton.next_power_of_2(width))
    wide = block > 128
    sets = triton.cdiv(group, HEADS)
    resident = 1 if wide else RESIDENT["grouped"]
    parts = _parts(cells * sets, slots, KEYS, resident * multiprocessors)
    constants = {
        "BD": block, "BN": KEYS, "GROUP": group, "SETS": sets, "R": HEADS,
        "PRECISION": ("ieee" if torch.version.hip else "tf32x3") if full else "tf32",
    }  # fmt: skip
    stages = 1 if full else 2 if wide else 3
    launch = {"num_warps": 8 if wide or full else 4, "num_stages": stages}
    return Plan(parts, cells * sets * parts, True, constants, launch)


def _parts(cells: int, slots: int, keys: int, programs: int) -> int:
    """As many as bring the programs nearest to those wanted, at most a part a block of slots."""
    wanted = (programs + cells // 2) // cells
    return max(1, min(wanted, triton.cdiv(slots, keys), MOST_PARTS))
