"""Rows of a mixture of experts: tokens to places sorted by expert, and back, weighed and added up.

A choice whose place is negative has no row: nothing is copied for it and nothing added. So there
are rows that nobody writes; what lies there, even NaN, reaches neither sums nor gradients.

Each is the other's backward. No sum depends on the order of threads, and nothing makes the host
wait for a GPU.

N tokens, K choices a token, M = N K rows, C channels.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits


def permute(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    """Copy token n to the rows ``place_NK[n]``: [M, C] in x's dtype.

    Args:
        place_NK: numbers below M, each at most once, or negative for no row.

    Raises:
        ValueError: places that do not belong to these tokens.
    """
    _check_places(place_NK, x_NC.shape[0])
    limit = limits.of_precision(x_NC)
    return dispatch.implementation("permute", x_NC.device, limit).permute(x_NC, place_NK)


def unpermute(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """``sum_k weight[n, k] y[place[n, k]]``: [N, C] in y's dtype, added up in fp32 at least.

    Args:
        place_NK: as in ``permute``.

    Raises:
        ValueError: weights or rows that do not belong to these places.
    """
    _check_places(place_NK, weight_NK.shape[0])
    if weight_NK.shape != place_NK.shape or y_MC.shape[0] != place_NK.numel():
        raise ValueError(
            f"with places {list(place_NK.shape)}, weights have that shape and there are "
            f"{place_NK.numel()} rows, got {list(weight_NK.shape)} and {y_MC.shape[0]}"
        )
    limit = limits.of_precision(y_MC, weight_NK)
    return dispatch.implementation("permute", y_MC.device, limit).unpermute(
        y_MC, place_NK, weight_NK
    )


def _check_places(place_NK: Tensor, tokens: int) -> None:
    if place_NK.dim() != 2 or place_NK.shape[0] != tokens:
        raise ValueError(
            f"places are [{tokens}, choices], one row a token, got {list(place_NK.shape)}"
        )
