"""Which slots of the depth stream every visit of a layer reads and writes; decided before any pass.

Mixture-of-depths attention (arXiv 2603.15619, section 3): a sublayer leaves a key and a value at
each token, a *slot*, and attention of later visits reads those of its own token. Unbounded, a visit
reads two slots for every visit before it; published future work is a bound, which is a choice here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.loop import Step

ATTENTION, FFN = "attention", "ffn"
WRITERS = ("attention", "ffn", "projected")


@dataclass(frozen=True)
class DepthVisit:
    """What one visit has to do with the stream.

    Attributes:
        first, stop: it reads the slots from ``first`` to before ``stop``.
        writes: the sublayers of it that write, ``ATTENTION`` before ``FFN``.
        closes: what was written since the last such visit becomes a slot of each kind: its mean.
    """

    first: int = 0
    stop: int = 0
    writes: tuple[str, ...] = ()
    closes: bool = False

    @property
    def reads(self) -> bool:
        """There is something to read."""
        return self.stop > self.first

    @property
    def takes_part(self) -> bool:
        """It reads or writes."""
        return self.reads or bool(self.writes)


@dataclass(frozen=True)
class DepthPlan:
    """The whole stream of one forward pass.

    Attributes:
        visits: by the index of the visit in execution order.
        kinds: what wrote each slot, in the order of the slots.
    """

    visits: tuple[DepthVisit, ...]
    kinds: tuple[str, ...]

    @property
    def slots(self) -> int:
        """All slots that a pass writes."""
        return len(self.kinds)


def depth_plan(
    schedule: Sequence[Step],
    mixers: Sequence[str],
    *,
    writers: str,
    pattern: str,
    linear_writes: bool,
) -> DepthPlan | None:
    """The plan of a model; None where no layer reads the stream.

    What no later visit would read is not written: the last visit's sublayers for one.

    Args:
        schedule: visits in execution order.
        mixers: of each physical layer.
        writers: ``attention``: the keys and values of attention alone; ``ffn`` and ``projected``:
            those of MLPs, too.
        pattern: ``all``; ``last:n``: of the last n visits; ``every:n``: of every n-th visit;
            ``mean:n``: the mean of every n visits, an incomplete number left out.
        linear_writes: MLPs of layers that do not read write as well.

    Raises:
        ValueError: words that are not known.
    """
    if writers not in WRITERS:
        raise ValueError(f"unknown depth_writers {writers!r}; choose one of {', '.join(WRITERS)}")
    name, size = _parsed(pattern)
    readers = [step.slot for step in schedule if mixers[step.layer] == "moda"]
    if not readers:
        return None
    own = (ATTENTION,) if writers == "attention" else (ATTENTION, FFN)
    writes: dict[int, tuple[str, ...]] = {}
    for step in schedule[: readers[-1]]:
        if kinds := _kinds(mixers[step.layer], own, linear_writes):
            writes[step.slot] = kinds
    step_size, block = (size, 1) if name == "every" else (1, size if name == "mean" else 1)
    writing = list(writes)[::step_size]
    blocks = [writing[i : i + block] for i in range(0, len(writing) - block + 1, block)]
    return _counted(
        len(schedule),
        set(readers),
        {visit: writes[visit] for visit in writing[: len(blocks) * block]},
        {visits[-1] for visits in blocks},
        size if name == "last" else len(blocks),
    )


def _parsed(pattern: str) -> tuple[str, int]:
    """``last:4`` -> ("last", 4); ("all", 1)."""
    name, _, size = pattern.partition(":")
    if pattern == "all":
        return "all", 1
    if name not in ("last", "every", "mean") or not size.isdecimal() or int(size) < 1:
        raise ValueError(
            f"unknown depth_slots {pattern!r}; expected all, last:n, every:n or mean:n, n from 1"
        )
    return name, int(size)


def _kinds(mixer: str, own: tuple[str, ...], linear_writes: bool) -> tuple[str, ...]:
    """What a layer writes. One that chooses its keys has a loss to give in the same place."""
    if mixer == "moda":
        return own
    return own[1:] if linear_writes and not MIXERS[mixer].chooses else ()


def _counted(
    num_visits: int,
    readers: set[int],
    writes: dict[int, tuple[str, ...]],
    closing: set[int],
    last: int,
) -> DepthPlan:
    """Count slots through all visits; a reader sees those of the ``last`` closed blocks."""
    visits: list[DepthVisit] = []
    kinds: list[str] = []
    begins: list[int] = []  # the first slot of each closed block
    block: set[str] = set()
    for visit in range(num_visits):
        first = begins[-last:][0] if begins else 0
        reads = (first, len(kinds)) if visit in readers else (0, 0)
        visits.append(DepthVisit(*reads, writes.get(visit, ()), visit in closing))
        block |= set(writes.get(visit, ()))
        if visit in closing:
            begins.append(len(kinds))
            kinds += [kind for kind in (ATTENTION, FFN) if kind in block]
            block = set()
    return DepthPlan(tuple(visits), tuple(kinds))
