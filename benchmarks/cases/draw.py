"""Random inputs as the cases need them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


class Draw:
    """Draws tensors on a device from a seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Gaussian values."""
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)
        return x if scale == 1.0 else x.mul_(scale)

    def open_unit(self, *shape: int) -> Tensor:
        """Between 0 and 1, as a sigmoid gives them, fp32."""
        return self.normal(*shape, dtype=torch.float32).sigmoid_()

    def log_decay(self, *shape: int) -> Tensor:
        """Half-lives from a few to a few hundred tokens, fp32."""
        return -F.softplus(self.normal(*shape, dtype=torch.float32) - 4.0)


def row_start(tokens: int) -> Callable[[str, Tensor], Tensor]:
    """The first tokens of the last row of every tensor [B, T, ...]; parameters whole.

    Parameters are named ``weight`` or have one axis. A causal op's results there depend on nothing
    else.
    """

    def sample(name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "weight" or tensor.dim() == 1 else tensor[-1:, :tokens]

    return sample
