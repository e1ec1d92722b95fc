"""Softmax attention of one decoded token over a preallocated cache.

B batch, H query heads, G key/value heads, S slots of the cache, D head width.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend from one token a row: o [B, H, D] in q's dtype.

    ``s = scale * q.k``, with a soft cap ``s = soft_cap * tanh(s / soft_cap)``; ``o = softmax(s) v``
    over the first ``lengths_B[b]`` slots. Query head h reads key/value head ``h // (H / G)``.
    Arithmetic in fp32 (fp64 for fp64 inputs). No gradient.

    Lengths are int32 or int64 on the tensors' device and lie in 1..S. They are read there, so a
    value out of range is no error: more than S counts as S, a row of less than 1 is NaN. What
    stands in the slots behind a length, NaN too, has no influence.

    Raises:
        ValueError: shapes or dtypes that do not fit together, a soft cap that is not positive, or
            a gradient that would be needed.
    """
    backend = _backend(q_BHD, k_BGSD, v_BGSD, lengths_B, soft_cap)
    return backend.decode_attention(  # type: ignore[no-any-return]
        q_BHD, k_BGSD, v_BGSD, lengths_B, scale=scale, soft_cap=soft_cap
    )


def decode_attention_with_sum(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``decode_attention`` and ``log(sum(exp(s)))`` [B, H] in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: as there.
    """
    backend = _backend(q_BHD, k_BGSD, v_BGSD, lengths_B, soft_cap)
    return backend.decode_attention_with_sum(  # type: ignore[no-any-return]
        q_BHD, k_BGSD, v_BGSD, lengths_B, scale=scale, soft_cap=soft_cap
    )


def _backend(
    q_BHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, lengths_B: Tensor, soft_cap: float | None
) -> ModuleType:
    """What computes inputs that are found to fit together."""
    batch, groups, slots, width = k_BGSD.shape
    heads = q_BHD.shape[1]
    if (
        q_BHD.shape != (batch, heads, width)
        or v_BGSD.shape != k_BGSD.shape
        or lengths_B.shape != (batch,)
    ):
        raise ValueError(
            f"with keys {list(k_BGSD.shape)}, q must be [{batch}, heads, {width}], values as keys "
            f"and lengths [{batch}]; got {list(q_BHD.shape)}, {list(v_BGSD.shape)} and "
            f"{list(lengths_B.shape)}"
        )
    if not groups or heads % groups or not slots:
        raise ValueError(
            "query heads must be a multiple of the key/value heads and the cache must have slots, "
            f"got {heads} and {groups} heads, {slots} slots"
        )
    if not q_BHD.dtype == k_BGSD.dtype == v_BGSD.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, got {q_BHD.dtype}, {k_BGSD.dtype}, {v_BGSD.dtype}"
        )
    if lengths_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be int32 or int64, got {lengths_B.dtype}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    refuse_gradients("decode_attention", q_BHD, k_BGSD, v_BGSD)
    limit = limits.of_decode_attention(q_BHD, k_BGSD, v_BGSD)
    return dispatch.implementation("decode_attention", q_BHD.device, limit)
