"""A linear layer of one decoded token a row, with what stands before and behind it in a decoder.

B batch, C channels, O outputs, R rows of the weight: 2 O where a gate stands before them, else O.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients

GateActivation = Literal["silu", "gelu_tanh"]


def decode_linear(
    x_BC: Tensor,
    weight_OC: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm_weight_C: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    residual_BO: Tensor | None = None,
    swiglu: bool = False,
    activation: GateActivation = "silu",
) -> Tensor:
    """``x @ weight.T + bias`` for few rows: y [B, O] in x's dtype.

    With a norm's weight, x is divided by its root mean square first, ``x * rsqrt(mean(x^2) + eps)
    * (norm_offset + norm_weight)``. With ``swiglu``, weight and bias have 2 O rows, first those of
    the gate: ``y = activation(gate) * up``. ``residual_BO`` is added at the end. ``gelu_tanh`` is
    the approximation that transformers calls ``gelu_pytorch_tanh``.

    Sums in fp32 (fp64 for fp64 inputs). Values are rounded to x's dtype where separate layers hand
    them on: after the norm, the product with its bias, the activation and its product. No gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit together, an unknown activation, or a gradient
            that would be needed.
    """
    batch, channels = x_BC.shape
    rows = weight_OC.shape[0]
    outputs = rows // 2 if swiglu else rows
    if weight_OC.shape != (rows, channels) or not channels:
        raise ValueError(
            f"with x {list(x_BC.shape)}, the weight must be [outputs, {channels}] (twice the "
            f"outputs with swiglu) and have channels, got {list(weight_OC.shape)}"
        )
    check_gate(rows, activation, swiglu=swiglu)
    sizes = (
        ("bias", bias_O, (rows,)),
        ("norm's weight", norm_weight_C, (channels,)),
        ("residual", residual_BO, (batch, outputs)),
    )
    for name, tensor, size in sizes:
        if tensor is not None and tensor.shape != size:
            raise ValueError(f"the {name} must be {list(size)}, got {list(tensor.shape)}")
    for name, tensor in (("weight", weight_OC), ("bias", bias_O), ("residual", residual_BO)):
        if tensor is not None and tensor.dtype != x_BC.dtype:
            raise ValueError(f"the {name} must have x's dtype {x_BC.dtype}, got {tensor.dtype}")
    refuse_gradients("decode_linear", x_BC, weight_OC, bias_O, norm_weight_C, residual_BO)
    limit = limits.of_decode_linear(x_BC, weight_OC)
    return dispatch.implementation("decode_linear", x_BC.device, limit).decode_linear(
        x_BC,
        weight_OC,
        bias_O,
        norm_weight_C=norm_weight_C,
        norm_eps=norm_eps,
        norm_offset=norm_offset,
        residual_BO=residual_BO,
        swiglu=swiglu,
        activation=activation,
    )


def check_gate(rows: int, activation: str, *, swiglu: bool) -> None:
    """Refuse rows of a weight that have no halves with ``swiglu``, and unknown activations.

    Raises:
        ValueError: one of these.
    """
    if swiglu and rows % 2:
        raise ValueError(f"with swiglu the weight must have twice the outputs, got {rows} rows")
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation must be 'silu' or 'gelu_tanh', got {activation!r}")
