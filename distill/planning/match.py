"""The shape whose parameters, arithmetic and memory are those of another model.

Only matched models can be compared: one that is deeper, has more experts or uses more of them is
better for that alone. Bivariate coordinate descent, after arXiv 2601.21582: the shape's numbers
move two at a time, to the best of all pairs of values around them, until no pair finds better. One
at a time gets stuck, since a step mends one quantity and spoils another (an expert more is
parameters without arithmetic, a depth more is arithmetic and memory). With three quantities two at
a time do, too, now and then; hence descents set out from all shapes one number away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

from ltconvert.distill.planning.footprint import Footprint
from ltconvert.errors import UserError

QUANTITIES = ("parameters", "flops", "memory_bytes")
_NEAR = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # near values one by one, far ones sparsely
STEPS = (*(-step for step in _NEAR), 0, *_NEAR)
# Of shapes that match alike the nearest to the start: too little to outweigh a match.
NEARNESS = 1e-4


class Shape(Protocol):
    """Numbers that say how large a model is."""

    def number(self, name: str) -> int:
        """One of them, above 0."""
        ...

    def moved(self, name: str, steps: int) -> Self | None:
        """The shape with one number so many steps larger; None where there is no such shape."""
        ...

    def footprint(self, context_tokens: int) -> Footprint:
        """What it costs in rows of so many tokens."""
        ...


S = TypeVar("S", bound=Shape)


def mismatch(found: Footprint, target: Footprint) -> float:
    """Sum of squared log ratios of the three quantities; 0 where all are the same."""
    return sum(math.log(getattr(found, name) / getattr(target, name)) ** 2 for name in QUANTITIES)


def match(start: S, target: Footprint, free: Sequence[str], context_tokens: int) -> S:
    """The shape nearest to ``target``, found from ``start``.

    Args:
        free: names of the numbers that may change; the others are held.

    Raises:
        UserError: no number is free.
    """
    if not free:
        raise UserError("every number of the shape is held; leave at least one free")

    def cost(shape: S) -> float:
        moved = sum(math.log(shape.number(name) / start.number(name)) ** 2 for name in free)
        return mismatch(shape.footprint(context_tokens), target) + NEARNESS * moved

    starts = [shape for name in free for shape in _around(start, (name,))]
    return min((_descend(shape, cost, free) for shape in starts), key=cost)


def _descend(start: S, cost: Callable[[S], float], free: Sequence[str]) -> S:
    pairs: list[tuple[str, ...]] = [*itertools.combinations(free, 2)] or [(free[0],)]
    best, least, before = start, cost(start), math.inf
    while least < before:
        before = least
        for names in pairs:
            found = min(_around(best, names), key=cost)
            if cost(found) < least:
                best, least = found, cost(found)
    return best


def _around(shape: S, names: tuple[str, ...]) -> Iterator[S]:
    """All shapes that differ in these numbers by some of STEPS, itself among them."""
    if not names:
        yield shape
        return
    for steps in STEPS:
        moved = shape.moved(names[0], steps)
        if moved is not None:
            yield from _around(moved, names[1:])
