"""``sparse_attention`` in Triton: registration for autograd and ``torch.compile``, and launches.

B rows, H query heads, G key/value heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.scores import base_two
from ltconvert.kernels.sparse_attention.gradient_kernels import key_kernel, query_kernel
from ltconvert.kernels.sparse_attention.kernels import forward_kernel
from ltconvert.kernels.sparse_attention.tiles import Lists, Sizes, lists, met

TILE = (64, 64)  # queries and keys; narrower ones have given wrong results on Hopper
WIDE = {"num_warps": 8}  # fewer warps have too few registers for two sums of 128 columns
LEAST_WIDTH = 64  # that heads are filled up to, for the same reason


def sparse_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.sparse_attention.sparse_attention``."""
    return _sparse_attention(
        q_BHTD, k_BGSD, v_BGSD, first_BT, bits_BJTW, block_BS, keep_BS, scale, soft_cap, causal
    )


@torch.library.custom_op("ltconvert::sparse_attention", mutates_args=())
def _sparse_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    plan = _plan(q_BHTD, k_BGSD, first_BT, bits_BJTW, block_BS, keep_BS, scale, soft_cap, causal)
    q, k, v = (filled(x, plan.width) for x in (q_BHTD, k_BGSD, v_BGSD))
    o = torch.empty_like(q)
    log_sum_BHT = q.new_empty(q.shape[:3], dtype=torch.float32)
    tiles, others = plan.sizes.tiles
    of_queries, _ = plan.lists()
    with torch.cuda.device_of(q):
        forward_kernel[(tiles * q.shape[0] * q.shape[1],)](
            q, k, v, o, log_sum_BHT, *plan.tensors, *of_queries, *plan.factors,
            *plan.lengths, tiles, others, *plan.rows, **plan.constants, **plan.launch,
        )  # fmt: skip
    return o[..., : q_BHTD.shape[-1]].contiguous(), log_sum_BHT


@_sparse_attention.register_fake
def _outputs(q_BHTD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (
        q_BHTD.new_empty(q_BHTD.shape),
        q_BHTD.new_empty(q_BHTD.shape[:3], dtype=torch.float32),
    )


@torch.library.custom_op("ltconvert::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    do_BHTD: Tensor,
    mean_BHT: Tensor,
    log_sum_BHT: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    plan = _plan(q_BHTD, k_BGSD, first_BT, bits_BJTW, block_BS, keep_BS, scale, soft_cap, causal)
    do, q, k, v = (filled(x, plan.width) for x in (do_BHTD, q_BHTD, k_BGSD, v_BGSD))
    # Of a query that sees nothing any finite number will do: all its weights are masked.
    sum_BHT = log_sum_BHT.masked_fill(log_sum_BHT == float("-inf"), 0.0) * math.log2(math.e)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    (query_tiles, key_tiles), (of_queries, of_keys) = plan.sizes.tiles, plan.lists()
    inputs = q, k, v, do, sum_BHT, mean_BHT.contiguous()
    with torch.cuda.device_of(q):
        query_kernel[(query_tiles * batch * heads,)](
            *inputs, dq, *plan.tensors, *of_queries, scale, *plan.factors, *plan.lengths,
            query_tiles, key_tiles, *plan.rows, **plan.constants, **plan.launch,
        )  # fmt: skip
        first_row, list_row = plan.rows
        key_kernel[(key_tiles * batch * groups,)](
            *inputs, dk, dv, *plan.tensors, *of_keys, scale, *plan.factors, *plan.lengths,
            key_tiles, query_tiles, first_row, list_row // query_tiles * key_tiles,
            **plan.constants, **(plan.launch | WIDE if plan.width >= 128 else plan.launch),
        )  # fmt: skip
    width = q_BHTD.shape[-1]
    return tuple(x[..., :width].contiguous() for x in (dq, dk, dv))  # type: ignore[return-value]


@_sparse_attention_backward.register_fake
def _gradients(
    do: Tensor, mean: Tensor, log_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, do_BHTD: Tensor, dlog_sum_BHT: Tensor) -> tuple[Any, ...]:
    o_BHTD, log_sum_BHT, *inputs = ctx.saved_tensors
    mean_BHT = (do_BHTD.float() * o_BHTD.float()).sum(-1) - dlog_sum_BHT
    grads = _sparse_attention_backward(do_BHTD, mean_BHT, log_sum_BHT, *inputs, *ctx.options)
    return (*grads, *[None] * 7)


_sparse_attention.register_autograd(_backward, setup_context=_keep_inputs)


class Plan(NamedTuple):
    """How a problem is run.

    Attributes:
        tensors: first, bits, block and keep as the kernels read them.
        factors: what turns a product into a score of base 2, and the soft cap.
        lengths: queries, keys, words of the bits.
        rows: what lies between rows of ``first`` and of the lists of queries; 0 where all share.
    """

    sizes: Sizes
    met_BJQK: Tensor
    tensors: tuple[Tensor, ...]
    factors: tuple[float, float]
    lengths: tuple[int, int, int]
    rows: tuple[int, int]
    width: int
    constants: dict[str, Any]
    launch: dict[str, int]

    def lists(self) -> tuple[Lists, Lists]:
        """Of queries and of keys."""
        return lists(self.met_BJQK)


def _plan(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
    causal: bool,
) -> Plan:
    heads, length = q_BHTD.shape[1:3]
    groups, keys = k_BGSD.shape[1:3]
    sizes = Sizes(length, keys, *TILE)
    met_BJQK = met(sizes, first_BT, bits_BJTW, block_BS, causal, q_BHTD.device)
    given = {"FIRST": first_BT, "BITS": bits_BJTW, "BLOCKS": block_BS, "KEEP": keep_BS}
    none = q_BHTD.new_empty(1, dtype=torch.int32)  # no kernel reads it
    tensors = tuple(none if x is None else x.to(torch.int32).contiguous() for x in given.values())
    width = max(LEAST_WIDTH, triton.next_power_of_2(q_BHTD.shape[-1]))
    full = q_BHTD.dtype == torch.float32
    exact = "ieee" if torch.version.hip else "tf32x3"
    return Plan(
        sizes=sizes,
        met_BJQK=met_BJQK,
        tensors=tensors,
        factors=base_two(scale, soft_cap),
        lengths=(length, keys, 0 if bits_BJTW is None else bits_BJTW.shape[-1]),
        rows=(
            length if first_BT is not None and len(first_BT) > 1 else 0,
            met_BJQK.shape[1] * sizes.tiles[0] if len(met_BJQK) > 1 else 0,
        ),
        width=width,
        constants={
            "H": heads, "G": groups, "J": 1 if bits_BJTW is None else bits_BJTW.shape[1],
            "LISTS": met_BJQK.shape[1], **{name: x is not None for name, x in given.items()},
            "CAUSAL": causal, "CAPPED": soft_cap is not None, "D": width,
            "BQ": sizes.tile_queries, "BN": sizes.tile_keys,
            "PRECISION": exact if full else "tf32",
        },
        launch={"num_warps": 8, "num_stages": 1}
        if full or width > 128
        else {"num_warps": 4, "num_stages": 2},
    )  # fmt: skip


def filled(x: Tensor, width: int) -> Tensor:
    """Contiguous, heads filled up with zeros."""
    return F.pad(x, (0, width - x.shape[-1])).contiguous()
