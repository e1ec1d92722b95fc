"""Linear attention with one decay a head, against flash-linear-attention's chunked kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks.case import TRAINING, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.delta_rule import SAMPLE_TOKENS, SHAPES, fla_names
from ltconvert.benchmarks.cases.draw import Draw, row_start
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.decay_attention import decay_attention

SIMPLE_GLA, RETENTION = "fla simple_gla", "fla retention"


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """A decay that each token sets, then RetNet's constant ones, at every shape."""
    shapes = SHAPES[scale]
    return [_case(fixed, shape, scale, device) for fixed in (False, True) for shape in shapes]


def _case(fixed: bool, shape: tuple[int, int], scale: Scale, device: torch.device) -> Case:
    batch, length = shape
    heads, width = (2, 16) if scale == "tiny" else (16, 128)

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        inputs = {name: draw.normal(batch, length, heads, width) for name in "qkv"}
        if fixed:
            inputs["log_decay"] = retention_log_decay(heads, device)
        else:
            inputs["log_decay"] = draw.log_decay(batch, length, heads)
        return inputs

    name = RETENTION if fixed else SIMPLE_GLA
    return Case(
        op="decay_attention",
        shape=f"{batch}x{length}x{heads}x{width}, {'constant' if fixed else 'free'} decay",
        make=make,
        ours=ours,
        grads=("q", "k", "v") if fixed else ("q", "k", "v", "log_decay"),
        peers={name: Peer(_retention if fixed else _simple_gla)},
        sample=row_start(min(SAMPLE_TOKENS, length)),
        targets={phase: Target(name) for phase in TRAINING},
    )


def retention_log_decay(heads: int, device: torch.device) -> Tensor:
    """RetNet's decays (arXiv 2307.08621), ``1 - 2^(-5 - head)``."""
    return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, device=device, dtype=torch.float32))))


def ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The op without its final state, which training does not use."""
    return decay_attention(q, k, v, log_decay)[0]


def _simple_gla() -> Function:
    from fla.ops.simple_gla import chunk_simple_gla as op

    return lambda **inputs: op(**fla_names(inputs))[0]


def _retention() -> Function:
    from fla.ops.retention import chunk_retention as op

    return lambda q, k, v, log_decay: op(q, k, v)[0]
