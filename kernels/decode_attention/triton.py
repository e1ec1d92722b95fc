"""``decode_attention`` in Triton: parts of the keys, and what puts them together.

The number of parts follows from sizes that the host knows, never from the lengths: a CUDA graph
replays the same grid while a sequence grows.
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
from ltconvert.kernels.decode_heads.triton import dense, norm_kind
from ltconvert.kernels.decoding import processors
from ltconvert.kernels.scores import base_two

TILE = 4096  # keys times channels of a block that does without matrix units: 32 keys of 128
STAGES = 3  # such blocks read ahead, the one at work counted
KEYS = 64  # of a block that goes through matrix units
HEADS = 16  # rows of the smallest matrix unit
RESIDENT = {"single": 4, "grouped": 2}  # programs a multiprocessor that keep its memory busy
MOST_PARTS = 256
FETCHED = 64  # keys and values of a part that are asked for before the query is there
TOGETHER = 4096  # parts times channels put together at a time; with twice that fewer programs fit
CHANNELS = 32  # of a program of the second kernel


class Token(NamedTuple):
    """What a token brings: queries [B, H, D], or q, k and v side by side [B, M] and their slot."""

    x: Tensor
    slots: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    norm_offset: float = 0.0


class Plan(NamedTuple):
    """How a shape is run: parts of the keys, the kernel's constants, its launch options."""

    parts: int
    programs: int
    grouped: bool
    constants: dict[str, Any]
    launch: dict[str, int]


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    arrivals_BH: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_attention.decode_attention``."""
    token, given = Token(q_BHD.contiguous()), (k_BGSD, v_BGSD, lengths_B, scale, soft_cap)
    return _in_parts(token, q_BHD.shape[1], *given, arrivals_BH)[0]


def decode_attention_with_sum(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.decode_attention.decode_attention_with_sum``."""
    token, given = Token(q_BHD.contiguous()), (k_BGSD, v_BGSD, lengths_B, scale, soft_cap)
    y_BHD, m, l = _in_parts(token, q_BHD.shape[1], *given, summed=True)  # noqa: E741
    log_sum_BH = (m * math.log(2) + l.log()).logsumexp(-1).unflatten(0, q_BHD.shape[:2])
    return y_BHD, log_sum_BH


def decode_self_attention(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float | None,
    cos_BD: Tensor | None,
    sin_BD: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    norm_offset: float,
    arrivals_BH: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.decode_attention.decode_self_attention``."""
    token = Token(
        qkv_BM if qkv_BM.stride(-1) == 1 else qkv_BM.contiguous(), slots_B.contiguous(),
        dense(cos_BD), dense(sin_BD), dense(q_norm_weight), dense(k_norm_weight),
        norm_eps, norm_offset,
    )  # fmt: skip
    y_BHD, *_ = _in_parts(
        token, num_heads, keys_BGSD, values_BGSD, lengths_B, scale, soft_cap, arrivals_BH
    )
    return y_BHD


def _in_parts(
    token: Token,
    heads: int,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    scale: float,
    soft_cap: float | None,
    arrivals_BH: Tensor | None = None,
    *,
    summed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs; where ``summed`` also each part's largest score and sum, [B * H, parts], base 2."""
    batch, groups, slots, width = k_BGSD.shape
    y_BHD = token.x.new_empty(batch, heads, width)
    if not batch:
        return y_BHD, *y_BHD.new_empty(2, 0, 1, dtype=torch.float32)
    full = token.x.dtype == torch.float32
    plan = _plan(batch, heads, groups, slots, width, full, processors(token.x.device))
    whole = plan.parts == 1 and not summed
    o, m, l = (y_BHD,) * 3  # noqa: E741
    if not whole:
        o = token.x.new_empty(batch * heads, plan.parts, width, dtype=torch.float32)
        m, l = token.x.new_empty(2, batch * heads, plan.parts, dtype=torch.float32)  # noqa: E741
    factor, cap = base_two(scale, soft_cap)
    x, slots_B, *row, norm_eps, norm_offset = token
    early = overlap.options(x.device, lengths_B)
    kernel, counted = grouped_kernel if plan.grouped else single_kernel, {}
    if not plan.grouped:
        counted["arrived_ptr"] = None if whole or summed else arrivals_BH
    with torch.cuda.device_of(x):
        kernel[(plan.programs,)](
            x, *row, slots_B, k_BGSD, v_BGSD, lengths_B.contiguous(), o, m, l, y_BHD, factor, cap,
            norm_eps, norm_offset, plan.parts, slots, x.stride(0), *k_BGSD.stride()[:3],
            *v_BGSD.stride()[:3], H=heads, OWN=slots_B is not None,
            NORM=norm_kind(token.q_norm_weight, width), CAPPED=soft_cap is not None, WHOLE=whole,
            D=width, BW=triton.next_power_of_2(heads * width),
            FETCH=FETCHED if k_BGSD.stride(2) == v_BGSD.stride(2) == width else 0,
            **counted, **plan.constants, **plan.launch, **early,
        )  # fmt: skip
        if not whole and counted.get("arrived_ptr") is None:
            combine_kernel[(batch * heads * triton.cdiv(width, CHANNELS),)](
                o, m, l, y_BHD, plan.parts, D=width, BD=CHANNELS,
                BP=_together(plan.parts, CHANNELS), num_warps=4, **early,
            )  # fmt: skip
    return y_BHD, m, l


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
        constants = {
            "BD": block, "BN": keys, "BP": _together(parts, block), "STAGES": STAGES,
        }  # fmt: skip
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


def _together(parts: int, channels: int) -> int:
    """Of how many parts so many channels are put together at a time."""
    return min(max(32, triton.next_power_of_2(parts)), TOGETHER // channels)
