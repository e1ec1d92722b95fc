"""Which blocks of keys a query attends to, by what their compressed keys promise.

B rows, H query heads, G key/value heads, T queries, M blocks, D head width, W words of 32 bits.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.block_topk import reference


def block_topk(
    q_BHTD: Tensor,
    k_BGMD: Tensor,
    first_BT: Tensor,
    past_BT: Tensor,
    count: int,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Chosen blocks, and the blocks seen that were not chosen: bits [B, G, T, W] each, int32.

    Query t sees blocks ``first[t]`` to before ``past[t]``. Per key/value head ``count`` of them are
    chosen: the first one, where attention sinks lie, and those to which the softmax over their
    compressed keys gives most, summed over the query heads (arXiv 2502.11089, eq. 8 to 11); of
    equal ones the later. Any number of query heads may share a key/value head. Plain PyTorch on
    every device. No gradient.

    Args:
        k_BGMD: a key for each block.
        first_BT, past_BT: int64 [B or 1, T].

    Raises:
        ValueError: shapes that do not fit together, or a count below 1.
    """
    batch, heads, length, width = q_BHTD.shape
    groups = k_BGMD.shape[1]
    if (
        k_BGMD.dim() != 4
        or (k_BGMD.shape[0], k_BGMD.shape[3]) != (batch, width)
        or heads % groups
        or any(x.shape not in ((batch, length), (1, length)) for x in (first_BT, past_BT))
    ):
        raise ValueError(
            f"with queries {list(q_BHTD.shape)}, compressed keys must be [{batch}, a divisor of "
            f"{heads}, blocks, {width}] and ranges [{batch} or 1, {length}]; got "
            f"{list(k_BGMD.shape)}, {list(first_BT.shape)} and {list(past_BT.shape)}"
        )
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    return reference.block_topk(
        q_BHTD, k_BGMD, first_BT, past_BT, count, scale=scale, soft_cap=soft_cap
    )
