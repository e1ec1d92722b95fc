"""``permute`` and ``unpermute`` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def permute(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.permute``."""
    source_M = torch.empty_like(place_NK.flatten())
    source_M[place_NK.flatten()] = torch.arange(
        place_NK.numel(), device=place_NK.device
    ).floor_divide_(place_NK.shape[1])
    return x_NC[source_M]


def unpermute(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.unpermute``."""
    work = torch.promote_types(y_MC.dtype, torch.float32)
    with torch.autocast(y_MC.device.type, enabled=False):
        rows_NKC = y_MC[place_NK.flatten()].unflatten(0, place_NK.shape).to(work)
        return (weight_NK.to(work)[:, None] @ rows_NKC)[:, 0].to(y_MC.dtype)
