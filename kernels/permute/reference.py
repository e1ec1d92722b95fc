"""``permute`` and ``unpermute`` in plain PyTorch.

A row of zeros behind the last one stands for what has no row: place -1 is that of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def permute(x_NC: Tensor, place_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.permute``."""
    rows = place_NK.numel()
    source = place_NK.new_full((rows + 1,), -1)
    source[_places(place_NK)] = torch.arange(rows, device=place_NK.device).floor_divide_(
        place_NK.shape[1]
    )
    return _with_nothing(x_NC)[source[:rows]]


def unpermute(y_MC: Tensor, place_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """See ``ltconvert.kernels.permute.unpermute``."""
    work = torch.promote_types(y_MC.dtype, torch.float32)
    with torch.autocast(y_MC.device.type, enabled=False):
        rows_NKC = _with_nothing(y_MC)[_places(place_NK)].unflatten(0, place_NK.shape).to(work)
        return (weight_NK.to(work)[:, None] @ rows_NKC)[:, 0].to(y_MC.dtype)


def _places(place_NK: Tensor) -> Tensor:
    return place_NK.flatten().clamp(min=-1)


def _with_nothing(x_NC: Tensor) -> Tensor:
    return F.pad(x_NC, (0, 0, 0, 1))
