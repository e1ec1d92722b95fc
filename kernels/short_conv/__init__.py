"""Causal depthwise convolution over the last few tokens, as linear mixers put before q, k and v.

B batch, T tokens, D channels, W taps, H = W - 1 tokens of history.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.segments import check_token_grid

Activation = Literal["silu"]


def short_conv(
    x_BTD: Tensor,
    weight_DW: Tensor,
    *,
    history_BDH: Tensor | None = None,
    segment_ids_BT: Tensor | None = None,
    keep_BT: Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """``y_t = activation(sum_j weight[:, W-1-j] * x_{t-j})``: (y [B, T, D], new history [B, D, H]).

    The last tap multiplies the current token. ``history_BDH`` holds the H tokens before the row
    (zeros when None), newest last; the new history is what the next call needs. Tokens of another
    segment and padding (``keep_BT`` False) count as zero; y at padding is meaningless. Segments are
    read as in ``delta_rule``. Arithmetic in fp32 (fp64 for fp64 inputs); y and history have x's
    dtype.

    Raises:
        ValueError: shapes that do not fit together.
    """
    batch, length, channels = x_BTD.shape
    if length == 0:
        raise ValueError("short_conv needs at least one token, got a sequence of length 0")
    if weight_DW.dim() != 2 or weight_DW.shape[0] != channels or weight_DW.shape[1] < 2:
        raise ValueError(
            f"weight must be [channels, taps] = [{channels}, 2 or more], "
            f"got {list(weight_DW.shape)}"
        )
    shape = (batch, channels, weight_DW.shape[1] - 1)
    if history_BDH is not None and tuple(history_BDH.shape) != shape:
        raise ValueError(
            f"history must be [batch, channels, taps - 1] = {list(shape)}, "
            f"got {list(history_BDH.shape)}"
        )
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be None or 'silu', got {activation!r}")
    check_token_grid("segment_ids", segment_ids_BT, batch, length)
    check_token_grid("keep", keep_BT, batch, length)
    limit = limits.of_convolution(x_BTD, weight_DW)
    return dispatch.implementation("short_conv", x_BTD.device, limit).short_conv(
        x_BTD,
        weight_DW,
        history_BDH=history_BDH,
        segment_ids_BT=segment_ids_BT,
        keep_BT=keep_BT,
        activation=activation,
    )
