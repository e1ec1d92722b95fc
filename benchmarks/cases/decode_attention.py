"""Attention of one token over a half-full cache, against a copy of the keys and values it reads.

As a layer calls it: from the token's projections, positions and the token's place in the cache in
the same op. The place holds what is written there and positions turn nothing, so that the result is
also that of plain attention over the cache.

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
from ltconvert.kernels.decode_attention import decode_self_attention

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
        q = draw.normal(batch, heads, width)
        k, v = (draw.normal(batch, groups, 2 * keys, width) for _ in range(2))
        turn = torch.zeros(batch, width, device=device)
        return {
            "qkv": torch.cat([q, k[:, :, keys - 1], v[:, :, keys - 1]], dim=1).flatten(1),
            "k": k,
            "v": v,
            "slots": torch.full((batch,), keys - 1, dtype=torch.int32, device=device),
            "lengths": torch.full((batch,), keys, dtype=torch.int32, device=device),
            "cos": turn + 1.0,
            "sin": turn,
            "arrivals": torch.zeros(batch, heads, dtype=torch.int32, device=device),
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


def attend(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    arrivals: Tensor,
) -> Tensor:
    """Output [B, H, D]; key and value stay what they are."""
    return decode_self_attention(
        qkv, k, v, slots, lengths, num_heads=arrivals.shape[1], scale=k.shape[-1] ** -0.5,
        cos_BD=cos, sin_BD=sin, arrivals_BH=arrivals,
    )  # fmt: skip


def _sdpa(keys: int) -> Function:
    def sdpa(qkv: Tensor, k: Tensor, v: Tensor, arrivals: Tensor, **_: Tensor) -> Tensor:
        heads, width = arrivals.shape[1], k.shape[-1]
        q_BH1D = qkv[:, : heads * width].unflatten(1, (heads, 1, width))
        k, v = k[:, :, :keys], v[:, :, :keys]
        grouped = heads != k.shape[1]
        return F.scaled_dot_product_attention(q_BH1D, k, v, enable_gqa=grouped).squeeze(2)

    return sdpa
