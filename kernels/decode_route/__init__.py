"""Which experts a decoded token uses: norm, logits, the choice and its weights.

B rows, C channels, E experts, Z nulls, X = E + Z, K choices.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


class Routed(NamedTuple):
    """Of each row: x / rms(x), numbers of the chosen, their weights, the highest score chosen."""

    x_BC: Tensor
    chosen_BK: Tensor
    weights_BK: Tensor
    top_B: Tensor


def decode_route(
    h_BC: Tensor,
    keys_XC: Tensor,
    bias_X: Tensor,
    balance_E: Tensor,
    *,
    top: int,
    total: float,
    by_scores: bool,
    eps: float,
) -> Routed:
    """``logits = x . key + bias`` of the normed row x, and what the K highest of them say.

    Ranked are logits (with ``by_scores`` their sigmoids) plus ``balance``. Logits from E on are of
    nulls: those among the K highest without ``balance`` are chosen, and ``balance`` ranks the
    experts for the places left. Weights are sigmoids of the chosen's logits, made to sum to
    ``total``. x is in h's dtype, the rest in fp32 (fp64 for fp64 inputs). Nothing is read by the
    host. No gradient.

    Raises:
        ValueError: shapes that do not fit together, or a gradient that would be needed.
    """
    channels, (every, width), experts = h_BC.shape[1], keys_XC.shape, len(balance_E)
    if width != channels or bias_X.shape != (every,) or not top <= experts <= every:
        raise ValueError(
            f"with h {list(h_BC.shape)} and {experts} experts, at least the {top} to be chosen, "
            f"keys must be [{experts} or more, {channels}] and the bias as many; got "
            f"{list(keys_XC.shape)} and {list(bias_X.shape)}"
        )
    refuse_gradients("decode_route", h_BC, keys_XC, bias_X)
    limit = limits.of_decode_route(h_BC, keys_XC)
    return dispatch.implementation("decode_route", h_BC.device, limit).decode_route(
        h_BC, keys_XC, bias_X, balance_E, top=top, total=total, by_scores=by_scores, eps=eps
    )
