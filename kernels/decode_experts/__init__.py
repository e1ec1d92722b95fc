"""Linear layers of a mixture of experts for few tokens: of the weights, chosen ones alone are read.

N tokens, K choices a token, E experts, C channels, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


def decode_experts(
    x: Tensor,
    weight_EOC: Tensor,
    bias_EO: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None = None,
) -> Tensor:
    """``y_nk = x_n @ weight[e].T + bias[e]`` with ``e = chosen[n, k]``: [N, K, O] in x's dtype.

    With ``weights_NK``, ``sum_k weights[n, k] y_nk``: [N, O]. Sums in fp32 (fp64 for fp64 inputs).
    No gradient.

    Args:
        x: [N, C], the same for all of a token's choices, or [N, K, C].
        chosen_NK: numbers of experts; those from E on are nulls, which give 0 and read nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a gradient that would be needed.
    """
    experts, outputs, channels = weight_EOC.shape
    tokens, choices = chosen_NK.shape
    if x.shape not in ((tokens, channels), (tokens, choices, channels)):
        raise ValueError(
            f"with choices {list(chosen_NK.shape)} and weights {list(weight_EOC.shape)}, x must be "
            f"[{tokens}, {channels}] or [{tokens}, {choices}, {channels}], got {list(x.shape)}"
        )
    if bias_EO is not None and bias_EO.shape != (experts, outputs):
        raise ValueError(f"the bias must be [{experts}, {outputs}], got {list(bias_EO.shape)}")
    if weights_NK is not None and weights_NK.shape != chosen_NK.shape:
        raise ValueError(
            f"weights must have the choices' shape {list(chosen_NK.shape)}, got "
            f"{list(weights_NK.shape)}"
        )
    for name, tensor in (("weight", weight_EOC), ("bias", bias_EO)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"the {name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    refuse_gradients("decode_experts", x, weight_EOC, bias_EO, weights_NK)
    limit = limits.of_decode_experts(x, weight_EOC)
    return dispatch.implementation("decode_experts", x.device, limit).decode_experts(
        x, weight_EOC, bias_EO, chosen_NK, weights_NK
    )
