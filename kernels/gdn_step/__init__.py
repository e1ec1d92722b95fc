"""One decoded token of a Gated DeltaNet layer, from its projections to the output projection.

B batch, H heads, K key width, V value width, C = H * (2 K + V) channels of q, k and v side by side,
W taps, P = W - 1 tokens of history.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients
from ltconvert.kernels.norm_gate import GateFn
from ltconvert.kernels.short_conv import Activation


def gdn_step(
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHKV: Tensor,
    norm_weight_HV: Tensor,
    gate_BHV: Tensor,
    *,
    eps: float,
    gate_fn: GateFn = "2sigmoid",
    conv_weight_CW: Tensor | None = None,
    conv_history_BCP: Tensor | None = None,
    activation: Activation | None = None,
    beta_factor: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    """Run one token: y [B, H, V]. ``state_BHKV`` and ``conv_history_BCP`` are updated in place.

    In terms of the ops that train the layer::

        q, k, v = split(short_conv(qkv, conv_weight, history, activation))    (as it is without)
        beta = beta_factor * sigmoid(beta)
        log_decay = -exp(log_rate) * softplus(decay + rate_bias)
        o, state = delta_rule_step(q, k, v, beta, log_decay, state, scale)    (q, k of length 1)
        y = norm_gate(o, norm_weight, gate, eps, gate_fn)

    ``beta_factor`` is 1, or 2 for beta in (0, 2). ``scale`` is K ** -0.5 when None. Arithmetic in
    fp32 (fp64 for fp64 inputs); y has qkv's dtype. No gradient.

    Raises:
        ValueError: shapes that do not fit together, an unknown activation or ``gate_fn``, or a
            gradient that would be needed.
    """
    check_token(
        "gdn_step", qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHKV, norm_weight_HV,
        gate_BHV, gate_fn, conv_weight_CW, conv_history_BCP, activation,
    )  # fmt: skip
    limit = limits.of_precision(qkv_BC, state_BHKV)
    return dispatch.implementation("gdn_step", qkv_BC.device, limit).gdn_step(
        qkv_BC,
        beta_BH,
        decay_BH,
        log_rate_H,
        rate_bias_H,
        state_BHKV,
        norm_weight_HV,
        gate_BHV,
        eps=eps,
        gate_fn=gate_fn,
        conv_weight_CW=conv_weight_CW,
        conv_history_BCP=conv_history_BCP,
        activation=activation,
        beta_factor=beta_factor,
        scale=state_BHKV.shape[2] ** -0.5 if scale is None else scale,
    )


def check_token(
    op: str,
    qkv_BC: Tensor,
    beta_BH: Tensor,
    decay_BH: Tensor,
    log_rate_H: Tensor,
    rate_bias_H: Tensor,
    state_BHKV: Tensor,
    norm_weight_HV: Tensor,
    gate_BHV: Tensor,
    gate_fn: str,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
    activation: str | None,
) -> None:
    """Raise ValueError where ``gdn_step`` does; ``op`` is named in the message."""
    batch, heads, key_width, value_width = state_BHKV.shape
    channels = heads * (2 * key_width + value_width)
    if (
        qkv_BC.shape != (batch, channels)
        or beta_BH.shape != (batch, heads)
        or decay_BH.shape != (batch, heads)
        or log_rate_H.shape != (heads,)
        or rate_bias_H.shape != (heads,)
        or norm_weight_HV.shape != (heads, value_width)
        or gate_BHV.shape != (batch, heads, value_width)
    ):
        raise ValueError(
            f"with a state {list(state_BHKV.shape)}, qkv must be [{batch}, {channels}], beta and "
            f"decay [{batch}, {heads}], log_rate and rate_bias [{heads}], the norm's weight "
            f"[{heads}, {value_width}] and gate [{batch}, {heads}, {value_width}]; got "
            f"{list(qkv_BC.shape)}, {list(beta_BH.shape)} and {list(decay_BH.shape)}, "
            f"{list(log_rate_H.shape)} and {list(rate_bias_H.shape)}, {list(norm_weight_HV.shape)}"
            f" and {list(gate_BHV.shape)}"
        )
    if (conv_weight_CW is None) != (conv_history_BCP is None):
        raise ValueError("the convolution's weight and history go together: pass both or neither")
    if conv_weight_CW is not None and conv_history_BCP is not None:
        taps = conv_weight_CW.shape[-1]
        if conv_weight_CW.shape != (channels, taps) or taps < 2:
            raise ValueError(
                f"the convolution's weight must be [channels, taps] = [{channels}, 2 or more], "
                f"got {list(conv_weight_CW.shape)}"
            )
        if conv_history_BCP.shape != (batch, channels, taps - 1):
            raise ValueError(
                "the convolution's history must be [batch, channels, taps - 1] = "
                f"[{batch}, {channels}, {taps - 1}], got {list(conv_history_BCP.shape)}"
            )
    if activation not in (None, "silu") or gate_fn not in ("2sigmoid", "sigmoid", "silu"):
        raise ValueError(
            "activation must be None or 'silu' and gate_fn '2sigmoid', 'sigmoid' or 'silu', got "
            f"{activation!r} and {gate_fn!r}"
        )
    refuse_gradients(
        op, qkv_BC, beta_BH, decay_BH, log_rate_H, rate_bias_H, state_BHKV, norm_weight_HV,
        gate_BHV, conv_weight_CW, conv_history_BCP,
    )  # fmt: skip
