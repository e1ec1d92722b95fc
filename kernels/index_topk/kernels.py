"""Triton kernel of ``index_topk``: scores of a tile of queries and a tile of keys.

Products of all heads are added up in registers, so that nothing but the scores is written.
Q queries of a tile, N keys of a tile, E channels; everything is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "S", "first", "past", "keys", "tiles_q", "tiles_k"])
def score_kernel(
    q_ptr, k_ptr, weight_ptr, score_ptr, T, S, first, past, keys, tiles_q, tiles_k,
    HEADS: tl.constexpr, E: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [B, past - first, keys] of queries ``first`` to before ``past``, fp32."""
    pid = tl.program_id(0)
    tile_k, tile_q = pid % tiles_k, (pid // tiles_k) % tiles_q
    row = (pid // tiles_k // tiles_q).to(tl.int64)
    t_Q = first + tile_q * BQ + tl.arange(0, BQ)
    s_N, e_E = tile_k * BN + tl.arange(0, BN), tl.arange(0, E)
    k_NE = tl.load(
        k_ptr + (row * S + s_N)[:, None] * E + e_E[None, :], mask=(s_N < keys)[:, None], other=0.0
    )
    score_QN = tl.zeros([BQ, BN], tl.float32)
    for head in range(HEADS):
        at_Q = (row * T + t_Q) * HEADS + head
        q_QE = tl.load(
            q_ptr + at_Q[:, None] * E + e_E[None, :], mask=(t_Q < past)[:, None], other=0.0
        )
        weight_Q = tl.load(weight_ptr + at_Q, mask=t_Q < past, other=0.0).to(tl.float32)
        product_QN = tl.dot(q_QE, tl.trans(k_NE), input_precision=PRECISION)
        score_QN += tl.maximum(product_QN, 0.0) * weight_Q[:, None]
    at_Q = row * (past - first) + t_Q - first
    at_QN = at_Q[:, None] * keys + s_N[None, :]
    tl.store(score_ptr + at_QN, score_QN, mask=(t_Q < past)[:, None] & (s_N < keys)[None, :])
