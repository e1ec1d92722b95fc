"""Rows of a mixture of experts weighed and added up, against a copy of what has to move."""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks.case import Case, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels import dispatch
from ltconvert.kernels.permute import unpermute

SHAPES = {  # tokens, choices, channels
    "full": [(65536, 6, 576), (32768, 8, 2048)],
    "quick": [(16384, 6, 576)],
    "tiny": [(16, 2, 8)],
}


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """``unpermute``, whose backward does what ``permute`` does and more."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(tokens: int, choices: int, channels: int, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        rows = tokens * choices
        generator = torch.Generator(device).manual_seed(seed)
        place = torch.randperm(rows, generator=generator, device=device)
        return {
            "y_MC": draw.normal(rows, channels),
            "place_NK": place.view(tokens, choices),
            "weight_NK": draw.normal(tokens, choices).float(),
        }

    return Case(
        op="permute",
        shape=f"{tokens}x{choices}x{channels}",
        make=make,
        ours=unpermute,
        grads=("y_MC", "weight_NK"),
        peers={"plain PyTorch": Peer(lambda: _plain)},
        targets={"fwd": Target(floor_share=0.7), "bwd": Target(floor_share=0.7)},
    )


def _plain(**inputs: Tensor) -> Tensor:
    with dispatch.use("reference"):
        return unpermute(**inputs)
