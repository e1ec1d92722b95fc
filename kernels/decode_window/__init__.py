"""One decoded token's attention over a window, and what stands for all tokens before it.

B batch, H query heads, G key/value heads, S slots of the window, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


def decode_window(
    q_BHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    lengths_B: Tensor,
    other_BHD: Tensor,
    rest_BH: Tensor,
    outside_B: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """``p * softmax(s) v + (1 - p) * other``, [B, H, D] in q's dtype, with
    ``p = sigmoid(log(sum(exp(s))) - rest)`` where ``outside_B`` is true, else 1.

    s, scale, soft cap, lengths and heads are those of ``decode_attention``. ``rest_BH`` may have
    any strides. Arithmetic in fp32 (fp64 for fp64 inputs). No gradient.

    Raises:
        ValueError: shapes that do not fit together, or a gradient that would be needed.
    """
    batch, groups, _, width = k_BGSD.shape
    heads = q_BHD.shape[1]
    if (
        q_BHD.shape != (batch, heads, width)
        or v_BGSD.shape != k_BGSD.shape
        or other_BHD.shape != q_BHD.shape
        or rest_BH.shape != (batch, heads)
        or lengths_B.shape != (batch,)
        or outside_B.shape != (batch,)
        or heads % groups
    ):
        raise ValueError(
            f"with keys {list(k_BGSD.shape)}, q and other must be [{batch}, heads, {width}], "
            f"values as keys, rest [{batch}, heads], lengths and outside [{batch}], and heads a "
            f"multiple of {groups}; got {list(q_BHD.shape)}, {list(other_BHD.shape)}, "
            f"{list(v_BGSD.shape)}, {list(rest_BH.shape)}, {list(lengths_B.shape)} and "
            f"{list(outside_B.shape)}"
        )
    if outside_B.dtype != torch.bool:
        raise ValueError(f"outside must be boolean, got {outside_B.dtype}")
    refuse_gradients("decode_window", q_BHD, k_BGSD, v_BGSD, other_BHD, rest_BH)
    limit = limits.of_decode_attention(q_BHD, k_BGSD, v_BGSD)
    return dispatch.implementation("decode_window", q_BHD.device, limit).decode_window(
        q_BHD, k_BGSD, v_BGSD, lengths_B, other_BHD, rest_BH, outside_B,
        scale=scale, soft_cap=soft_cap,
    )  # fmt: skip
