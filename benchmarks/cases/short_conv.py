"""Short convolution over a whole sequence, against a copy of what it has to move."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ltconvert.benchmarks.case import Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw, row_start
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.short_conv import short_conv

TAPS = 4
PEER = "fla causal_conv1d"
SAMPLE_TOKENS = 1000
SHAPES = {"full": (16, 4096, 6144), "quick": (4, 4096, 6144), "tiny": (2, 64, 32)}


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """As it is and followed by SiLU."""
    return [_case(activation, scale, device) for activation in (None, "silu")]


def _case(activation: str | None, scale: Scale, device: torch.device) -> Case:
    batch, length, channels = SHAPES[scale]

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        weight = draw.normal(channels, TAPS, scale=TAPS**-0.5)
        return {"x": draw.normal(batch, length, channels), "weight": weight}

    share = Target(floor_share=0.7)
    return Case(
        op="short_conv",
        shape=f"{batch}x{length}x{channels}, {TAPS} taps{', silu' if activation else ''}",
        make=make,
        ours=partial(ours, activation=activation),
        grads=("x", "weight"),
        peers={PEER: Peer(partial(_fla, activation))},
        sample=row_start(min(SAMPLE_TOKENS, length)),
        targets={"fwd": share, "bwd": share},
    )


def ours(x: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    """The op without the history that it hands on."""
    return short_conv(x, weight, activation=activation)[0]  # type: ignore[arg-type]


def _fla(activation: str | None) -> Function:
    from fla.modules.causal_conv1d import causal_conv1d as op

    return lambda x, weight: op(x, weight, activation=activation, backend="triton")[0]
