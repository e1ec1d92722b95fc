"""RMSNorm of one decoded token, with the residual stream that it is added to.

B batch, C channels.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


def decode_norm(
    x_BC: Tensor,
    weight_C: Tensor,
    residual_BC: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """``residual + x * rsqrt(mean(x^2) + eps) * (weight + offset)``, [B, C] in x's dtype.

    Arithmetic in fp32 (fp64 for fp64 inputs). No gradient.

    Raises:
        ValueError: shapes that do not fit together, or a gradient that would be needed.
    """
    if weight_C.shape != x_BC.shape[1:] or (
        residual_BC is not None and residual_BC.shape != x_BC.shape
    ):
        raise ValueError(
            f"weight must have x's channels and residual its shape {list(x_BC.shape)}, got "
            f"{list(weight_C.shape)} and {None if residual_BC is None else list(residual_BC.shape)}"
        )
    refuse_gradients("decode_norm", x_BC, weight_C, residual_BC)
    limit = limits.of_precision(x_BC, weight_C)
    return dispatch.implementation("decode_norm", x_BC.device, limit).decode_norm(
        x_BC, weight_C, residual_BC, eps=eps, offset=offset
    )
