"""Tensors of all experts of a pool, stacked, and what one pass through the model makes of them.

E experts, I input and O output channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Bank(nn.Module):
    """Linear layers of one shape: weight [E, O, I], bias [E, O] or none."""

    def __init__(self, experts: int, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As a linear layer of a model made from scratch."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Gains(nn.Module):
    """Gains of one RMSNorm for each expert: weight [E, O], ``weight + offset`` multiplies."""

    def __init__(self, experts: int, size: int, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.full((experts, size), 1.0 - offset))

    def reset_parameters(self) -> None:
        """Start as a plain normalisation."""
        nn.init.constant_(self.weight, 1.0 - self.offset)


class Stack(NamedTuple):
    """A bank's tensor in one pass.

    Attributes:
        whole: [E, ...], in the dtype of matrix products where it is a matrix.
        own: for each layer of the teacher its experts' [...]; with more than one, [experts, ...].
    """

    whole: Tensor
    own: tuple[Tensor, ...]


Stacks = dict[nn.Parameter, Stack]


def stacks_of(modules: Iterable[nn.Module], slices: int) -> Stacks:
    """Stacks of all banks and gains, once a pass.

    Taken apart once: each slice ``weight[e]`` would hand a gradient as large as the bank back.

    Args:
        slices: experts that one layer of the teacher was cut into.
    """
    made: Stacks = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            whole = as_multiplied(parameter) if parameter.dim() == 3 else parameter
            parts = whole if slices == 1 else whole.unflatten(0, (-1, slices))
            made[parameter] = Stack(whole, parts.unbind())
    return made


def as_multiplied(x: Tensor) -> Tensor:
    """In autocast's dtype: weights are cast once a pass, not once a depth."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
