"""``index_topk`` in Triton: for a chunk of queries at a time one kernel scores, another chooses.

The second keeps the scores of a query in registers; of more keys than fit it reads them again.

B rows, T queries, S keys, I index heads, E their width, W words.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.index_topk.kernels import choose_kernel, choose_many_kernel, score_kernel
from ltconvert.kernels.index_topk.reference import choose, empty_bits
from ltconvert.kernels.sparse_attention.bits import WORD_BITS, words_for

TILE = (64, 64)
LEAST_WIDTH = 64
MOST_KEYS = 32_768  # in registers: 64 a thread of 16 warps
KEYS_A_WARP = 2048
WORDS_AT_A_TIME, WARPS = 128, 4  # of more keys


def index_topk(
    q_BTIE: Tensor,
    k_BSE: Tensor,
    weight_BTI: Tensor,
    count: int,
    *,
    first_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    """See ``ltconvert.kernels.index_topk.index_topk``."""
    with torch.no_grad():
        return _index_topk(q_BTIE, k_BSE, weight_BTI, count, first_BT, keep_BS)


@torch.library.custom_op("ltconvert::index_topk", mutates_args=())
def _index_topk(
    q_BTIE: Tensor,
    k_BSE: Tensor,
    weight_BTI: Tensor,
    count: int,
    first_BT: Tensor | None,
    keep_BS: Tensor | None,
) -> Tensor:
    batch, length, heads, width = q_BTIE.shape
    filled = max(LEAST_WIDTH, triton.next_power_of_2(width))
    dtype = torch.promote_types(q_BTIE.dtype, k_BSE.dtype)
    q, k = (F.pad(x.to(dtype), (0, filled - width)).contiguous() for x in (q_BTIE, k_BSE))
    weight_BTI = weight_BTI.contiguous()
    exact = "ieee" if torch.version.hip else "tf32x3"
    full = dtype == torch.float32

    def scores(a: int, b: int, keys: int) -> Tensor:
        score_BnS = q.new_empty(batch, b - a, keys, dtype=torch.float32)
        tiles = triton.cdiv(b - a, TILE[0]), triton.cdiv(keys, TILE[1])
        with torch.cuda.device_of(q):
            score_kernel[(batch * tiles[0] * tiles[1],)](
                q, k, weight_BTI, score_BnS, length, k.shape[1], a, b, keys, *tiles,
                HEADS=heads, E=filled, BQ=TILE[0], BN=TILE[1],
                PRECISION=exact if full else "tf32", num_warps=4, num_stages=1 if full else 2,
            )  # fmt: skip
        return score_BnS

    def put_best(a: int, b: int, keys: int, bits_BTW: Tensor) -> None:
        words = triton.next_power_of_2(words_for(keys))
        places = (words * WORD_BITS).bit_length() - 1
        kernel, warps = choose_kernel, max(1, min(16, words * WORD_BITS // KEYS_A_WARP))
        if keys > MOST_KEYS:
            kernel, warps, words = choose_many_kernel, WARPS, min(words, WORDS_AT_A_TIME)
        score_BnS = scores(a, b, keys)
        with torch.cuda.device_of(q):
            kernel[(batch * (b - a),)](
                score_BnS, *reach, bits_BTW, length, k.shape[1], bits_BTW.shape[-1], a, b, keys,
                count, length if first_BT is not None and len(first_BT) > 1 else 0,
                FIRST=first_BT is not None, KEEP=keep_BS is not None, WORDS=words, PLACES=places,
                num_warps=warps,
            )  # fmt: skip

    none = q.new_empty(1, dtype=torch.int32)  # no kernel reads it
    reach = [none if x is None else x.to(torch.int32).contiguous() for x in (first_BT, keep_BS)]
    return choose(put_best, batch * k.shape[1], q_BTIE, k_BSE, count, first_BT, keep_BS)


_index_topk.register_fake(empty_bits)
