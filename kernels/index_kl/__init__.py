"""What teaches an indexer: its divergence from the attention that it chooses for.

B rows, T queries, S keys, I index heads, E their width, H query heads, G key/value heads, D width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.index_topk import check_index
from ltconvert.kernels.sparse_attention import check_bits, check_seen


def index_kl(
    index_q_BTIE: Tensor,
    index_k_BSE: Tensor,
    weight_BTI: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    first_BT: Tensor | None = None,
    bits_BJTW: Tensor | None = None,
    keep_BS: Tensor | None = None,
) -> Tensor:
    """Mean over queries of ``KL(p || softmax(index score))``, nats, a scalar in fp32 (fp64).

    p is the attention distribution of the heads, averaged (arXiv 2512.02556, eq. 3 and 4): over all
    keys of the query's stretch (the dense warm-up), or with bits over the chosen ones. Padding
    counts neither as key nor as query. Differentiable in the first three arguments alone: the
    attention is a target. They are made in the forward pass; the scores of all queries never stand
    in memory together.

    Args:
        bits_BJTW: [B, 1, T, W] of ``index_topk``, which lie within the stretches and hold a key of
            every query.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_index(index_q_BTIE, index_k_BSE, weight_BTI)
    batch, length = index_q_BTIE.shape[:2]
    keys, heads, groups = index_k_BSE.shape[1], q_BHTD.shape[1], k_BGSD.shape[1]
    width = q_BHTD.shape[-1]
    if q_BHTD.shape != (batch, heads, length, width) or k_BGSD.shape != (
        batch, groups, keys, width,
    ):  # fmt: skip
        raise ValueError(
            f"with index queries {list(index_q_BTIE.shape)} and keys {list(index_k_BSE.shape)}, "
            f"attention needs queries [{batch}, heads, {length}, width] and keys [{batch}, groups, "
            f"{keys}, width]; got {list(q_BHTD.shape)} and {list(k_BGSD.shape)}"
        )
    check_seen(batch, length, keys, first_BT, keep_BS)
    if bits_BJTW is not None:
        check_bits(batch, 1, length, keys, bits_BJTW, None)
    limit = limits.of_index_kl(index_q_BTIE, index_k_BSE, q_BHTD, k_BGSD)
    return dispatch.implementation("index_kl", q_BHTD.device, limit).index_kl(
        index_q_BTIE,
        index_k_BSE,
        weight_BTI,
        q_BHTD.detach(),
        k_BGSD.detach(),
        scale=scale,
        soft_cap=soft_cap,
        first_BT=first_BT,
        bits_BJTW=bits_BJTW,
        keep_BS=keep_BS,
    )
