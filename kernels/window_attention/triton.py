"""``window_attention`` in Triton: registration for autograd and ``torch.compile``, and launches.

The backward computes the weights again from the log of their sum, once for queries and once for
keys: no atomics, so runs repeat bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels.segments import Bounds
from ltconvert.kernels.window_attention.kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from ltconvert.kernels.window_attention.tiles import NARROWEST, Kernel, tile

DELTA_TOKENS = 64


def window_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float | None,
    bounds: Bounds | None,
    keep_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.window_attention.window_attention``."""
    o_BTHD, log_sum_BHT = _window_attention(
        q_BTHD, k_BSGD, v_BSGD, *(bounds or (None, None)), keep_BS, window, scale, soft_cap or 0.0
    )
    return o_BTHD, log_sum_BHT.transpose(1, 2)


@torch.library.custom_op("ltconvert::window_attention", mutates_args=())
def _window_attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    o_BTHD, log_sum_BHT = _outputs(q_BTHD)
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    grid, sizes, made = _plan("forward", q, k, first_BT, keep_BT, window, scale, cap)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            q, k, v, _there(first_BT, q), _there(keep_BT, q), o_BTHD, log_sum_BHT, *sizes,
            *_strides(q, k, v), **made,
        )  # fmt: skip
    return o_BTHD, log_sum_BHT


@_window_attention.register_fake
def _outputs(q_BTHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q_BTHD.shape
    log_sum_BHT = q_BTHD.new_empty(batch, heads, length, dtype=torch.float32)
    return q_BTHD.new_empty(q_BTHD.shape), log_sum_BHT


@torch.library.custom_op("ltconvert::window_attention_backward", mutates_args=())
def _window_attention_backward(
    do_BTHD: Tensor,
    dlog_sum_BHT: Tensor | None,
    o_BTHD: Tensor,
    log_sum_BHT: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BTHD, k_BTGD, v_BTGD))
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    do, delta_BHT = do_BTHD.contiguous(), torch.empty_like(log_sum_BHT)
    keep, options = _there(keep_BT, q), (window, scale, cap)
    grid, sizes, made = _plan("query gradient", q, k, first_BT, keep_BT, *options)
    grid_of_keys, _, made_of_keys = _plan("key gradient", q, k, last_BT, keep_BT, *options)
    length, heads = sizes[:2]
    shared = keep, do, log_sum_BHT, delta_BHT
    with torch.cuda.device_of(q):
        delta_kernel[(q.shape[0] * heads * triton.cdiv(length, DELTA_TOKENS),)](
            o_BTHD, do, delta_BHT if dlog_sum_BHT is None else dlog_sum_BHT.contiguous(),
            delta_BHT, length, heads, HAS_SUM=dlog_sum_BHT is not None, D=made["D"], E=made["E"],
            M=DELTA_TOKENS,
        )  # fmt: skip
        query_gradient_kernel[grid](
            q, k, v, _there(first_BT, q), *shared, dq, *sizes, *_strides(q, k, v), **made
        )
        key_gradient_kernel[grid_of_keys](
            q, k, v, _there(last_BT, q), *shared, dk, dv, *sizes, *_strides(q, k, v), **made_of_keys
        )
    return dq, dk, dv


@_window_attention_backward.register_fake
def _gradients(
    do: Tensor, dlog_sum: Tensor | None, o: Tensor, log_sum: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlog_sum: Tensor | None) -> tuple[Any, ...]:
    if do is None:
        do = torch.zeros_like(ctx.saved_tensors[0])
    gradients = _window_attention_backward(do, dlog_sum, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None, None


_window_attention.register_autograd(_backward, setup_context=_keep_inputs)


def _plan(
    kernel: Kernel, q: Tensor, k: Tensor, bounds_BT: Tensor | None, keep_BT: Tensor | None,
    window: int, scale: float, cap: float,
) -> tuple[tuple[int], tuple[int, int, int, int, float], dict[str, Any]]:  # fmt: skip
    """Programs, sizes and constants of a launch over blocks of queries, or of keys."""
    if scale <= 0:
        raise ValueError(f"the scale of scores must be above 0, got {scale}")
    batch, length, heads, width = q.shape
    groups, window = k.shape[2], min(window, length)
    filled = max(NARROWEST, triton.next_power_of_2(width))
    size = tile(kernel, filled, q.itemsize, window)
    if kernel == "key gradient":
        programs = batch * groups * triton.cdiv(length, size.keys)
    else:
        programs = batch * heads * triton.cdiv(length, size.queries)
    exact = "ieee" if torch.version.hip else "tf32x3"
    made = {
        "CAP": cap, "DOCUMENTS": bounds_BT is not None, "PADDED": keep_BT is not None,
        "SPLIT": size.split and keep_BT is None,
        "PRECISION": exact if q.dtype == torch.float32 else "tf32",
        "D": width, "E": filled, "M": size.queries, "N": size.keys,
        "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    return (programs,), (length, heads, groups, window, scale), made


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _there(given_BT: Tensor | None, other: Tensor) -> Tensor:
    """As the kernels read it; where nothing is given, anything, which they do not read."""
    if given_BT is None:
        return other
    return given_BT.to(torch.int32).contiguous()


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
