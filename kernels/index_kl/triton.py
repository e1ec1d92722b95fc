"""``index_kl`` in Triton: for a chunk of queries at a time, five kernels one after the other.

Sums of the weights of every attention head and of the index scores; from both the difference of
the distributions and the loss; from the differences, which stand in memory for the chunk alone,
gradients of index queries and weights, then of index keys.

B rows, T queries, S keys, I index heads, E their width, H query heads, G key/value heads, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ltconvert.kernels.index_kl.gradient_kernels import key_kernel, query_kernel
from ltconvert.kernels.index_kl.kernels import (
    difference_kernel,
    head_sum_kernel,
    index_sum_kernel,
)
from ltconvert.kernels.index_kl.reference import (
    empty_results,
    keep_gradients,
    scale_gradients,
    real_queries,
)
from ltconvert.kernels.sparse_attention.seen import chunks
from ltconvert.kernels.sparse_attention.tiles import Lists, Sizes, lists, met
from ltconvert.kernels.sparse_attention.triton import base_two, filled

TILE = (64, 64)  # queries and keys; narrower ones have given wrong results on Hopper
LEAST_WIDTH = 64  # that heads are filled up to, for the same reason


def index_kl(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.index_kl.index_kl``."""
    loss, *_ = _index_kl(
        index_q_BTIE, index_k_BSE, weight_BTI, q_BHTD, k_BGSD, first_BT, bits_BJTW, keep_BS,
        scale, soft_cap,
    )  # fmt: skip
    return loss


@torch.library.custom_op("ltconvert::index_kl", mutates_args=())
def _index_kl(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, and its gradients by index queries, index keys and weights, all in fp32."""
    plan = _plan(
        index_q_BTIE, index_k_BSE, weight_BTI, q_BHTD, k_BGSD, first_BT, bits_BJTW, keep_BS,
        scale, soft_cap,
    )  # fmt: skip
    results = [x.zero_() for x in empty_results(plan.index[0], plan.index[1], weight_BTI, q_BHTD)]
    batch, length = index_q_BTIE.shape[:2]
    with torch.cuda.device_of(q_BHTD):
        for a, b in chunks(plan.sizes.tiles[0], batch * TILE[0] * plan.columns, q_BHTD.device):
            _run(plan, a, b, *results)
    count = real_queries(keep_BS, batch, length, q_BHTD.device).sum().clamp(min=1)
    loss, dq, dk, dweight = (x.div_(count) for x in results)
    width = index_q_BTIE.shape[-1]
    return loss, dq[..., :width].contiguous(), dk[..., :width].contiguous(), dweight


_index_kl.register_fake(empty_results)
_index_kl.register_autograd(scale_gradients, setup_context=keep_gradients)


class Plan(NamedTuple):
    """How a problem is run.

    Attributes:
        attention: queries and keys, heads filled up.
        index: queries, keys and weights, likewise.
        seen: first, bits and keep as the kernels read them.
        factors: what turns a product into a score of base 2, and the soft cap.
        lengths: queries, keys, words of the bits.
        first_row: what lies between rows of ``first``; 0 where all share one.
        of_attention, of_index, of_seen: constants of kernels that read these.
    """

    sizes: Sizes
    met_BJQK: Tensor
    attention: tuple[Tensor, ...]
    index: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    factors: tuple[float, float]
    lengths: tuple[int, int, int]
    first_row: int
    of_attention: dict[str, Any]
    of_index: dict[str, Any]
    of_seen: dict[str, Any]

    @property
    def columns(self) -> int:
        """Keys, filled up to whole tiles."""
        return self.sizes.tiles[1] * TILE[1]


def _run(
    plan: Plan, a: int, b: int, loss: Tensor, dq_BTIE: Tensor, dk_BSE: Tensor, dweight_BTI: Tensor
) -> None:
    """Add what tiles a to b of queries give: sums over queries, no mean yet."""
    of_queries, of_keys = lists(plan.met_BJQK[:, :, a:b])
    tiles, key_tiles = b - a, plan.sizes.tiles[1]
    shared = len(plan.met_BJQK) == 1
    difference_BnS = _differences(plan, a, tiles, of_queries, 0 if shared else tiles, loss)
    batch, length, heads, _ = dq_BTIE.shape
    given = *plan.index, difference_BnS
    sizes = length, dk_BSE.shape[1], a
    query_kernel[(tiles * heads * batch,)](
        *given, dq_BTIE, dweight_BTI, *of_queries, *sizes, tiles, key_tiles,
        0 if shared else tiles, **plan.of_index,
    )  # fmt: skip
    key_kernel[(key_tiles * batch,)](
        *given, dk_BSE, *of_keys, *sizes, key_tiles, tiles, 0 if shared else key_tiles,
        **plan.of_index,
    )  # fmt: skip


def _differences(
    plan: Plan, a: int, tiles: int, listed: Lists, list_row: int, loss: Tensor
) -> Tensor:
    """softmax(index score) - p where tiles of queries meet keys; adds to the loss."""
    batch, heads = plan.attention[0].shape[:2]
    queries, key_tiles = tiles * TILE[0], plan.sizes.tiles[1]
    head_sum_BHn, index_sum_Bn = loss.new_empty(batch, heads, queries), loss.new_empty(batch, queries)
    difference_BnS = loss.new_empty(batch, queries, plan.columns)
    loss_BQK = loss.new_zeros(batch, tiles, key_tiles)
    seen = *plan.seen, *listed
    sizes = *plan.lengths, a, tiles, key_tiles, plan.first_row, list_row
    head_sum_kernel[(tiles * heads * batch,)](
        *plan.attention, head_sum_BHn, *seen, *plan.factors, *sizes,
        **plan.of_attention, **plan.of_seen,
    )  # fmt: skip
    index_sum_kernel[(tiles * batch,)](
        *plan.index, index_sum_Bn, *seen, *sizes, **plan.of_index, **plan.of_seen
    )
    difference_kernel[(key_tiles * tiles * batch,)](
        *plan.attention, *plan.index, head_sum_BHn, index_sum_Bn, difference_BnS, loss_BQK,
        *seen, *plan.factors, *sizes, **(plan.of_attention | plan.of_index), **plan.of_seen,
    )  # fmt: skip
    loss += loss_BQK.sum()
    return difference_BnS


def _plan(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    first_BT: Tensor | None,
    bits_BJTW: Tensor | None,
    keep_BS: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> Plan:
    if bits_BJTW is not None:
        first_BT = None  # what was chosen lies within the stretches
    length, keys = index_q_BTIE.shape[1], index_k_BSE.shape[1]
    sizes = Sizes(length, keys, *TILE)
    attention, index = _filled(q_BHTD, k_BGSD), _filled(index_q_BTIE, index_k_BSE)
    given = {"FIRST": first_BT, "BITS": bits_BJTW, "KEEP": keep_BS}
    none = q_BHTD.new_empty(1, dtype=torch.int32)  # no kernel reads it
    return Plan(
        sizes=sizes,
        met_BJQK=met(sizes, first_BT, bits_BJTW, None, True, q_BHTD.device),
        attention=attention,
        index=(*index, weight_BTI.contiguous()),
        seen=tuple(none if x is None else x.to(torch.int32).contiguous() for x in given.values()),
        factors=base_two(scale, soft_cap),
        lengths=(length, keys, 0 if bits_BJTW is None else bits_BJTW.shape[-1]),
        first_row=length if first_BT is not None and len(first_BT) > 1 else 0,
        of_attention={
            "H": q_BHTD.shape[1], "G": k_BGSD.shape[1], "CAPPED": soft_cap is not None,
            "D": attention[0].shape[-1], **_launch(*attention),
        },
        of_index={
            "HEADS": index_q_BTIE.shape[2], "E": index[0].shape[-1], **_launch(*attention, *index)
        },
        of_seen={name: x is not None for name, x in given.items()},
    )  # fmt: skip


def _launch(*tensors: Tensor) -> dict[str, Any]:
    """Tiles, precision and warps of kernels that read these."""
    full = any(x.dtype == torch.float32 for x in tensors)
    exact = "ieee" if torch.version.hip else "tf32x3"
    small = not full and max(x.shape[-1] for x in tensors) <= 128
    return {
        "BQ": TILE[0], "BN": TILE[1], "PRECISION": exact if full else "tf32",
        "num_warps": 4 if small else 8, "num_stages": 2 if small else 1,
    }  # fmt: skip


def _filled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In one dtype, contiguous, heads filled up with zeros."""
    width = max(LEAST_WIDTH, triton.next_power_of_2(tensors[0].shape[-1]))
    dtype = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return tuple(filled(x.to(dtype), width) for x in tensors)
