"""``index_kl`` in Triton: five kernels one after the other.

Sums of the weights of every attention head and of the index scores. Then for a chunk of queries at
a time, from the sums, the difference of the distributions and the loss; from the differences, which
stand in memory for the chunk alone, gradients of index queries and weights, and of index keys.

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
    real_queries,
    scale_gradients,
)
from ltconvert.kernels.scores import base_two
from ltconvert.kernels.sparse_attention.seen import chunks
from ltconvert.kernels.sparse_attention.tiles import Lists, Sizes, listed, met
from ltconvert.kernels.sparse_attention.triton import filled

TILE = (64, 64)  # queries and keys; narrower ones have given wrong results on Hopper
CHUNK = 4  # times as many queries as in plain PyTorch, which holds several numbers a score
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
    loss, *grads = results = [x.zero_() for x in empty_results(*plan.indexer, q_BHTD)]
    batch, length = index_q_BTIE.shape[:2]
    of_queries = listed(plan.met_BJQK)
    numbers = batch * TILE[0] * plan.sizes.tiles[1] * TILE[1]
    with torch.cuda.device_of(q_BHTD):
        sums = _sums(plan, of_queries)
        for a, b in chunks(plan.sizes.tiles[0], numbers // CHUNK, q_BHTD.device):
            difference_BnS, part = _differences(plan, of_queries, a, b, *sums)
            loss += part
            _gradients(plan, of_queries, a, b, difference_BnS, *grads)
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
        indexer: queries, keys and weights, likewise.
        seen: first, bits and keep as the kernels read them.
        factors: what turns a product into a score of base 2, and the soft cap.
        lengths: queries, keys, words of the bits.
        first_row: what lies between rows of ``first``; 0 where all share one.
        of_attention, of_index, of_seen: constants of kernels that read these.
    """

    sizes: Sizes
    met_BJQK: Tensor
    attention: tuple[Tensor, ...]
    indexer: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]
    factors: tuple[float, float]
    lengths: tuple[int, int, int]
    first_row: int
    of_attention: dict[str, Any]
    of_index: dict[str, Any]
    of_seen: dict[str, Any]

    @property
    def list_row(self) -> int:
        """Tiles of queries between rows of their lists; 0 where all share one."""
        return self.sizes.tiles[0] if len(self.met_BJQK) > 1 else 0


def _sums(plan: Plan, of_queries: Lists) -> tuple[Tensor, Tensor]:
    """Logs of the summed weights, of base 2: by attention head [B, H, T] and index score [B, T]."""
    batch, heads = plan.attention[0].shape[:2]
    tiles, key_tiles = plan.sizes.tiles
    head_sum_BHT = of_queries.counts.new_empty(batch, heads, tiles * TILE[0], dtype=torch.float32)
    index_sum_BT = torch.empty_like(head_sum_BHT[:, 0])
    seen = *plan.seen, *of_queries
    sizes = *plan.lengths, tiles, key_tiles, plan.first_row, plan.list_row
    head_sum_kernel[(tiles * heads * batch,)](
        *plan.attention, head_sum_BHT, *seen, *plan.factors, *sizes,
        **plan.of_attention, **plan.of_seen,
    )  # fmt: skip
    index_sum_kernel[(tiles * batch,)](
        *plan.indexer, index_sum_BT, *seen, *sizes, **plan.of_index, **plan.of_seen
    )
    return head_sum_BHT, index_sum_BT


def _differences(
    plan: Plan, of_queries: Lists, a: int, b: int, head_sum_BHT: Tensor, index_sum_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """softmax(index score) - p for tiles a to b of queries where they meet keys; their loss."""
    batch, tiles, key_tiles = len(index_sum_BT), b - a, plan.sizes.tiles[1]
    loss_BQK = index_sum_BT.new_zeros(batch, tiles, key_tiles)
    difference_BnS = index_sum_BT.new_empty(batch, tiles * TILE[0], key_tiles * TILE[1])
    difference_kernel[(key_tiles * tiles * batch,)](
        *plan.attention, *plan.indexer, head_sum_BHT, index_sum_BT, difference_BnS, loss_BQK,
        *plan.seen, *of_queries, *plan.factors, *plan.lengths, a, tiles, key_tiles,
        index_sum_BT.shape[1], plan.first_row, plan.list_row,
        **(plan.of_attention | plan.of_index), **plan.of_seen,
    )  # fmt: skip
    return difference_BnS, loss_BQK.sum()


def _gradients(
    plan: Plan, of_queries: Lists, a: int, b: int, difference_BnS: Tensor,
    dq_BTIE: Tensor, dk_BSE: Tensor, dweight_BTI: Tensor,
) -> None:  # fmt: skip
    """Fill dq and dweight of tiles a to b of queries; add their part to dk."""
    batch, length, heads, _ = dq_BTIE.shape
    tiles, key_tiles = b - a, plan.sizes.tiles[1]
    of_keys = listed(plan.met_BJQK[:, :, a:b].mT)
    given, sizes = (*plan.indexer, difference_BnS), (length, dk_BSE.shape[1], a)
    query_kernel[(tiles * heads * batch,)](
        *given, dq_BTIE, dweight_BTI, *of_queries, *sizes, tiles, key_tiles, plan.list_row,
        **plan.of_index,
    )  # fmt: skip
    key_kernel[(key_tiles * batch,)](
        *given, dk_BSE, *of_keys, *sizes, key_tiles, tiles, key_tiles if plan.list_row else 0,
        **plan.of_index,
    )  # fmt: skip


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
        indexer=(*index, weight_BTI.contiguous()),
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
