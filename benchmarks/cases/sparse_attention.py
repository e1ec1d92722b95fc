"""Attention over chosen keys, against PyTorch's full causal attention of the same length.

How fast choosing makes it depends on how alike neighbouring queries choose: a tile of 64 queries
visits every tile of 64 keys in which one of them chose anything. So there is a row where they agree
(runs of 64 keys), one where they do not (the same number, scattered), and one with an indexer. B
rows, H query heads, G key/value heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.benchmarks.case import TRAINING, Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.index_topk import index_topk
from ltconvert.kernels.sparse_attention import sparse_attention
from ltconvert.kernels.sparse_attention.bits import WORD_BITS, pack, words_for

# H, G, T, D
SHAPES = {
    "full": ((16, 16, 65_536, 128), (16, 4, 65_536, 128)),
    "quick": ((16, 16, 16_384, 128),),
    "tiny": ((4, 2, 64, 16),),
}
PEER = "torch sdpa, full"
TILE, SHARE = 64, 32  # one key in 32 is chosen: 2048 of 65,536
SAMPLE_TOKENS = 4096
INDEX_HEADS = 4


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Window, runs, scattered tokens, blocks and an indexer, at every shape."""
    kinds = ("window", "runs", "scattered", "blocks", "indexer")
    return [_case(kind, *shape, device) for shape in SHAPES[scale] for kind in kinds]


def _case(
    kind: str, heads: int, groups: int, length: int, width: int, device: torch.device
) -> Case:
    chosen = max(1, length // SHARE)

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        inputs = {
            "q": draw.normal(1, heads, length, width),
            "k": draw.normal(1, groups, length, width),
            "v": draw.normal(1, groups, length, width),
        }
        if kind == "window":
            first_T = torch.arange(1 - chosen, length + 1 - chosen, device=device).clamp(min=0)
            return inputs | {"first": first_T[None]}
        if kind == "indexer":
            return inputs | {
                "index_q": draw.normal(1, length, INDEX_HEADS, width),
                "index_k": draw.normal(1, length, width),
                "weight": draw.normal(1, length, INDEX_HEADS),
            }
        return inputs | _choice(kind, draw, groups, length)

    return Case(
        op="sparse_attention",
        shape=f"1x{heads}/{groups}x{length}x{width}, {kind} {chosen}",
        make=make,
        ours=partial(with_indexer, count=chosen) if kind == "indexer" else attend,
        grads=() if kind == "indexer" else ("q", "k", "v"),
        phases=TRAINING[:1] if kind == "indexer" else TRAINING,
        peers={PEER: Peer(_full, same_result=False)},
        sample=_start(min(SAMPLE_TOKENS, length)),
        targets={} if kind == "scattered" else {"fwd": Target(PEER, ratio=0.2)},
    )


def _choice(kind: str, draw: Draw, groups: int, length: int) -> Inputs:
    """Bits of one key in SHARE, which a tile of queries agrees on or not; or of blocks of TILE."""
    device, generator = draw.device, draw.generator
    tiles = -(-length // TILE)

    def some(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device) < 1 / SHARE

    if kind == "scattered":  # each bit is set in all of five random words with a chance of 1 in 32
        size = (5, 1, 1, length, words_for(length))
        words = torch.randint(-(2**31), 2**31, size, generator=generator, device=device)
        words = words.to(torch.int32)
        return {"bits": words[0] & words[1] & words[2] & words[3] & words[4]}
    if kind == "runs":
        own = torch.eye(tiles, dtype=torch.bool, device=device)
        shown = (some(tiles, tiles) | own).repeat_interleave(TILE, 0)[:length]
        words = -shown.int().repeat_interleave(TILE // WORD_BITS, 1)[:, : words_for(length)]
        return {"bits": words[None, None].contiguous()}
    own = torch.eye(tiles, dtype=torch.bool, device=device)
    words = pack(some(1, groups, tiles, tiles) | own)
    block_T = torch.arange(length, device=device, dtype=torch.int32) // TILE
    bits = words.repeat_interleave(TILE, 2)[:, :, :length].contiguous()
    return {"bits": bits, "block": block_T[None]}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None = None,
    bits: Tensor | None = None,
    block: Tensor | None = None,
) -> Tensor:
    """Output [B, H, T, D]."""
    chosen = {"first_BT": first, "bits_BJTW": bits, "block_BS": block}
    return sparse_attention(q, k, v, scale=q.shape[-1] ** -0.5, **chosen)[0]


def with_indexer(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, weight: Tensor, *, count: int
) -> Tensor:
    """The choice and attention over it."""
    return attend(q, k, v, bits=index_topk(index_q, index_k, weight, count))


def _start(tokens: int) -> Callable[[str, Tensor], Tensor]:
    """The first tokens of everything."""

    def sample(name: str, x: Tensor) -> Tensor:
        if name == "bits":
            return x[:, :, :tokens, : words_for(tokens)].contiguous()
        return x[:, :tokens] if name in TOKENS_SECOND else x[:, :, :tokens]

    return sample


TOKENS_SECOND = ("first", "block", "index_q", "index_k", "weight")


def _full() -> Function:
    def sdpa(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return sdpa
