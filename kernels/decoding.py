"""What the ops of a decoded token share."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PROCESSORS = 128  # where the device does not say; only how work is divided depends on it


def refuse_gradients(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError where autograd would want a gradient of ``op``, which has none."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(f"{op} has no gradient: call it under torch.no_grad()")


def check_arrivals(arrivals_BH: Tensor | None, batch: int, heads: int) -> None:
    """Raise ValueError where room for a kernel to count in is not int32 [B, H], contiguous."""
    if arrivals_BH is not None and (
        arrivals_BH.shape != (batch, heads)
        or arrivals_BH.dtype != torch.int32
        or not arrivals_BH.is_contiguous()
    ):
        raise ValueError(
            f"arrivals must be int32 [{batch}, {heads}] and contiguous, got {arrivals_BH.dtype} "
            f"{list(arrivals_BH.shape)}"
        )


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a stand-in for other devices."""
    return _of_gpu(device.index) if device.type == "cuda" else PROCESSORS


@cache
def _of_gpu(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
