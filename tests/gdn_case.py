"""One token of a Gated DeltaNet by its definition, and random inputs of ``gdn_step``."""

from __future__ import annotations

from typing import Any

import torch
from decode_case import DEVICE
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> dict[str, Any]:
    """Everything but the options; decays from half-lives of a token to a million."""
    batch, heads, key, value, taps = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(size, generator=generator)).to(device, to)

    channels = heads * (2 * key + value)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    found = {
        "qkv_BC": normal(batch, channels),
        "beta_BH": normal(batch, heads),
        "decay_BH": normal(batch, heads, scale=5.0),
        "log_rate_H": normal(heads, to=state),
        "rate_bias_H": normal(heads, scale=5.0, to=state),
        "state_BHKV": normal(batch, heads, key, value, to=state),
        "norm_weight_HV": normal(heads, value, to=state),
        "gate_BHV": normal(batch, heads, value),
    }
    if taps:
        found["conv_weight_CW"] = normal(channels, taps)
        found["conv_history_BCP"] = normal(batch, channels, taps - 1)
    return found


def definition(
    given: dict[str, Any], work: torch.dtype, *, gate_fn: str, activation: str | None,
    beta_factor: float,
) -> dict[str, Tensor]:  # fmt: skip
    """One row and head at a time, in ``work``; returns what changes in place, too."""
    i = {name: value.to(work) for name, value in given.items()}
    batch, heads, key, value = i["state_BHKV"].shape
    x, history = i["qkv_BC"], i.get("conv_history_BCP")
    if history is not None:
        window = torch.cat([history, x[..., None]], -1)
        x, history = (window * i["conv_weight_CW"]).sum(-1), window[..., 1:]
        x = F.silu(x) if activation else x
    y, state = torch.empty_like(i["gate_BHV"]), torch.empty_like(i["state_BHKV"])
    for b in range(batch):
        for h in range(heads):
            q = x[b, h * key : (h + 1) * key]
            k = x[b, (heads + h) * key : (heads + h + 1) * key]
            v = x[b, 2 * heads * key + h * value : 2 * heads * key + (h + 1) * value]
            q, k = (z / (z.square().sum() + 1e-6).sqrt() for z in (q, k))
            beta = beta_factor * torch.sigmoid(i["beta_BH"][b, h])
            rate = F.softplus(i["decay_BH"][b, h] + i["rate_bias_H"][h])
            old = i["state_BHKV"][b, h] * torch.exp(-torch.exp(i["log_rate_H"][h]) * rate)
            new = old + beta * torch.outer(k, v - old.T @ k)
            out = new.T @ q * key**-0.5
            gate = i["gate_BHV"][b, h]
            opened = {"2sigmoid": 2 * gate.sigmoid(), "sigmoid": gate.sigmoid()}.get(
                gate_fn, F.silu(gate)
            )
            normed = out / (out.square().mean() + EPS).sqrt() * i["norm_weight_HV"][h]
            y[b, h], state[b, h] = normed * opened, new
    return {"y": y, "state": state} | ({} if history is None else {"history": history})
