"""Mixture-of-depths attention against PyTorch's attention to the sequence alone.

Nobody else merges depth keys in one call; peers are what the sequence's part costs by itself, and
what the depth part does. Ours over ``cudnn alone`` is the price of the depth keys; ``flash alone``
is FlashAttention 2, by which the paper measures (arXiv 2603.15619, table 2).

B rows, T tokens, H query heads, G key/value heads, D head width, N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ltconvert.benchmarks.case import TRAINING, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.depth_attention import depth_attention, depth_only_attention

# B, T, H, G, D, N
SHAPES = {
    "full": (
        (1, 4096, 64, 8, 64, 64),
        (1, 16_384, 64, 8, 64, 64),
        (1, 65_536, 64, 8, 64, 64),
        (1, 16_384, 32, 8, 128, 128),
        (1, 65_536, 16, 4, 128, 64),
        (1, 65_536, 16, 16, 128, 32),
    ),
    "quick": ((1, 4096, 64, 8, 64, 64),),
    "tiny": ((1, 20, 4, 2, 16, 3),),
}
FLASH, CUDNN, DEPTH = "flash alone", "cudnn alone", "depth alone"
SAMPLE_TOKENS = 1024
# The paper's, of FlashAttention 2 at 64K tokens; and half of its overhead at 4,096.
SPEED_OF_FLASH, OVERHEAD = 0.973, 0.175


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Outputs and their gradients, at every shape."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(
    batch: int, length: int, heads: int, groups: int, width: int, slots: int, device: torch.device
) -> Case:
    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        keys = (batch, length, groups, width)
        return {
            "q": draw.normal(batch, length, heads, width),
            "k": draw.normal(*keys),
            "v": draw.normal(*keys),
            "depth_k": draw.normal(slots, *keys).permute(1, 2, 0, 3, 4),
            "depth_v": draw.normal(slots, *keys).permute(1, 2, 0, 3, 4),
        }

    long = Target(FLASH, ratio=round(1 / SPEED_OF_FLASH, 3))
    return Case(
        op="depth_attention",
        shape=f"{batch}x{length}x{heads}/{groups}x{width}, {slots} slots",
        make=make,
        ours=attend,
        grads=("q", "k", "v", "depth_k", "depth_v"),
        phases=TRAINING,
        peers={
            FLASH: Peer(partial(_alone, SDPBackend.FLASH_ATTENTION), same_result=False),
            CUDNN: Peer(partial(_alone, SDPBackend.CUDNN_ATTENTION), same_result=False),
            DEPTH: Peer(_depth_alone, same_result=False),
        },
        sample=_start,
        targets={"fwd+bwd": Target(CUDNN, ratio=1 + OVERHEAD) if length == 4096 else long},
    )


def attend(q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor) -> Tensor:
    """Output [B, T, H, D] of the published joint softmax."""
    slots, scale = depth_k.shape[2], q.shape[-1] ** -0.5
    return depth_attention(q, k, v, depth_k, depth_v, slots=slots, scale=scale)[0]


def _start(name: str, x: Tensor) -> Tensor:
    return x[-1:, :SAMPLE_TOKENS]


def _alone(backend: SDPBackend) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    return call


def _depth_alone() -> Callable[..., Tensor]:
    def call(q: Tensor, depth_k: Tensor, depth_v: Tensor, **_: Tensor) -> Tensor:
        slots, scale = depth_k.shape[2], q.shape[-1] ** -0.5
        return depth_only_attention(q, depth_k, depth_v, slots=slots, scale=scale)[0]

    return call
