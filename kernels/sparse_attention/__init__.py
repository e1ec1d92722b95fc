"""Softmax attention of each query over a stretch of keys before it and over keys chosen for it.

B rows, H query heads, G key/value heads, J choices a row, T queries, S keys, D head width, W words
of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.sparse_attention.bits import WORD_BITS


def sparse_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    first_BT: Tensor | None = None,
    bits_BJTW: Tensor | None = None,
    block_BS: Tensor | None = None,
    keep_BS: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend: o [B, H, T, D] in q's dtype, log of the summed weights [B, H, T] in fp32.

    ``s = scale * q.k``, with a soft cap ``s = soft_cap * tanh(s / soft_cap)``; the weights are
    ``exp(s)`` of the keys that a query sees. Both results are differentiable in q, k and v.
    Query t stands at column ``S - T + t`` and sees key s when s is at or before that column and

    - ``first_BT[t] <= s``: the stretch that ends with itself (a window, a document), or
    - its bit is set: ``bits_BJTW`` holds for every query which blocks of keys were chosen, and
      ``block_BS`` the block of each key (below 0: none). Without ``block_BS`` key s is block s.

    Without both it sees every key up to itself. ``keep_BS`` False marks padding, which none but
    itself sees. Without ``causal`` keys have no columns (they may stand for blocks of tokens), and
    bits alone say what is seen. A query that sees nothing has o = 0 and -inf. Query head h reads
    key/value head ``h // (H / G)`` and choice ``h // (H / J)``. Chosen tokens: arXiv 2512.02556;
    chosen blocks: arXiv 2502.11089.

    Args:
        first_BT: int32 or int64 [B or 1, T], columns.
        bits_BJTW: int32 from ``bits.pack``.
        block_BS: int32; blocks lie one behind the other: numbers never fall along a row but for
            keys of none.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    batch, heads, length, width = q_BHTD.shape
    groups, keys = k_BGSD.shape[1:3]
    if k_BGSD.shape != (batch, groups, keys, width) or v_BGSD.shape != k_BGSD.shape:
        raise ValueError(
            f"with queries {list(q_BHTD.shape)}, keys and values must be [{batch}, groups, keys, "
            f"{width}], got {list(k_BGSD.shape)} and {list(v_BGSD.shape)}"
        )
    if not groups or heads % groups or not length or (causal and keys < length) or not keys:
        raise ValueError(
            "query heads must be a multiple of the key/value heads, and queries the last of the "
            f"keys; got {heads} and {groups} heads, {length} queries and {keys} keys"
        )
    if not q_BHTD.dtype == k_BGSD.dtype == v_BGSD.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, got {q_BHTD.dtype}, {k_BGSD.dtype}, {v_BGSD.dtype}"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    if not causal and (bits_BJTW is None or first_BT is not None or keep_BS is not None):
        raise ValueError("without causal order bits alone say what is seen; give nothing else")
    check_seen(batch, length, keys, first_BT, keep_BS)
    check_bits(batch, heads, length, keys, bits_BJTW, block_BS)
    limit = limits.of_sparse_attention(q_BHTD)
    return dispatch.implementation("sparse_attention", q_BHTD.device, limit).sparse_attention(
        q_BHTD,
        k_BGSD,
        v_BGSD,
        scale=scale,
        soft_cap=soft_cap,
        first_BT=first_BT,
        bits_BJTW=bits_BJTW,
        block_BS=block_BS,
        keep_BS=keep_BS,
        causal=causal,
    )


def check_seen(
    batch: int, length: int, keys: int, first_BT: Tensor | None, keep_BS: Tensor | None
) -> None:
    """Raise ValueError unless both are None or have the shape and type that they should."""
    if first_BT is not None and (
        first_BT.shape not in ((batch, length), (1, length))
        or first_BT.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"first must be int32 or int64 [{batch} or 1, {length}], got {first_BT.dtype} "
            f"{list(first_BT.shape)}"
        )
    if keep_BS is not None and keep_BS.shape != (batch, keys):
        raise ValueError(f"keep must be [{batch}, {keys}], got {list(keep_BS.shape)}")


def check_bits(
    batch: int,
    heads: int,
    length: int,
    keys: int,
    bits_BJTW: Tensor | None,
    block_BS: Tensor | None,
) -> None:
    """Raise ValueError unless choices, one or several heads each, and blocks fit together."""
    if bits_BJTW is None:
        if block_BS is not None:
            raise ValueError("blocks without bits choose nothing; give both or neither")
        return
    choices = bits_BJTW.shape[1] if bits_BJTW.dim() == 4 else 0
    if (
        bits_BJTW.dtype != torch.int32
        or bits_BJTW.dim() != 4
        or bits_BJTW.shape[::2] != (batch, length)
        or not choices
        or heads % choices
        or (block_BS is None and bits_BJTW.shape[3] * WORD_BITS < keys)
    ):
        raise ValueError(
            f"bits must be int32 [{batch}, a divisor of {heads}, {length}, words for all blocks], "
            f"got {bits_BJTW.dtype} {list(bits_BJTW.shape)}"
        )
    if block_BS is not None and (
        block_BS.shape != (batch, keys) or block_BS.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"block must be int32 or int64 [{batch}, {keys}], got {block_BS.dtype} "
            f"{list(block_BS.shape)}"
        )
