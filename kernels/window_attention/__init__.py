"""Softmax attention over a window of tokens, with the logarithm of what its weights add up to.

PyTorch's scaled dot product attention keeps that sum to itself; a mixer that shares the softmax
between a window and something else needs it, and its gradient.

B batch, T tokens, S keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.segments import Bounds, check_token_grid


def window_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    window: int,
    scale: float,
    soft_cap: float | None = None,
    bounds: Bounds | None = None,
    keep_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over itself and the ``window - 1`` tokens before it.

    ``s = scale * q.k`` (through ``soft_cap * tanh(s / soft_cap)`` where there is a cap),
    ``log_sum = log(sum(exp(s)))``, ``o = sum(exp(s - log_sum) v)``; both are differentiable.

    Args:
        k_BSGD, v_BSGD: of the queries' tokens and of S - T tokens before them, H a multiple of G.
        bounds: of ``segment_bounds``: a query sees its own document. Not with S > T.
        keep_BS: False at padding, which only padding itself sees.

    Returns:
        Outputs [B, T, H, D] in q's dtype, and log_sum [B, T, H] in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_sequence(q_BTHD, k_BSGD, v_BSGD, window, bounds, keep_BS)
    limit = limits.of_window_attention(q_BTHD, k_BSGD, v_BSGD)
    return dispatch.implementation("window_attention", q_BTHD.device, limit).window_attention(
        q_BTHD, k_BSGD, v_BSGD, window=window, scale=scale, soft_cap=soft_cap,
        bounds=bounds, keep_BS=keep_BS,
    )  # fmt: skip


def check_sequence(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    window: int | None,
    bounds: Bounds | None,
    keep_BS: Tensor | None,
) -> None:
    """Raise ValueError unless keys, values and what restricts them fit the queries."""
    batch, length, heads, width = q_BTHD.shape
    keys, groups = k_BSGD.shape[1:3]
    if (
        k_BSGD.shape != (batch, keys, groups, width)
        or v_BSGD.shape != k_BSGD.shape
        or not 0 < length <= keys
        or heads % groups
    ):
        raise ValueError(
            f"with queries {list(q_BTHD.shape)}, keys and values must be [{batch}, {length} or "
            f"more, a divisor of {heads}, {width}], got {list(k_BSGD.shape)} and "
            f"{list(v_BSGD.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window has at least 1 token, got {window}")
    if bounds is not None and keys > length:
        raise ValueError(f"segments go with as many keys as queries, got {keys} for {length}")
    for bound_BT in bounds or ():
        check_token_grid("bounds of segments", bound_BT, batch, length)
    check_token_grid("keep", keep_BS, batch, keys)
