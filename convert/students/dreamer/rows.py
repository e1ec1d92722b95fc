"""Experts applied to tokens: a layer's own to all of them, or to each token those it chose, with
rows sorted by expert or, where tokens are few, without.

All have the same methods, so that what an expert computes is written once.

N tokens, M rows, S slices of an MLP, E experts, I input and O output channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.students.dreamer import grouped
from ltconvert.convert.students.dreamer.banks import Bank, Gains, Stacks, as_multiplied
from ltconvert.kernels.decode_experts import decode_experts
from ltconvert.kernels.decode_linear import GateActivation
from ltconvert.kernels.permute import permute, unpermute

Gate = Callable[[Tensor], Tensor]  # act(gate) * up of [..., 2 I]: [..., I]


class Rows(Protocol):
    """Tokens as their experts read them."""

    def spread(self, x_NI: Tensor) -> Tensor:
        """Tokens -> rows."""
        ...

    def gated(self, x: Tensor, bank: Bank, gate: Gate) -> Tensor:
        """Rows through their experts' gates and what stands behind these -> rows."""
        ...

    def out(self, x: Tensor, bank: Bank) -> Tensor:
        """Rows through their experts' linear layers, weighed and added up -> [N, O]."""
        ...

    def gains(self, gains: Gains) -> Tensor:
        """The experts' gains, weighed and added up: [N, O], or [O] for all tokens."""
        ...


@dataclass(frozen=True)
class OwnRows:
    """All tokens through the experts of one layer of the teacher, at weight 1: plain products.

    Rows are [N, I]; with several slices what ``gated`` gives, and ``out`` takes, is [N, S, I].
    """

    layer: int
    slices: int
    stacks: Stacks

    def spread(self, x_NI: Tensor) -> Tensor:
        """The tokens as they are."""
        return x_NI

    def gated(self, x: Tensor, bank: Bank, gate: Gate) -> Tensor:
        """[N, I] -> [N, O] or [N, S, O]."""
        weight, bias = self._own(bank.weight), self._own(bank.bias)
        assert weight is not None
        if self.slices == 1:
            return gate(F.linear(x, weight, bias))
        y = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
        return gate(y.unflatten(-1, (self.slices, -1)))

    def out(self, x: Tensor, bank: Bank) -> Tensor:
        """[N, I] or [N, S, I] -> [N, O]."""
        weight, bias = self._own(bank.weight), self._own(bank.bias)
        assert weight is not None
        if self.slices == 1:
            return F.linear(x, weight, bias)
        bias = None if bias is None else bias.sum(0)
        return F.linear(x.flatten(1), weight.transpose(0, 1).flatten(1), bias)

    def gains(self, gains: Gains) -> Tensor:
        """[O]."""
        own = self._own(gains.weight)
        assert own is not None
        own = own + gains.offset
        return own if self.slices == 1 else own.sum(0)

    def _own(self, parameter: torch.nn.Parameter | None) -> Tensor | None:
        return None if parameter is None else self.stacks[parameter].own[self.layer]


@dataclass(frozen=True)
class Routed:
    """What tokens chose.

    Attributes:
        chosen_NK, weights_NK: the choices; numbers from E on are nulls.
        experts, nulls: how many there are to choose.
    """

    chosen_NK: Tensor
    weights_NK: Tensor
    experts: int
    nulls: int

    def of_nulls(self) -> Tensor:
        """Weights of each token's nulls, added up, [N, 1]."""
        null_NK = self.chosen_NK >= self.experts
        return (self.weights_NK * null_NK).sum(-1, keepdim=True)

    def without_nulls(self) -> Self:
        """Weights that add up to 1 without those of nulls; to 0 where nothing else is chosen."""
        weights_NK = self.weights_NK * (self.chosen_NK < self.experts)
        sum_N1 = weights_NK.sum(-1, keepdim=True)
        return replace(self, weights_NK=weights_NK / sum_N1.where(sum_N1 > 0, 1.0))


@dataclass(frozen=True)
class ChosenRows(Routed):
    """Tokens through the experts that they chose: M = N times choices, sorted by expert."""

    grouping: grouped.Grouping
    stacks: Stacks

    def spread(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [M, I], in the dtype of products."""
        return permute(as_multiplied(x_NI), self.grouping.place_NK)

    def gated(self, x: Tensor, bank: Bank, gate: Gate) -> Tensor:
        """[M, I] -> [M, O]."""
        return gate(self._within(x, bank))

    def out(self, x: Tensor, bank: Bank) -> Tensor:
        """[M, I] -> [N, O]."""
        return unpermute(self._within(x, bank), self.grouping.place_NK, self.weights_NK)

    def _within(self, x: Tensor, bank: Bank) -> Tensor:
        """[M, I] -> [M, O]."""
        y_MO = grouped.grouped_linear(x, self.stacks[bank.weight].whole, self.grouping)
        if bank.bias is None:
            return y_MO
        bias_EO = self.stacks[bank.bias].whole
        if self.nulls:  # rows without an expert have gradients that mean nothing
            bias_EO = F.pad(bias_EO, (0, 0, 0, 1))
        return y_MO + bias_EO[self.grouping.expert_M].to(y_MO.dtype)

    def gains(self, gains: Gains) -> Tensor:
        """[N, O]. A null's are 0."""
        whole = self.stacks[gains.weight].whole
        weights_NX = self.weights_NK.new_zeros(len(self.weights_NK), len(whole) + self.nulls)
        weights_NX = weights_NX.scatter(1, self.chosen_NK, self.weights_NK)
        weights_NE = weights_NX[:, : len(whole)]
        with torch.autocast(whole.device.type, enabled=False):
            return weights_NE @ (whole.to(weights_NE.dtype) + gains.offset)


@dataclass(frozen=True)
class PickedRows(Routed):
    """A few tokens through theirs, of which the weights that were chosen are read. No gradient.

    Rows are [N, I]; what ``gated`` gives, and ``out`` takes, is [N, K, I].

    Attributes:
        activation: of the gates; None where the kernel has none for it.
        onto_NO: what ``out`` adds to.
    """

    activation: GateActivation | None = None
    onto_NO: Tensor | None = None

    def spread(self, x_NI: Tensor) -> Tensor:
        """The tokens as they are."""
        return x_NI

    def gated(self, x: Tensor, bank: Bank, gate: Gate) -> Tensor:
        """[N, I] -> [N, K, O]."""
        given = x, bank.weight, bank.bias, self.chosen_NK
        if self.activation is None:
            return gate(decode_experts(*given))
        return decode_experts(*given, swiglu=True, activation=self.activation)

    def out(self, x: Tensor, bank: Bank) -> Tensor:
        """[N, I] or [N, K, I] -> [N, O]."""
        given = x, bank.weight, bank.bias, self.chosen_NK, self.weights_NK
        return decode_experts(*given, residual_NO=self.onto_NO)

    def gains(self, gains: Gains) -> Tensor:
        """[N, O]. A null's are 0."""
        weights_NK = self.weights_NK * (self.chosen_NK < self.experts)
        gains_NKO = gains.weight[self.chosen_NK.clamp(max=self.experts - 1)] + gains.offset
        return (weights_NK[:, None] @ gains_NKO.to(weights_NK.dtype))[:, 0]


Expert = Callable[[Rows], Tensor]


@dataclass(frozen=True)
class Mixture:
    """``(1 - r) expert(own rows) + r expert(chosen rows)``; what does not count is None.

    Attributes:
        release: r, a scalar; of no effect unless both count.
    """

    own: Rows | None
    chosen: ChosenRows | PickedRows | None
    release: Tensor

    def __call__(self, expert: Expert) -> Tensor:
        """What the experts give together."""
        if self.chosen is None:
            assert self.own is not None
            return expert(self.own)
        y = expert(self.chosen)
        if self.own is None:
            return y
        # Not two products: in half precision 1 - r would be rounded to coarse steps.
        return torch.lerp(expert(self.own).to(y.dtype), y, self.release.to(y.dtype))

    def onto(self, h_NO: Tensor, expert: Expert) -> Tensor:
        """h with what the experts give together."""
        if self.own is None and isinstance(self.chosen, PickedRows):
            return expert(replace(self.chosen, onto_NO=h_NO))
        return h_NO + self(expert)

    def of_nulls(self) -> Tensor | None:
        """Weights of each token's nulls, added up, [N, 1]; None where there are none.

        Routing is released wholly then.
        """
        return self.chosen.of_nulls() if self.chosen is not None and self.chosen.nulls else None

    def without_nulls(self) -> Mixture:
        """The mixture of what is no null, at full weight."""
        if self.chosen is None or not self.chosen.nulls:
            return self
        return replace(self, chosen=self.chosen.without_nulls())
