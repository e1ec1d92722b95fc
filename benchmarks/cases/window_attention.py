"""Attention over a window, against PyTorch's flex attention compiled for the same window.

B rows, T tokens, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ltconvert.benchmarks.case import TRAINING, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.window_attention import window_attention

# B, T, H, G, D, window
SHAPES = {
    "full": (
        (16, 4096, 9, 9, 64, 128),
        (4, 16_384, 16, 16, 128, 128),
        (4, 16_384, 16, 4, 128, 512),
    ),
    "quick": ((16, 4096, 9, 9, 64, 128),),
    "tiny": ((1, 70, 2, 1, 16, 20),),
}
PEER = "torch flex"
SAMPLE_TOKENS = 1024


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Outputs and their gradients, at every shape."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(
    batch: int, length: int, heads: int, groups: int, width: int, window: int, device: torch.device
) -> Case:
    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        keys = (batch, length, groups, width)
        return {
            "q": draw.normal(batch, length, heads, width),
            "k": draw.normal(*keys),
            "v": draw.normal(*keys),
        }

    def sample(name: str, x: Tensor) -> Tensor:
        return x[-1:, :SAMPLE_TOKENS]

    return Case(
        op="window_attention",
        shape=f"{batch}x{length}x{heads}/{groups}x{width}, window {window}",
        make=make,
        ours=partial(attend, window=window),
        grads=("q", "k", "v"),
        phases=TRAINING,
        peers={PEER: Peer(partial(_flex, length, window))},
        sample=sample,
        targets={phase: Target(PEER, ratio=1.0) for phase in ("fwd", "bwd")},
    )


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Output [B, T, H, D]."""
    return window_attention(q, k, v, window=window, scale=q.shape[-1] ** -0.5)[0]


def _flex(length: int, window: int) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    compiled = torch.compile(flex_attention, dynamic=False)
    masks = {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not masks:
            masks[0] = create_block_mask(sees, None, None, length, length, q.device)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads, block_mask=masks[0], enable_gqa=True).transpose(1, 2)

    return call
