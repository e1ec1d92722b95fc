"""A decoded token between its projections, by definition and one head at a time; its tests' own.

Keys and values of ``token`` lie in one tensor, so that their strides are not those of their shape.
"""

from __future__ import annotations

from typing import Any

import torch
from decode_case import DEVICE
from torch import Tensor

EPS, OFFSET = 1e-5, 0.5


def token(
    shape: tuple[int, ...], norm: str, rope: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Random projections and what becomes of them, as ``decode_heads`` takes them."""
    batch, heads, groups, slots, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE, to)

    keys, values = normal(batch, groups, 2, slots, width).unbind(2)
    wide = normal(batch, (heads + 2 * groups) * width + 3)
    found = {
        "qkv_BM": wide[:, : (heads + 2 * groups) * width],
        "keys_BGSD": keys,
        "values_BGSD": values,
        "slots_B": torch.randint(0, slots, (batch,), generator=generator).to(DEVICE, torch.int32),
        "num_heads": heads,
        "norm_eps": EPS,
        "norm_offset": OFFSET,
    }
    if norm != "none":
        factor = (1, 1) if norm == "head" else (heads, groups)
        found["q_norm_weight"] = normal(factor[0] * width)
        found["k_norm_weight"] = normal(factor[1] * width)
    if rope:
        angles = normal(batch, width // 2, to=torch.float32).repeat(1, 2)
        found |= {"cos_BD": 1.3 * angles.cos(), "sin_BD": 1.3 * angles.sin()}
    return found


def heads_of(given: dict[str, Any], work: torch.dtype) -> dict[str, Tensor]:
    """Queries, and the cache with key and value in their slots."""
    i = {k: v.to(work) if isinstance(v, Tensor) and k != "slots_B" else v for k, v in given.items()}
    keys, values = i["keys_BGSD"].clone(), i["values_BGSD"].clone()
    batch, groups, _, width = keys.shape
    heads = i["num_heads"]
    q = keys.new_empty(batch, heads, width)
    for b in range(batch):
        row = i["qkv_BM"][b]
        parts = row.split([heads * width, groups * width, groups * width])
        for part, name in zip(parts[:2], ("q", "k"), strict=True):
            weight = i.get(f"{name}_norm_weight")
            for h in range(len(part) // width):
                x = part[h * width : (h + 1) * width]
                if weight is not None and len(weight) == width:
                    x = x / (x.square().mean() + EPS).sqrt() * (weight + OFFSET)
                elif weight is not None:
                    own = weight[h * width : (h + 1) * width] + OFFSET
                    x = x / (part.square().mean() + EPS).sqrt() * own
                if "cos_BD" in i:
                    turned = torch.cat([-x[width // 2 :], x[: width // 2]])
                    x = x * i["cos_BD"][b] + turned * i["sin_BD"][b]
                target = q[b, h] if name == "q" else keys[b, h, i["slots_B"][b]]
                target.copy_(x)
        values[b, :, i["slots_B"][b]] = parts[2].unflatten(0, (groups, width))
    return {"q": q, "keys": keys, "values": values}


def attention_of(
    given: dict[str, Any], work: torch.dtype, *, scale: float, soft_cap: float | None = None
) -> dict[str, Tensor]:
    """Outputs of the heads, each over the first slots of its row."""
    q, k, v = (given[name].to(work) for name in ("q_BHD", "k_BGSD", "v_BGSD"))
    o, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for b, length in enumerate(given["lengths_B"].tolist()):
        for h in range(q.shape[1]):
            scores = k[b, h // group, :length] @ q[b, h] * scale
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            weights = (scores - scores.max()).exp()
            o[b, h] = weights @ v[b, h // group, :length] / weights.sum()
    return {"o": o}
