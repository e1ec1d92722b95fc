"""``gdn_step`` in plain PyTorch: the ops that train the layer, at one token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.delta_rule.reference import delta_rule_step
from ltconvert.kernels.norm_gate.reference import norm_gate
from ltconvert.kernels.short_conv.reference import short_conv


@torch.no_grad()
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
    gate_fn: str,
    conv_weight_CW: Tensor | None,
    conv_history_BCP: Tensor | None,
    activation: str | None,
    beta_factor: float,
    scale: float,
) -> Tensor:
    """See ``ltconvert.kernels.gdn_step.gdn_step``."""
    if conv_weight_CW is not None and conv_history_BCP is not None:
        x_B1C, history_BCP = short_conv(
            qkv_BC[:, None], conv_weight_CW, history_BDH=conv_history_BCP,
            segment_ids_BT=None, keep_BT=None, activation=activation,
        )  # fmt: skip
        conv_history_BCP.copy_(history_BCP)
        qkv_BC = x_B1C[:, 0]
    _, heads, key_width, value_width = state_BHKV.shape
    key_channels = heads * key_width
    q, k, v = qkv_BC.split([key_channels, key_channels, heads * value_width], dim=-1)
    q_BHK, k_BHK, v_BHV = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    work = torch.promote_types(qkv_BC.dtype, torch.float32)
    beta_BH = beta_factor * torch.sigmoid(beta_BH.to(work))
    rate_BH = F.softplus(decay_BH.to(work) + rate_bias_H.to(work))
    log_decay_BH = -log_rate_H.to(work).exp() * rate_BH
    o_BHV, new_state_BHKV = delta_rule_step(
        q_BHK, k_BHK, v_BHV, beta_BH, log_decay_BH, state_BHKV, scale=scale, l2norm_qk=True
    )
    state_BHKV.copy_(new_state_BHKV)
    return norm_gate(o_BHV, norm_weight_HV, gate_BHV, eps=eps, gate_fn=gate_fn)
