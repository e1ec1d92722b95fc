"""Numbers to order: how many layers stay, ranks with ties, and when a choice has settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ltconvert.errors import UserError


def count_full_layers(full_layers: int | float | Sequence[int], num_layers: int) -> int:
    """How many of ``num_layers`` physical layers the setting ``student.full_layers`` keeps.

    A share is rounded to the nearest count, halves up, and keeps at least one layer unless it is 0.

    Raises:
        UserError: a share outside 0 to 1, a count outside 0 to ``num_layers``, or a list with a
            layer that is repeated or does not exist.
    """
    if isinstance(full_layers, bool) or not isinstance(full_layers, int | float | Sequence):
        raise UserError(
            f"student.full_layers is {full_layers!r}; "
            "expected a share (0.25), a count (8) or a list ([0, 4])"
        )
    if isinstance(full_layers, Sequence):
        return len(listed_layers(full_layers, num_layers))
    if isinstance(full_layers, float):
        if not 0.0 <= full_layers <= 1.0:
            raise UserError(
                f"student.full_layers is {full_layers}; a share lies between 0.0 and 1.0, "
                "a count has no decimal point"
            )
        return 0 if full_layers == 0 else max(1, math.floor(full_layers * num_layers + 0.5))
    if not 0 <= full_layers <= num_layers:
        raise UserError(
            f"student.full_layers is {full_layers}; the teacher has {num_layers} physical layers: "
            f"give a count from 0 to {num_layers}"
        )
    return full_layers


def listed_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """The list in ascending order, once it names each existing layer at most once.

    Raises:
        UserError: an entry is no layer of the teacher, or stands there twice.
    """
    known = range(num_layers)
    bad = [x for x in layers if isinstance(x, bool) or not isinstance(x, int) or x not in known]
    if bad:
        raise UserError(
            f"student.full_layers names layer {bad[0]!r}; "
            f"the teacher's physical layers are 0 to {num_layers - 1}"
        )
    twice = sorted({x for x in layers if list(layers).count(x) > 1})
    if twice:
        raise UserError(f"student.full_layers names layer {twice[0]} more than once; name it once")
    return sorted(layers)


def order(values: Sequence[float]) -> list[int]:
    """Indices from the largest value to the smallest; equal values in ascending index order.

    A value that is not a number comes last: a layer that could not be scored is not chosen.
    """
    return sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i], i))


def average_ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, 1 for the largest; equal values share the mean of their ranks."""
    ordered = order(values)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(ordered):
        end = start
        while end < len(ordered) and values[ordered[end]] == values[ordered[start]]:
            end += 1
        end = max(end, start + 1)  # a value that is not a number equals nothing, itself included
        for position in range(start, end):
            ranks[ordered[position]] = (start + 1 + end) / 2
        start = end
    return ranks


def mean_ranks(columns: Sequence[Sequence[float]]) -> list[float]:
    """The mean over ``columns`` of each layer's rank, 1 for the most valuable."""
    ranks = [average_ranks(column) for column in columns]
    return [sum(of_layer) / len(columns) for of_layer in zip(*ranks, strict=True)]


@dataclass
class Stability:
    """The choice after every batch, and whether it has settled.

    Attributes:
        stable_rounds: batches in a row that must leave the chosen set as it was.
        history: the chosen set (ascending) after every batch.
    """

    stable_rounds: int
    history: list[list[int]] = field(default_factory=list)

    @property
    def unchanged(self) -> int:
        """Batches in a row, up to the last one, that left the set as it was."""
        count = 0
        for before, after in zip(self.history[-2::-1], self.history[:0:-1], strict=True):
            if before != after:
                break
            count += 1
        return count

    @property
    def settled(self) -> bool:
        """The set has not changed for ``stable_rounds`` batches."""
        return self.unchanged >= self.stable_rounds

    def add(self, chosen: Sequence[int]) -> bool:
        """Take the set chosen after one more batch; True once it has settled."""
        self.history.append(sorted(chosen))
        return self.settled
