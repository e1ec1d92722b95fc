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
    limit = _checked("decode_norm", x_BC, residual_BC, weight_C)
    return dispatch.implementation("decode_norm", x_BC.device, limit).decode_norm(
        x_BC, weight_C, residual_BC, eps=eps, offset=offset
    )


def decode_norms(
    x_BC: Tensor,
    weight_C: Tensor,
    residual_BC: Tensor | None,
    next_weight_C: Tensor,
    *,
    eps: float,
    offset: float,
    next_eps: float,
    next_offset: float,
) -> tuple[Tensor, Tensor]:
    """What ``decode_norm`` gives, and a norm of that, which the next products can share.

    Two tensors [B, C]: the second is ``decode_norm(first, next_weight, next_eps, next_offset)``.

    Raises:
        ValueError: as ``decode_norm``.
    """
    limit = _checked("decode_norms", x_BC, residual_BC, weight_C, next_weight_C)
    return dispatch.implementation("decode_norm", x_BC.device, limit).decode_norms(
        x_BC, weight_C, residual_BC, next_weight_C,
        eps=eps, offset=offset, next_eps=next_eps, next_offset=next_offset,
    )  # fmt: skip


def _checked(op: str, x_BC: Tensor, residual_BC: Tensor | None, *weights_C: Tensor) -> str | None:
    """What Triton does not take; raises ValueError."""
    sizes = [weight_C.shape for weight_C in weights_C]
    if any(size != x_BC.shape[1:] for size in sizes) or (
        residual_BC is not None and residual_BC.shape != x_BC.shape
    ):
        raise ValueError(
            f"weight must have x's channels and residual its shape {list(x_BC.shape)}, got "
            f"{', '.join(str(list(size)) for size in sizes)} and "
            f"{None if residual_BC is None else list(residual_BC.shape)}"
        )
    refuse_gradients(op, x_BC, *weights_C, residual_BC)
    return limits.of_precision(x_BC, *weights_C)
