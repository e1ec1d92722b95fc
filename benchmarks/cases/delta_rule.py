"""Gated delta rule over sequences, against flash-linear-attention's chunked kernels.

B batch, T tokens, H heads, K key and value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.benchmarks.case import TRAINING, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw, row_start
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.delta_rule import delta_rule

SHAPES = {
    "full": ((16, 4096), (4, 16384), (1, 65536)),
    "quick": ((16, 4096),),
    "tiny": ((2, 128),),
}
MIDDLE = {"full": (4, 16384), "quick": None, "tiny": (2, 128)}
SAMPLE_TOKENS = 1000
DECAYS = {"head": "decay a head", "channel": "decay a channel", "none": "no decay"}
FLA_NAMES = {"log_decay": "g"}


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """One decay a head at all shapes, a decay a channel and none at one."""
    found = [_case("head", shape, scale, device) for shape in SHAPES[scale]]
    middle = MIDDLE[scale]
    if middle is not None:
        found += [_case(decay, middle, scale, device) for decay in ("channel", "none")]
    return found


def _case(decay: str, shape: tuple[int, int], scale: Scale, device: torch.device) -> Case:
    batch, length = shape
    heads, width = (2, 16) if scale == "tiny" else (16, 128)

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        inputs = {name: draw.normal(batch, length, heads, width) for name in "qkv"}
        inputs["beta"] = draw.open_unit(batch, length, heads)
        if decay != "none":
            channels = (width,) if decay == "channel" else ()
            inputs["log_decay"] = draw.log_decay(batch, length, heads, *channels)
        return inputs

    name, load = PEERS[decay]
    return Case(
        op="delta_rule",
        shape=f"{batch}x{length}x{heads}x{width}, {DECAYS[decay]}",
        make=make,
        ours=ours,
        grads=("q", "k", "v", "beta") + (("log_decay",) if decay != "none" else ()),
        peers={name: Peer(load)},
        sample=row_start(min(SAMPLE_TOKENS, length)),
        targets={phase: Target(name) for phase in TRAINING},
    )


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """The op without its final state, which training does not use."""
    return delta_rule(q, k, v, beta, log_decay)[0]


def fla_names(inputs: dict[str, Any]) -> dict[str, Any]:
    """Ours to flash-linear-attention's argument names."""
    return {FLA_NAMES.get(name, name): value for name, value in inputs.items()}


def _fla_head() -> Function:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    return lambda **inputs: op(**fla_names(inputs), use_qk_l2norm_in_kernel=True)[0]


def _fla_channel() -> Function:
    from fla.ops.kda import chunk_kda as op

    return lambda **inputs: op(**fla_names(inputs), use_qk_l2norm_in_kernel=True)[0]


def _fla_none() -> Function:
    from fla.ops.delta_rule import chunk_delta_rule as op

    return lambda **inputs: op(**inputs, use_qk_l2norm_in_kernel=True)[0]


PEERS = {
    "head": ("fla gated_delta_rule", _fla_head),
    "channel": ("fla kda", _fla_channel),
    "none": ("fla delta_rule", _fla_none),
}
