"""Softmax attention of one decoded token over a preallocated cache.

B batch, H query heads, G key/value heads, S slots of the cache, D head width, M = (H + 2 G) * D
channels of q, k and v side by side.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decode_heads import check_row
from ltconvert.kernels.decoding import check_arrivals, refuse_gradients


def decode_attention(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    arrivals_BH: Tensor | None = None,
) -> Tensor:
    """Attend from one token a row: o [B, H, D] in q's dtype.

    ``s = scale * q.k``, with a soft cap ``s = soft_cap * tanh(s / soft_cap)``; ``o = softmax(s) v``
    over the first ``lengths_B[b]`` slots. Query head h reads key/value head ``h // (H / G)``.
    Arithmetic in fp32 (fp64 for fp64 inputs). No gradient.

    Lengths are int32 or int64 on the tensors' device and lie in 1..S. They are read there, so a
    value out of range is no error: more than S counts as S, a row of less than 1 is NaN. What
    stands in the slots behind a length, NaN too, has no influence.

    ``arrivals_BH`` is room for a kernel to count in, int32, contiguous, zero before and after; it
    saves a launch. Calls may share it that follow each other in one stream.

    Raises:
        ValueError: shapes or dtypes that do not fit together, a soft cap that is not positive, or
            a gradient that would be needed.
    """
    backend = _backend(q_BHD, k_BGSD, v_BGSD, lengths_B, soft_cap, arrivals_BH)
    return backend.decode_attention(  # type: ignore[no-any-return]
        q_BHD, k_BGSD, v_BGSD, lengths_B,
        scale=scale, soft_cap=soft_cap, arrivals_BH=arrivals_BH,
    )  # fmt: skip


def decode_self_attention(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float | None = None,
    cos_BD: Tensor | None = None,
    sin_BD: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    arrivals_BH: Tensor | None = None,
) -> Tensor:
    """``decode_attention`` to the queries of ``decode_heads``, o [B, H, D], in one op.

    Key and value of row b are written into its slot ``slots_B[b]``, which has to be one of the
    first ``lengths_B[b]``: a token attends to itself. Arguments as there. No gradient.

    Raises:
        ValueError: as there.
    """
    check_row(
        qkv_BM, keys_BGSD, values_BGSD, slots_B, num_heads, cos_BD, sin_BD, q_norm_weight,
        k_norm_weight,
    )  # fmt: skip
    width = keys_BGSD.shape[-1]
    q_BHD = qkv_BM[:, : num_heads * width].unflatten(1, (num_heads, width))
    backend = _backend(q_BHD, keys_BGSD, values_BGSD, lengths_B, soft_cap, arrivals_BH)
    refuse_gradients("decode_self_attention", qkv_BM, q_norm_weight, k_norm_weight)
    return backend.decode_self_attention(  # type: ignore[no-any-return]
        qkv_BM, keys_BGSD, values_BGSD, slots_B, lengths_B, num_heads=num_heads, scale=scale,
        soft_cap=soft_cap, cos_BD=cos_BD, sin_BD=sin_BD, q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight, norm_eps=norm_eps, norm_offset=norm_offset,
        arrivals_BH=arrivals_BH,
    )  # fmt: skip


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
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    soft_cap: float | None,
    arrivals_BH: Tensor | None = None,
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
    check_arrivals(arrivals_BH, batch, heads)
    refuse_gradients("decode_attention", q_BHD, k_BGSD, v_BGSD)
    limit = limits.of_decode_attention(q_BHD, k_BGSD, v_BGSD)
    return dispatch.implementation("decode_attention", q_BHD.device, limit)
