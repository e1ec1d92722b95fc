"""``window_attention`` in Triton: registration for autograd and ``torch.compile``, and launches.

The backward computes the weights again from the log of their sum, once for queries and once for
keys: no atomics, so runs repeat bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ltconvert.kernels.window_attention.kernels import (
    delta_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

BLOCK_TOKENS = 64  # of queries and of keys: larger ones hold more that no window reaches
NARROWEST = 64  # channels; narrower blocks gave wrong numbers on Hopper


def window_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float | None,
    segment_ids_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.window_attention.window_attention``."""
    assert keep_BS is None  # see limits.of_window_attention
    o_BTHD, log_sum_BHT = _window_attention(
        q_BTHD, k_BSGD, v_BSGD, segment_ids_BT, window, scale, soft_cap or 0.0
    )
    return o_BTHD, log_sum_BHT.transpose(1, 2)


@torch.library.custom_op("ltconvert::window_attention", mutates_args=())
def _window_attention(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    ids_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    o_BTHD, log_sum_BHT = _outputs(q_BTHD)
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    grid, sizes, blocks = _plan(q, k, of_keys=False)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            q, k, v, *_documents(ids_BT, q), o_BTHD, log_sum_BHT, *sizes, window, scale,
            *_strides(q, k, v), CAP=cap, SEGMENTS=ids_BT is not None, **blocks,
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
    ids_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BTHD, k_BTGD, v_BTGD))
    q, k, v = (_channels_together(x) for x in (q_BTHD, k_BTGD, v_BTGD))
    do, delta_BHT = do_BTHD.contiguous(), torch.empty_like(log_sum_BHT)
    grid, sizes, blocks = _plan(q, k, of_keys=False)
    grid_of_keys, _, _ = _plan(q, k, of_keys=True)
    length, heads, _ = sizes
    rows = {name: blocks[name] for name in ("D", "E", "M")}
    made = {"CAP": cap, "SEGMENTS": ids_BT is not None, **blocks}
    shared = *_documents(ids_BT, q), do, log_sum_BHT, delta_BHT
    with torch.cuda.device_of(q):
        delta_kernel[grid](
            o_BTHD, do, delta_BHT if dlog_sum_BHT is None else dlog_sum_BHT.contiguous(),
            delta_BHT, length, heads, HAS_SUM=dlog_sum_BHT is not None, **rows,
        )  # fmt: skip
        query_gradient_kernel[grid](
            q, k, v, *shared, dq, *sizes, window, scale, *_strides(q, k, v), **made
        )
        key_gradient_kernel[grid_of_keys](
            q, k, v, *shared, dk, dv, *sizes, window, scale, *_strides(q, k, v), **made
        )
    return dq, dk, dv


@_window_attention_backward.register_fake
def _gradients(
    do: Tensor, dlog_sum: Tensor | None, o: Tensor, log_sum: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.options = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlog_sum: Tensor | None) -> tuple[Any, ...]:
    if do is None:
        do = torch.zeros_like(ctx.saved_tensors[0])
    gradients = _window_attention_backward(do, dlog_sum, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None


_window_attention.register_autograd(_backward, setup_context=_keep_inputs)


def _plan(
    q: Tensor, k: Tensor, *, of_keys: bool
) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Programs, sizes and constants of a launch over blocks of queries, or of keys."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    programs = batch * (groups if of_keys else heads) * triton.cdiv(length, BLOCK_TOKENS)
    filled = max(NARROWEST, triton.next_power_of_2(width))
    blocks = {"D": width, "E": filled, "M": BLOCK_TOKENS, "N": BLOCK_TOKENS}
    exact = "ieee" if torch.version.hip else "tf32x3"
    launch = {
        "PRECISION": exact if q.dtype == torch.float32 else "tf32",
        "num_warps": 4 if filled * q.itemsize <= 128 else 8,
        "num_stages": 2 if q.itemsize == 2 else 1,
    }
    return (programs,), (length, heads, groups), blocks | launch


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _documents(ids_BT: Tensor | None, other: Tensor) -> tuple[Tensor]:
    return (other if ids_BT is None else ids_BT.contiguous(),)


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
