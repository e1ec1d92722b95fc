"""Stored tensors into a state dict, each exactly once, and the digest that names them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from ltconvert.errors import UserError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SAMPLES = 64


def collect(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    device: str | torch.device,
) -> dict[str, Tensor]:
    """The tensors by canonical name, each exactly once and of the expected shape.

    Raises:
        UserError: a tensor that the config has no place for, that comes twice, or whose shape or
            dtype does not fit.
    """
    state: dict[str, Tensor] = {}
    for name, value in tensors:
        if name not in shapes:
            raise UserError(f"the checkpoint has a tensor {name}, its config has no place for it")
        if name in state:
            raise UserError(f"the checkpoint has the tensor {name} twice")
        if value.shape != shapes[name]:
            raise UserError(
                f"tensor {name} has shape {tuple(value.shape)}, "
                f"the config says {tuple(shapes[name])}"
            )
        if value.dtype not in _FLOATS:
            raise UserError(
                f"tensor {name} is stored as {value.dtype}: give a checkpoint that is not quantised"
            )
        state[name] = value.to(device=device, dtype=dtype)
    return state


def digest(state: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and a sample of each tensor rounded to bf16."""
    hasher = hashlib.sha256()
    for name, value in sorted(state.items()):
        hasher.update(f"{name} {tuple(value.shape)};".encode())
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        sample = flat[::step][:_SAMPLES].to("cpu", torch.bfloat16).contiguous()
        hasher.update(sample.view(torch.int16).numpy().tobytes())
    return hasher.hexdigest()
