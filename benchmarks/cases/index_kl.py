"""What teaches an indexer, loss and gradients, against plain PyTorch.

The attention of SmolLM2-135M, an indexer as ``dsa`` makes it: over all keys, as mixers are aligned,
and over those that the indexer chose, as they are trained from then on. Its random queries choose
scattered keys, so that hardly a tile of keys can be left out. B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks.case import Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.kernels import dispatch
from ltconvert.kernels.index_kl import index_kl
from ltconvert.kernels.index_topk import index_topk

# B, T, keys chosen (None: all)
SHAPES = {
    "full": ((8, 2048, None), (4, 4096, 256)),
    "quick": ((8, 2048, None),),
    "tiny": ((2, 64, 16),),
}
HEADS, GROUPS, INDEX_HEADS, WIDTH = 9, 3, 4, 64


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """All keys and chosen ones."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(rows: int, length: int, chosen: int | None, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        inputs = {
            "index_q": draw.normal(rows, length, INDEX_HEADS, WIDTH),
            "index_k": draw.normal(rows, length, WIDTH),
            "weight": draw.normal(rows, length, INDEX_HEADS, scale=(INDEX_HEADS * WIDTH) ** -0.5),
        }
        bits = {} if chosen is None else {"bits": index_topk(*inputs.values(), chosen)}
        attention = {
            "q": draw.normal(rows, HEADS, length, WIDTH),
            "k": draw.normal(rows, GROUPS, length, WIDTH),
        }
        return inputs | attention | bits

    return Case(
        op="index_kl",
        shape=f"{rows}x{HEADS}/{GROUPS}x{length}x{WIDTH}, {chosen or 'all'} keys",
        make=make,
        ours=ours,
        grads=("index_q", "index_k", "weight"),
        phases=("fwd+bwd",),
        peers={"torch": Peer(_plain)},
        sample=_last_row,
        sample_first=True,
        peer_memory=True,
    )


def ours(
    index_q: Tensor,
    index_k: Tensor,
    weight: Tensor,
    q: Tensor,
    k: Tensor,
    bits: Tensor | None = None,
) -> Tensor:
    """The mean divergence."""
    return index_kl(index_q, index_k, weight, q, k, scale=q.shape[-1] ** -0.5, bits_BJTW=bits)


def _plain() -> Function:
    """The same loss and gradients by formula, chunk by chunk of queries."""

    def plain(**inputs: Tensor) -> Tensor:
        with dispatch.use("reference"):
            return ours(**inputs)

    return plain


def _last_row(name: str, tensor: Tensor) -> Tensor:
    return tensor[-1:]
