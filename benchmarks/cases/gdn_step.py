"""One token of a gated delta rule, and of the layer around it, as decoding runs them.

Steps take turns over sets of inputs that are larger than a GPU's second-level cache in sum, as the
layers of a model are. B batch, H heads, K key and value width, M = 3 H K channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.delta_rule import delta_rule_step
from ltconvert.kernels.norm_gate import norm_gate
from ltconvert.kernels.short_conv import short_conv

BATCHES = {"full": (1, 8, 64), "quick": (1,), "tiny": (2,)}
TAPS, EPS = 4, 1e-5
PEER, LAYER_PEER = "fla recurrent", "fla conv + recurrent + norm"
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """The recurrence alone, then with convolution and gated norm, at every batch size."""
    return [_case(layer, batch, scale, device) for batch in BATCHES[scale] for layer in (0, 1)]


def _case(layer: bool | int, batch: int, scale: Scale, device: torch.device) -> Case:
    heads, width = (2, 16) if scale == "tiny" else (16, 128)

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        channels = 3 * heads * width
        inputs = {
            "q": draw.normal(batch, heads, width),
            "k": draw.normal(batch, heads, width),
            "v": draw.normal(batch, heads, width),
            "beta": draw.open_unit(batch, heads),
            "log_decay": draw.log_decay(batch, heads),
            "state": draw.normal(batch, heads, width, width, dtype=torch.float32),
        }
        if layer:
            channels = heads * width
            cache = draw.normal(3, batch, channels, TAPS)
            inputs |= {
                "history": torch.cat(list(cache[..., 1:]), dim=1),
                "cache": cache,  # the peer keeps all taps of q, k and v apart, and shifts in place
                "conv_weight": draw.normal(3 * channels, TAPS, scale=TAPS**-0.5),
                "gate": draw.normal(batch, heads, width),
                "norm_weight": 1.0 + draw.normal(width, scale=0.1),
            }
        return inputs

    state_bytes = 4 * batch * heads * width * width

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(2 * state_bytes, device)}

    sets = 2 if scale == "tiny" else max(2, min(64, TURN_BYTES // state_bytes))
    peers = {PEER: Peer(_fla_recurrent, same_result=not layer)}
    if layer:
        peers[LAYER_PEER] = Peer(_fla_layer)
    phases = STEP if device.type == "cuda" else STEP[:1]
    return Case(
        op="gdn_step",
        shape=f"{batch}x{heads}x{width}, {'conv, rule, norm' if layer else 'rule'}",
        make=make,
        ours=layer_step if layer else step,
        phases=phases,
        peers=peers,
        sets=sets,
        floor=floor,
        floor_name="copy of state",
        targets={phase: Target(PEER, 0.25) for phase in phases},
    )


def step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [B, H, K] and the new state."""
    return delta_rule_step(q, k, v, beta, log_decay, state)


def layer_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
    history: Tensor,
    conv_weight: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, K], the new state and history."""
    x_B1M = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1).unsqueeze(1)
    y_B1M, history = short_conv(x_B1M, conv_weight, history_BDH=history)
    q, k, v = y_B1M.unflatten(-1, (3, *q.shape[1:])).squeeze(1).unbind(1)
    o_BHK, state = delta_rule_step(q, k, v, beta, log_decay, state)
    return norm_gate(o_BHK, norm_weight, gate, eps=EPS, gate_fn="silu"), state, history


def _fla_recurrent() -> Function:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as op

    def recurrent(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor,
        state: Tensor,
        **_: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o_B1HK, state = op(
            q.unsqueeze(1),
            k.unsqueeze(1),
            v.unsqueeze(1),
            g=log_decay.unsqueeze(1),
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
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        conv_weight: Tensor,
        gate: Tensor,
        norm_weight: Tensor,
        **rest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        convolved = [
            causal_conv1d_update(x.flatten(1).unsqueeze(1), history, weight=weight)[0].view_as(x)
            for x, history, weight in zip((q, k, v), cache, conv_weight.chunk(3), strict=True)
        ]
        o_BHK, state = recurrent(*convolved, **rest)
        y_BHK = rms_norm_gated(o_BHK, gate, norm_weight, None, activation="silu", eps=EPS)
        return y_BHK, state, cache

    return layer
