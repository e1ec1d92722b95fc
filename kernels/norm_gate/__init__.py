"""RMSNorm times a gate, as linear mixers put after the recurrence.

``...`` any leading axes, H heads, D channels.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ltconvert.kernels import dispatch, limits

GateFn = Literal["2sigmoid", "sigmoid", "silu"]


def norm_gate(
    x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, gate_fn: GateFn = "2sigmoid"
) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight * fn(gate)`` over the last axis, in x's dtype.

    x and gate [..., H, D] or [..., D]; weight [D] or [H, D]. ``2sigmoid`` is ``2 * sigmoid``, 1 at
    0. Arithmetic in fp32 (fp64 for fp64 inputs). The gated norm of arXiv 2412.06464 has "silu".

    Raises:
        ValueError: shapes that do not fit together, or an unknown ``gate_fn``.
    """
    if gate.shape != x.shape or weight.shape not in (x.shape[-1:], x.shape[-2:]):
        raise ValueError(
            f"gate must have x's shape {list(x.shape)} and weight its last one or two axes, "
            f"got {list(gate.shape)} and {list(weight.shape)}"
        )
    if gate_fn not in ("2sigmoid", "sigmoid", "silu"):
        raise ValueError(f"gate_fn must be '2sigmoid', 'sigmoid' or 'silu', got {gate_fn!r}")
    limit = limits.of_precision(x, weight, gate)
    return dispatch.implementation("norm_gate", x.device, limit).norm_gate(
        x, weight, gate, eps=eps, gate_fn=gate_fn
    )
