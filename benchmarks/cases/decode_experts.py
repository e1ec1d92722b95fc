"""Experts of one token, against a copy of the weights that it chose.

Steps take turns over banks of which more is read in sum than a GPU's second-level cache holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.convert.students.dreamer import grouped
from ltconvert.kernels.decode_experts import decode_experts
from ltconvert.kernels.permute import permute, unpermute

# Choices, experts, channels, outputs, whether what they give is added up: Dreamers of width 576
# (SmolLM2-135M) and 2048 (Ouro-1.4B), q, k and v, then gate and up, then down.
LAYERS = (
    (2, 24, 576, 960, True),
    (6, 24, 576, 768, False),
    (6, 24, 384, 576, True),
    (2, 24, 2048, 6144, True),
    (6, 24, 2048, 2816, False),
    (6, 24, 1408, 2048, True),
)
TINY_LAYERS = ((2, 4, 16, 24, True), (2, 4, 16, 24, False))
BATCHES = {"full": (1, 8), "quick": (1,), "tiny": (1, 2)}
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Every layer at every batch size."""
    layers = TINY_LAYERS if scale == "tiny" else LAYERS
    return [_case(batch, *layer, device) for batch in BATCHES[scale] for layer in layers]


def _case(
    tokens: int,
    choices: int,
    experts: int,
    channels: int,
    outputs: int,
    summed: bool,
    device: torch.device,
) -> Case:
    # Tokens choose different experts as far as there are any.
    read = 2 * min(tokens * choices, experts) * outputs * channels

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        order = torch.randperm(experts, generator=draw.generator, device=device)
        chosen = order.repeat(tokens * choices // experts + 1)[: tokens * choices]
        found = {
            "x": draw.normal(tokens, channels),
            "weight_ERC": draw.normal(experts, outputs, channels, scale=channels**-0.5),
            "chosen_NK": chosen.view(tokens, choices),
        }
        return found | ({"weights_NK": draw.open_unit(tokens, choices)} if summed else {})

    return Case(
        op="decode_experts",
        shape=f"{tokens}x{choices} of {experts}, {channels} to {outputs}{', sum' * summed}",
        make=make,
        ours=_ours,
        phases=STEP if device.type == "cuda" else STEP[:1],
        peers={"grouped products": Peer(lambda: _grouped)},
        sets=max(2, min(32, TURN_BYTES // read)),
        floor=lambda inputs: {"graph": timing.copy_ms(read, device)},
        floor_name="copy of the chosen weights",
    )


def _ours(
    x: Tensor, weight_ERC: Tensor, chosen_NK: Tensor, weights_NK: Tensor | None = None
) -> Tensor:
    return decode_experts(x, weight_ERC, None, chosen_NK, weights_NK)


def _grouped(
    x: Tensor, weight_ERC: Tensor, chosen_NK: Tensor, weights_NK: Tensor | None = None
) -> Tensor:
    """As a forward pass does it."""
    grouping = grouped.group(chosen_NK, len(weight_ERC))
    y_MO = grouped.grouped_linear(permute(x, grouping.place_NK), weight_ERC, grouping)
    if weights_NK is None:
        return y_MO[grouping.place_NK]
    return unpermute(y_MO, grouping.place_NK, weights_NK)
