"""One token of a Gated DeltaNet layer between its projections, as decoding runs it.

Steps take turns over sets of inputs that are larger than a GPU's second-level cache in sum, as the
layers of a model are. B batch, H heads, K key and value width, M = 3 H K channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.gdn_step import gdn_step

BATCHES = {"full": (1, 8, 64), "quick": (1,), "tiny": (2,)}
TAPS, EPS = 4, 1e-5
PEER, LAYER_PEER = "fla recurrent", "fla conv + recurrent + norm"
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Convolution, recurrence and gated norm of one token at every batch size."""
    return [_case(batch, scale, device) for batch in BATCHES[scale]]


def _case(batch: int, scale: Scale, device: torch.device) -> Case:
    heads, width = (2, 16) if scale == "tiny" else (16, 128)
    state_bytes = 4 * batch * heads * width * width

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        channels = 3 * heads * width
        cache = draw.normal(3, batch, heads * width, TAPS)
        return {
            "qkv": draw.normal(batch, channels),
            "beta": draw.normal(batch, heads),
            "decay": draw.normal(batch, heads),
            "log_rate": draw.normal(heads, dtype=torch.float32),
            "rate_bias": draw.normal(heads, dtype=torch.float32) - 3.0,
            "state": draw.normal(batch, heads, width, width, dtype=torch.float32),
            "history": torch.cat(list(cache[..., 1:]), dim=1),
            "cache": cache,  # the peer keeps all taps of q, k and v apart, and shifts in place
            "conv_weight": draw.normal(channels, TAPS, scale=TAPS**-0.5),
            "gate": draw.normal(batch, heads, width),
            "norm_weight": (1.0 + draw.normal(width, scale=0.1)).repeat(heads, 1),
        }

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(2 * state_bytes, device)}

    sets = 2 if scale == "tiny" else max(2, min(64, TURN_BYTES // state_bytes))
    phases = STEP if device.type == "cuda" else STEP[:1]
    # Not compared with ours: by then the timed rounds have moved the states on.
    peers = {PEER: Peer(_fla_recurrent, False), LAYER_PEER: Peer(_fla_layer, False)}
    return Case(
        op="gdn_step",
        shape=f"{batch}x{heads}x{width}",
        make=make,
        ours=step,
        phases=phases,
        peers=peers,
        sets=sets,
        floor=floor,
        floor_name="copy of state",
        targets={phase: Target(PEER, 0.25) for phase in phases},
    )


def step(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    log_rate: Tensor,
    rate_bias: Tensor,
    state: Tensor,
    history: Tensor,
    conv_weight: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, V], and state and history, which change in place."""
    y = gdn_step(
        qkv, beta, decay, log_rate, rate_bias, state, norm_weight, gate,
        eps=EPS, gate_fn="silu", conv_weight_CW=conv_weight, conv_history_BCP=history,
    )  # fmt: skip
    return y, state, history


def _heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k and v, [B, H, K] each."""
    return qkv.unflatten(-1, (3, heads, -1)).unbind(1)


def _fla_recurrent() -> Function:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as op

    def recurrent(
        qkv: Tensor, beta: Tensor, decay: Tensor, state: Tensor, **_: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.unsqueeze(1) for x in _heads(qkv, beta.shape[-1]))
        o_B1HK, state = op(
            q,
            k,
            v,
            g=decay.unsqueeze(1),
            beta=beta.unsqueeze(1),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return o_B1HK.squeeze(1), state

    return recurrent


def _fla_layer() -> Function:
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    recurrent = _fla_recurrent()

    def layer(
        qkv: Tensor,
        beta: Tensor,
        decay: Tensor,
        log_rate: Tensor,
        rate_bias: Tensor,
        state: Tensor,
        cache: Tensor,
        conv_weight: Tensor,
        gate: Tensor,
        norm_weight: Tensor,
        **_: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(qkv.chunk(3, -1), cache, conv_weight.chunk(3), strict=True)
        convolved = [
            causal_conv1d_update(x.unsqueeze(1), history, weight=weight)[0].flatten(1)
            for x, history, weight in parts
        ]
        log_decay = -log_rate.exp() * F.softplus(decay + rate_bias)
        o_BHK, state = recurrent(torch.cat(convolved, -1), beta.sigmoid(), log_decay, state)
        y_BHK = rms_norm_gated(o_BHK, gate, norm_weight[0], None, activation="silu", eps=EPS)
        return y_BHK, state, cache

    return layer
