"""Random problems of sparse attention, and what a query sees, key by key; shared by its tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from decode_case import DEVICE
from torch import Tensor

from ltconvert.kernels.sparse_attention.bits import pack


class Shape(NamedTuple):
    """Rows, query heads, key/value heads, choices, queries, keys, width."""

    batch: int
    heads: int
    groups: int
    choices: int
    length: int
    keys: int
    width: int


KINDS = ("all", "window", "documents", "chosen", "both", "blocks", "padded")


def problem(
    kind: str, shape: Shape, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """Tensors that have gradients, the others, and the mask [B, J or 1, T, S] by definition."""
    g = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(device, dtype)

    batch, heads, groups, choices, length, keys, width = shape
    leaves = {
        "q_BHTD": normal(batch, heads, length, width),
        "k_BGSD": normal(batch, groups, keys, width),
        "v_BGSD": normal(batch, groups, keys, width),
    }
    columns = torch.arange(keys - length, keys)[:, None]
    at = torch.arange(keys)
    past = (at <= columns).expand(batch, 1, length, keys)
    others: dict[str, Any] = {}
    mask = past
    if kind in ("window", "both", "padded"):
        first = (columns.T - 4).clamp(min=0)
        others["first_BT"] = first
        mask = past & (at >= first.mT)
    if kind == "documents":
        starts = torch.stack([(torch.rand(length, generator=g) < 0.3) * columns[:, 0]
                              for _ in range(batch)]).cummax(-1).values  # fmt: skip
        others["first_BT"] = starts.int()
        mask = past & (at >= starts[:, None, :, None])
    if kind in ("chosen", "both", "padded"):
        chosen = torch.rand(batch, choices, length, keys, generator=g) < 0.2
        others["bits_BJTW"] = pack(chosen)
        mask = past & (chosen | mask if kind != "chosen" else chosen)
    if kind == "blocks":  # of 1 to 5 keys, and keys of no block between them
        sizes = torch.randint(1, 6, (batch, keys), generator=g)
        block = torch.stack([torch.arange(keys).repeat_interleave(n)[:keys] for n in sizes])
        chosen = torch.rand(batch, choices, length, keys, generator=g) < 0.4
        others["bits_BJTW"] = pack(chosen)
        lonely = torch.rand(batch, keys, generator=g) < 0.2
        others["block_BS"] = block.masked_fill(lonely, -1).int()
        by_key = chosen.gather(3, block[:, None, None].expand_as(chosen))
        mask = past & by_key & ~lonely[:, None, None]
    if kind == "padded":
        keep = torch.rand(batch, keys, generator=g) < 0.6
        others["keep_BS"] = keep
        mask = mask & (keep[:, None, None] | (at == columns))
    return leaves, {name: x.to(device) for name, x in others.items()}, mask.to(device)


def dense(
    leaves: dict[str, Tensor], mask: Tensor, *, scale: float, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over a mask in plain PyTorch, in the dtype of the tensors."""
    q, k, v = leaves.values()
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    mask = mask.repeat_interleave(heads // mask.shape[1], 1)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).masked_fill(~mask, 0.0)  # where a query sees nothing: NaN
    return weights @ v, scores.logsumexp(-1)
