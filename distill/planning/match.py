"""The Dreamer whose parameters, arithmetic and memory are those of another model.

Only matched models can be compared (arXiv 2601.21582): one that is deeper, has more experts or uses
more of them is better for that alone. Bivariate coordinate descent: the shape's numbers move two at
a time, to the best of all pairs of values around, until no pair of numbers finds better. One at a
time gets stuck, since most single steps mend one quantity by spoiling another (an expert more is
parameters without arithmetic, a deeper model is both, and memory).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from ltconvert.distill.planning.footprint import Footprint
from ltconvert.errors import UserError

QUANTITIES = ("parameters", "flops", "memory_bytes")
# How far one move looks: near values one by one, far ones sparsely.
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Of shapes that match equally well the one nearest to the start: too little to outweigh a match.
_NEARNESS = 1e-5


class Shape(Protocol):
    """A frozen dataclass of numbers, each a positive integer in steps of its own."""

    def footprint(self, context_tokens: int) -> Footprint: ...

    def values(self, name: str, steps: Collection[int]) -> list[int]: ...


S = TypeVar("S", bound=Shape)


def mismatch(found: Footprint, target: Footprint) -> float:
    """Sum of squared log ratios of the three quantities; 0 where all are the same."""
    return sum(math.log(getattr(found, name) / getattr(target, name)) ** 2 for name in QUANTITIES)


def match(start: S, target: Footprint, free: Collection[str], context_tokens: int) -> S:
    """The shape nearest to ``target``, found from ``start``.

    Args:
        free: names of the shape's numbers that may change; the others are held.
        context_tokens: rows in which arithmetic and memory are counted.

    Raises:
        UserError: nothing is left to change.
    """
    if not free:
        raise UserError("every number of the shape is held; leave at least one free")

    def cost(shape: S) -> float:
        distance = sum(math.log(getattr(shape, n) / getattr(start, n)) ** 2 for n in free)
        return mismatch(shape.footprint(context_tokens), target) + _NEARNESS * distance

    best = _descend(start, cost, sorted(free))
    return best


def _descend(start: S, cost: Callable[[S], float], free: list[str]) -> S:
    pairs = list(itertools.combinations(free, 2)) or [(free[0], free[0])]
    best, least, improved = start, cost(start), True
    while improved:
        improved = False
        for pair in pairs:
            found = min(_around(best, pair), key=cost)
            if cost(found) < least:
                best, least, improved = found, cost(found), True
    return best


def _around(shape: S, names: tuple[str, str]) -> Iterator[S]:
    """All pairs of values around those of a shape, its own included."""
    steps = sorted({0, *_STEPS, *(-s for s in _STEPS)})
    first, second = (shape.values(name, steps) for name in names)
    for values in itertools.product(first, second):
        changed = replace(shape, **dict(zip(names, values, strict=True)))  # type: ignore[type-var]
        if changed.sound:
            yield changed
