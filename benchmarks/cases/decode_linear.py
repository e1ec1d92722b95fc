"""Linear layers of one token with what stands around them, against a copy of the weight.

Steps take turns over weights that are larger than a GPU's second-level cache in sum, as those of a
model are. B batch, C channels, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.decode_linear import decode_linear

# Outputs, channels, and what is fused; the layers of a decoder of width 2048.
LAYERS = (
    (6144, 2048, "norm"),
    (2048, 2048, "residual"),
    (5632, 2048, "norm, swiglu"),
    (2048, 5632, "residual"),
)
TINY_LAYERS = ((24, 16, "norm"), (16, 16, "residual"), (40, 16, "norm, swiglu"))
BATCHES = {"full": (1, 8), "quick": (1,), "tiny": (1, 2)}
SHARES = {1: 0.85, 8: 0.8}  # of the floor, to be reached
EPS = 1e-6
PEER = "torch, layer by layer"
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Every layer at every batch size."""
    layers = TINY_LAYERS if scale == "tiny" else LAYERS
    return [_case(batch, *layer, device) for batch in BATCHES[scale] for layer in layers]


def _case(batch: int, outputs: int, channels: int, fused: str, device: torch.device) -> Case:
    swiglu = "swiglu" in fused
    rows = 2 * outputs if swiglu else outputs
    weight_bytes = 2 * rows * channels

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        found = {
            "x": draw.normal(batch, channels),
            "weight": draw.normal(rows, channels, scale=channels**-0.5),
        }
        if "norm" in fused:
            found["norm_weight"] = 1.0 + draw.normal(channels, scale=0.1)
        if "residual" in fused:
            found["residual"] = draw.normal(batch, outputs)
        return found

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(weight_bytes, device)}

    phases = STEP if device.type == "cuda" else STEP[:1]
    share = Target(floor_share=SHARES.get(batch))
    return Case(
        op="decode_linear",
        shape=f"{batch}x{channels} to {outputs}, {fused}",
        make=make,
        ours=partial(project, swiglu=swiglu),
        phases=phases,
        peers={PEER: Peer(partial(_torch, swiglu))},
        sets=max(2, min(64, TURN_BYTES // weight_bytes)),
        floor=floor,
        floor_name="copy of weight",
        targets={"graph": share} if "graph" in phases else {},
    )


def project(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    swiglu: bool,
) -> Tensor:
    """Output [B, O]."""
    return decode_linear(
        x, weight, norm_weight_C=norm_weight, norm_eps=EPS, residual_BO=residual, swiglu=swiglu
    )


def _torch(swiglu: bool) -> Function:
    def layers(
        x: Tensor,
        weight: Tensor,
        norm_weight: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if norm_weight is not None:
            x = F.rms_norm(x, norm_weight.shape, norm_weight, EPS)
        y = F.linear(x, weight)
        if swiglu:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return y if residual is None else residual + y

    return layers
