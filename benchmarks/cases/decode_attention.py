"""Attention of one token over a half-full cache, against a copy of the keys and values it reads.

Steps take turns over caches that are larger than a GPU's second-level cache in sum, as the layers
of a model are. B batch, H query heads, G key/value heads, S slots, D head width.
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
from ltconvert.kernels.decode_attention import decode_attention

# B, H, G, keys, D; the cache has twice as many slots.
SHAPES = {
    "full": (
        (1, 16, 16, 1024, 128), (1, 16, 16, 8192, 128), (8, 16, 16, 4096, 128),
        (1, 32, 8, 8192, 128), (8, 32, 8, 4096, 128), (8, 8, 4, 4096, 256),
    ),
    "quick": ((1, 16, 16, 4096, 128),),
    "tiny": ((2, 4, 2, 40, 16),),
}  # fmt: skip
PEER = "torch sdpa"
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Caches without and with groups of query heads."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(batch: int, heads: int, groups: int, keys: int, width: int, device: torch.device) -> Case:
    read_bytes = 2 * 2 * batch * groups * keys * width  # keys and values in bf16

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        return {
            "q": draw.normal(batch, heads, width),
            "k": draw.normal(batch, groups, 2 * keys, width),
            "v": draw.normal(batch, groups, 2 * keys, width),
            "lengths": torch.full((batch,), keys, device=device),
        }

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(read_bytes, device)}

    phases = STEP if device.type == "cuda" else STEP[:1]
    return Case(
        op="decode_attention",
        shape=f"{batch}x{heads}/{groups}x{keys}x{width}",
        make=make,
        ours=attend,
        phases=phases,
        peers={PEER: Peer(partial(_sdpa, keys))},
        sample=lambda name, x: x[-1:],  # the last row
        sets=max(2, min(64, TURN_BYTES // read_bytes)),
        floor=floor,
        floor_name="copy of keys and values",
        targets={"graph": Target(floor_share=0.8)} if "graph" in phases else {},
    )


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Output [B, H, D]."""
    return decode_attention(q, k, v, lengths, scale=q.shape[-1] ** -0.5)


def _sdpa(keys: int) -> Function:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        k, v = k[:, :, :keys], v[:, :, :keys]
        grouped = q.shape[1] != k.shape[1]
        o_BH1D = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=grouped)
        return o_BH1D.squeeze(2)

    return sdpa
