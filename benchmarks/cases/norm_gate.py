"""Gated RMSNorm of all heads of many tokens, against a copy of what it has to move."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ltconvert.benchmarks.case import Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.norm_gate import GateFn, norm_gate

EPS = 1e-5
PEER = "fla rms_norm_gated"
SAMPLE_TOKENS = 1000
SHAPES = {"full": (65536, 16, 128), "quick": (16384, 16, 128), "tiny": (64, 2, 16)}


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """A weight a channel as the peer has it, then the student's: a weight a head and channel."""
    return [
        _case("silu", False, scale, device),
        _case("2sigmoid", True, scale, device),
    ]


def _case(gate_fn: GateFn, per_head: bool, scale: Scale, device: torch.device) -> Case:
    tokens, heads, width = SHAPES[scale]

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        shape = (heads, width) if per_head else (width,)
        return {
            "x": draw.normal(tokens, heads, width),
            "weight": 1.0 + draw.normal(*shape, scale=0.1),
            "gate": draw.normal(tokens, heads, width),
        }

    share = Target(floor_share=0.7)
    return Case(
        op="norm_gate",
        shape=f"{tokens}x{heads}x{width}, {gate_fn}, weight {heads if per_head else 1}x{width}",
        make=make,
        ours=partial(norm_gate, eps=EPS, gate_fn=gate_fn),
        grads=("x", "weight", "gate"),
        peers={} if per_head else {PEER: Peer(partial(_fla, gate_fn))},
        sample=_last_tokens,
        targets={"fwd": share, "bwd": share},
    )


def _last_tokens(name: str, tensor: Tensor) -> Tensor:
    return tensor if name == "weight" else tensor[-SAMPLE_TOKENS:]


def _fla(gate_fn: GateFn) -> Function:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as op

    return lambda x, weight, gate: op(x, gate, weight, None, activation=gate_fn, eps=EPS)
