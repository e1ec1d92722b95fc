"""One decoded token of a Gated DeltaNet and a window of attention under one softmax.

From the projections to the output projection. B batch, H heads, D head width, S slots of the
window, C = 3 H D channels of q, k and v side by side, P = W - 1 tokens of a convolution's history.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import check_arrivals, refuse_gradients
from ltconvert.kernels.gdn_step import check_token
from ltconvert.kernels.norm_gate import GateFn
from ltconvert.kernels.short_conv import Activation


@dataclass(frozen=True)
class Ring:
    """The window of a layer, and how the new token looks into it.

    Attributes:
        keys_BHSD, values_BHSD: of the last tokens, in any order; any strides but of the last axis.
        slots_B: where the new token goes, in place of what stands there.
        lengths_B: how many slots are filled then, the first ones. What others hold, NaN too, has
            no influence.
        outside_B: whether a token of the row lies before the window; boolean.
        rest_BH: log of the weight of what lies outside. Rows may lie apart.
        scale: of the scores.
        soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``; None for none.
        cos_BD, sin_BD: positions of q and k, the first half of D turned with the second; None for
            none.
        arrivals_BH: room for a kernel to count in, as in ``decode_attention``; it lets two
            programs share a head's work.
    """

    keys_BHSD: Tensor
    values_BHSD: Tensor
    slots_B: Tensor
    lengths_B: Tensor
    outside_B: Tensor
    rest_BH: Tensor
    scale: float
    soft_cap: float | None = None
    cos_BD: Tensor | None = None
    sin_BD: Tensor | None = None
    arrivals_BH: Tensor | None = None


def gdn_window_step(
    ring: Ring,
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHDD: Tensor,
    norm_weight_HD: Tensor,
    gate_BHD: Tensor,
    *,
    eps: float,
    gate_fn: GateFn = "2sigmoid",
    conv_weight_CW: Tensor | None = None,
    conv_history_BCP: Tensor | None = None,
    activation: Activation | None = None,
    beta_factor: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    """Run one token: y [B, H, D]. State, history, keys and values are updated in place::

        other = gdn_step(qkv, ...)                     (all arguments but the ring are its own)
        q, k, v = split(qkv),  q and k turned;  k and v go into their slot
        s = ring.scale * q . keys,  with a soft cap
        p = sigmoid(log(sum(exp(s))) - rest) where tokens lie outside, else 1
        y = p * softmax(s) values + (1 - p) * other

    Arithmetic in fp32 (fp64 for fp64 inputs); y has qkv's dtype. No gradient.

    Raises:
        ValueError: shapes that do not fit together, or what ``gdn_step`` refuses.
    """
    check_token(
        "gdn_window_step", qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHDD,
        norm_weight_HD, gate_BHD, gate_fn, conv_weight_CW, conv_history_BCP, activation,
    )  # fmt: skip
    _check_ring(ring, state_BHDD)
    limit = limits.of_decode_attention(state_BHDD, ring.keys_BHSD, ring.values_BHSD)
    limit = limit or limits.of_precision(qkv_BC)
    return dispatch.implementation("gdn_window_step", qkv_BC.device, limit).gdn_window_step(
        ring,
        qkv_BC,
        beta_BH,
        decay_BH,
        log_rate_H,
        rate_bias_H,
        state_BHDD,
        norm_weight_HD,
        gate_BHD,
        eps=eps,
        gate_fn=gate_fn,
        conv_weight_CW=conv_weight_CW,
        conv_history_BCP=conv_history_BCP,
        activation=activation,
        beta_factor=beta_factor,
        scale=state_BHDD.shape[2] ** -0.5 if scale is None else scale,
    )


def _check_ring(ring: Ring, state_BHDD: Tensor) -> None:
    batch, heads, width, _ = state_BHDD.shape
    keys, values, rest = ring.keys_BHSD, ring.values_BHSD, ring.rest_BH
    one_a_row = (ring.slots_B, ring.lengths_B, ring.outside_B)
    if (
        state_BHDD.shape[3] != width
        or keys.dim() != 4
        or (*keys.shape[:2], keys.shape[3]) != (batch, heads, width)
        or values.shape != keys.shape
        or rest.shape != (batch, heads)
        or any(x.shape != (batch,) for x in one_a_row)
    ):
        raise ValueError(
            "a window needs a state as wide as its keys; with a state "
            f"{list(state_BHDD.shape)}, keys and values must be [{batch}, {heads}, slots, {width}],"
            f" rest [{batch}, {heads}], slots, lengths and outside [{batch}]; got "
            f"{list(keys.shape)}, {list(values.shape)}, {list(rest.shape)} and "
            f"{', '.join(str(list(x.shape)) for x in one_a_row)}"
        )
    if ring.outside_B.dtype != torch.bool:
        raise ValueError(f"outside must be boolean, got {ring.outside_B.dtype}")
    tables = [x for x in (ring.cos_BD, ring.sin_BD) if x is not None]
    if tables and (width % 2 or [x.shape for x in tables] != [(batch, width)] * 2):
        raise ValueError(
            f"cos and sin go together, each [{batch}, {width}], the width even; got "
            f"{', '.join(str(list(x.shape)) for x in tables)}"
        )
    check_arrivals(ring.arrivals_BH, batch, heads)
    refuse_gradients("gdn_window_step", keys, values, rest)
