"""Triton kernels of ``gdn_window_step``: a program for each row and head, or two.

Recurrence and window need nothing of each other until they are added. In ``window_step_kernel`` a
program does one after the other: that of the recurrence waits most of its time, and a window of 128
fits into its registers beside the state. In ``apart_kernel`` two programs do a part each at the
same time, leave it in memory and count that they have; the later one adds them. That takes
multiprocessors which would be idle, and a trip to memory.

D channels, V of a block of the state's columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_attention.parts import is_last
from ltconvert.kernels.gdn_step.kernels import keep, recur
from ltconvert.kernels.gdn_window_step.window import attend, read_ahead
from ltconvert.kernels.overlap_kernels import let_go, take_turn


@triton.jit(do_not_specialize=["slots"])
def window_step_kernel(
    qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr, state_ptr,
    norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row, decay_row, gate_row,
    keys_ptr, values_ptr, slot_ptr, length_ptr, outside_ptr, rest_ptr, cos_ptr, sin_ptr, y_ptr,
    factor, cap, slots, key_row, key_head, key_slot, value_row, value_head, value_slot, rest_row,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GATE_FN: tl.constexpr, NORM_EPS: tl.constexpr, CAPPED: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr,
    SINGLY: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, LONG: tl.constexpr,
    STAGES: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_go(OVERLAP)
    cell = tl.program_id(0)
    row, head, d_D = (cell // H).to(tl.int64), cell % H, tl.arange(0, BK)
    keys_ptr += row * key_row + head.to(tl.int64) * key_head
    values_ptr += row * value_row + head.to(tl.int64) * value_head
    k_NDs, v_NDs, slot, length, outside, cos_D, sin_D = read_ahead(
        row, keys_ptr, values_ptr, slot_ptr, length_ptr, outside_ptr, cos_ptr, sin_ptr, slots,
        key_slot, value_slot, d_D, D, BN, AHEAD, FETCH, OVERLAP,
    )  # fmt: skip
    others, _ = recur(  # waits its turn
        cell, qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr,
        state_ptr, norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row,
        decay_row, gate_row, H, D, D, W, SILU, GATE_FN, NORM_EPS, BK, BV, BW, BLOCKS, SINGLY,
        False, OVERLAP,
    )  # fmt: skip
    local_D, left = attend(
        k_NDs, v_NDs, slot, length, outside, cos_D, sin_D, qkv_ptr + row * qkv_row + head * D,
        keys_ptr, values_ptr, rest_ptr + row * rest_row + head, factor, cap, slots, key_slot,
        value_slot, d_D, H, D, cos_ptr is not None, CAPPED, BK, BN, AHEAD, LONG, STAGES, True,
    )  # fmt: skip
    y_ptr += cell.to(tl.int64) * D
    for n in tl.static_range(BLOCKS):
        n_V = n * BV + tl.arange(0, BV)
        local_V = local_D if BLOCKS == 1 else tl.gather(local_D, n_V, 0)
        y_V = local_V + left * others[n]
        tl.store(y_ptr + n_V, y_V.to(y_ptr.dtype.element_ty), mask=n_V < D)


@triton.jit(do_not_specialize=["slots"])
def apart_kernel(
    qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr, rate_bias_ptr, state_ptr,
    norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row, beta_row, decay_row, gate_row,
    keys_ptr, values_ptr, slot_ptr, length_ptr, outside_ptr, rest_ptr, cos_ptr, sin_ptr, y_ptr,
    factor, cap, slots, key_row, key_head, key_slot, value_row, value_head, value_slot, rest_row,
    H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GATE_FN: tl.constexpr, NORM_EPS: tl.constexpr, CAPPED: tl.constexpr,
    arrived_ptr, other_ptr, local_ptr, left_ptr,
    BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BLOCKS: tl.constexpr,
    SINGLY: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, LONG: tl.constexpr,
    STAGES: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The recurrence's programs come first: with a window of 128 they move more."""
    let_go(OVERLAP)
    cells = tl.num_programs(0) // 2
    cell = tl.program_id(0) % cells
    row, head, d_D = (cell // H).to(tl.int64), cell % H, tl.arange(0, BK)
    first = cell.to(tl.int64) * D
    if tl.program_id(0) < cells:
        others, new = recur(  # waits its turn
            cell, qkv_ptr, weight_ptr, history_ptr, beta_ptr, decay_ptr, log_rate_ptr,
            rate_bias_ptr, state_ptr, norm_weight_ptr, gate_ptr, scale, eps, beta_factor, qkv_row,
            beta_row, decay_row, gate_row, H, D, D, W, SILU, GATE_FN, NORM_EPS, BK, BV, BW, BLOCKS,
            SINGLY, True, OVERLAP,
        )  # fmt: skip
        for n in tl.static_range(BLOCKS):
            n_V = n * BV + tl.arange(0, BV)
            tl.store(other_ptr + first + n_V, others[n], mask=n_V < D)
        last = is_last(arrived_ptr + cell, 2)
        # Behind the count, which waits until whatever was written before it is there.
        keep(state_ptr, new, cell, D, D, BK, BV, BLOCKS)
    else:
        keys_ptr += row * key_row + head.to(tl.int64) * key_head
        values_ptr += row * value_row + head.to(tl.int64) * value_head
        k_NDs, v_NDs, slot, length, outside, cos_D, sin_D = read_ahead(
            row, keys_ptr, values_ptr, slot_ptr, length_ptr, outside_ptr, cos_ptr, sin_ptr, slots,
            key_slot, value_slot, d_D, D, BN, AHEAD, FETCH, OVERLAP,
        )  # fmt: skip
        take_turn(OVERLAP)
        local_D, left = attend(
            k_NDs, v_NDs, slot, length, outside, cos_D, sin_D, qkv_ptr + row * qkv_row + head * D,
            keys_ptr, values_ptr, rest_ptr + row * rest_row + head, factor, cap, slots, key_slot,
            value_slot, d_D, H, D, cos_ptr is not None, CAPPED, BK, BN, AHEAD, LONG, STAGES, False,
        )  # fmt: skip
        tl.store(local_ptr + first + d_D, local_D, mask=d_D < D)
        tl.store(left_ptr + cell, left)
        last = is_last(arrived_ptr + cell, 2)
    # Both parts are read again, its own too: so the sum does not depend on who is last.
    if last:
        in_D = d_D < D
        local_D = tl.load(local_ptr + first + d_D, mask=in_D, cache_modifier=".cg")
        other_D = tl.load(other_ptr + first + d_D, mask=in_D, cache_modifier=".cg")
        y_D = local_D + tl.load(left_ptr + cell, cache_modifier=".cg") * other_D
        tl.store(y_ptr + first + d_D, y_D.to(y_ptr.dtype.element_ty), mask=in_D)
