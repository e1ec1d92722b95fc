"""Linear layers of a mixture of experts for few tokens: of the weights, chosen ones alone are read.

N tokens, K choices a token, E experts, C channels, O outputs, R rows of an expert's weight: 2 O
where a gate stands before them, else O.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decode_linear import GateActivation, check_gate
from ltconvert.kernels.decoding import refuse_gradients


def decode_experts(
    x: Tensor,
    weight_ERC: Tensor,
    bias_ER: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None = None,
    *,
    residual_NO: Tensor | None = None,
    swiglu: bool = False,
    activation: GateActivation = "silu",
) -> Tensor:
    """``y_nk = x_n @ weight[e].T + bias[e]`` with ``e = chosen[n, k]``: [N, K, O] in x's dtype.

    With ``swiglu``, as in ``decode_linear``, ``y_nk = activation(gate) * up`` of the first O rows
    and the others. With ``weights_NK``, ``residual[n] + sum_k weights[n, k] y_nk``: [N, O]. Sums in
    fp32 (fp64 for fp64 inputs), rounded as in ``decode_linear``. No gradient.

    Args:
        x: [N, C], the same for all of a token's choices, or [N, K, C].
        chosen_NK: numbers of experts; those from E on are nulls, which give 0 and read nothing.
        residual_NO: only with ``weights_NK``, and ``swiglu`` only without.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a gradient that would be needed.
    """
    experts, rows, channels = weight_ERC.shape
    outputs = rows // 2 if swiglu else rows
    tokens, choices = chosen_NK.shape
    if x.shape not in ((tokens, channels), (tokens, choices, channels)):
        raise ValueError(
            f"with choices {list(chosen_NK.shape)} and weights {list(weight_ERC.shape)}, x must be "
            f"[{tokens}, {channels}] or [{tokens}, {choices}, {channels}], got {list(x.shape)}"
        )
    check_gate(rows, activation, swiglu=swiglu)
    sizes = (
        ("bias", bias_ER, (experts, rows)),
        ("choices' weights", weights_NK, chosen_NK.shape),
        ("residual", residual_NO, (tokens, outputs)),
    )
    for name, tensor, size in sizes:
        if tensor is not None and tensor.shape != size:
            raise ValueError(f"the {name} must be {list(size)}, got {list(tensor.shape)}")
    for name, tensor in (("weight", weight_ERC), ("bias", bias_ER), ("residual", residual_NO)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"the {name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    if (residual_NO is not None and weights_NK is None) or (swiglu and weights_NK is not None):
        raise ValueError("a residual needs weights of the choices, which swiglu does not take")
    refuse_gradients("decode_experts", x, weight_ERC, bias_ER, weights_NK, residual_NO)
    limit = limits.of_decode_experts(x, weight_ERC)
    return dispatch.implementation("decode_experts", x.device, limit).decode_experts(
        x, weight_ERC, bias_ER, chosen_NK, weights_NK,
        residual_NO=residual_NO, swiglu=swiglu, activation=activation,
    )  # fmt: skip
