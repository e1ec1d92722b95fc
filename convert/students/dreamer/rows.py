"""Experts applied to tokens: a layer's own to all of them, or to each token those it chose.

Both have the same four methods, so that what an expert computes is written once.

N tokens, M rows (tokens, or tokens times choices), E experts, I input and O output channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.students.dreamer import grouped
from ltconvert.convert.students.dreamer.banks import Bank, Gains, Stacks


class Rows(Protocol):
    """Tokens as the experts read them."""

    def spread(self, x_NI: Tensor) -> Tensor:
        """A row for each expert that reads a token."""
        ...

    def gains(self, gains: Gains) -> Tensor:
        """Gains of each row's expert."""
        ...

    def linear(self, x_MI: Tensor, bank: Bank) -> Tensor:
        """Each row through its expert's linear layer."""
        ...

    def gather(self, y_MO: Tensor) -> Tensor:
        """Each token's rows, weighed and added up, [N, O] (or [1, O], the same for all)."""
        ...


@dataclass(frozen=True)
class OwnRows:
    """All tokens through the experts of one layer of the teacher, at weight 1: plain products.

    Several experts (slices of an MLP) stand on an axis in front.
    """

    layer: int
    slices: int
    stacks: Stacks

    def spread(self, x_NI: Tensor) -> Tensor:
        """The tokens as they are."""
        return x_NI

    def gains(self, gains: Gains) -> Tensor:
        """[I] of one expert, [slices, 1, I] of several."""
        own = self.stacks[gains.weight].own[self.layer] + gains.offset
        return own if self.slices == 1 else own[:, None]

    def linear(self, x_MI: Tensor, bank: Bank) -> Tensor:
        """[N, O], or [slices, N, O]."""
        weight = self.stacks[bank.weight].own[self.layer]
        bias = None if bank.bias is None else self.stacks[bank.bias].own[self.layer]
        if self.slices == 1:
            return F.linear(x_MI, weight, bias)
        y_MO = x_MI.to(weight.dtype) @ weight.mT
        return y_MO if bias is None else y_MO + bias[:, None]

    def gather(self, y_MO: Tensor) -> Tensor:
        """The sum over slices."""
        return y_MO if self.slices == 1 else y_MO.sum(0)


@dataclass(frozen=True)
class ChosenRows:
    """Tokens through the experts that they chose.

    Attributes:
        weights_NK: of each choice.
    """

    weights_NK: Tensor
    grouping: grouped.Grouping
    stacks: Stacks

    def spread(self, x_NI: Tensor) -> Tensor:
        """[M, I], sorted by expert."""
        return grouped.spread(x_NI, self.grouping)

    def gains(self, gains: Gains) -> Tensor:
        """[M, I]."""
        return (self.stacks[gains.weight].whole + gains.offset)[self.grouping.expert_M]

    def linear(self, x_MI: Tensor, bank: Bank) -> Tensor:
        """[M, O]."""
        y_MO = grouped.grouped_linear(x_MI, self.stacks[bank.weight].whole, self.grouping)
        if bank.bias is None:
            return y_MO
        return y_MO + self.stacks[bank.bias].whole[self.grouping.expert_M]

    def gather(self, y_MO: Tensor) -> Tensor:
        """[N, O]."""
        return grouped.gather(y_MO, self.weights_NK, self.grouping)


Expert = Callable[[Rows], Tensor]


@dataclass(frozen=True)
class Mixture:
    """``sum of share * expert(rows)``; a share of None is 1."""

    parts: tuple[tuple[Tensor | None, Rows], ...]

    def __call__(self, expert: Expert) -> Tensor:
        """What the experts give together, [N, O] (or [1, O] or [O], the same for all tokens)."""
        outputs = [(share, expert(rows)) for share, rows in self.parts]
        first, *rest = [y if share is None else y * share.to(y.dtype) for share, y in outputs]
        for y in rest:
            first = first + y
        return first
