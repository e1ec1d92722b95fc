"""Scores that add up batch by batch, saved after each, until the best have settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from ltconvert.distill.selection.probe import Probe, Stopwatch
from ltconvert.distill.selection.ranking import Stability
from ltconvert.distill.selection.result import Cost

Sums = TypeVar("Sums")  # a dataclass of plain values
Part = TypeVar("Part")  # a batch


class Tally(Generic[Sums, Part]):
    """What a method has added up so far; goes on from what an earlier call saved.

    Iterated over it gives the batches that are still to be scored; ``add`` follows each.

    Args:
        kind: makes empty sums.
        batches: all of them, the same in every call.

    Attributes:
        sums, cost: so far; the method adds to them.
        to_do: batches that were not scored yet.
    """

    def __init__(self, probe: Probe, kind: type[Sums], batches: Sequence[Part]) -> None:
        state = probe.progress.state
        self.sums = kind(**state.get("sums", {}))
        self.cost = Cost(**state.get("cost", {}))
        self._progress, self._watch = probe.progress, Stopwatch(self.cost.seconds)
        self._stability = Stability(probe.settings.stable_rounds, state.get("history", []))
        self.to_do = batches[len(self.history) :]
        self._count = len(batches)

    def __iter__(self) -> Iterator[Part]:
        for batch in self.to_do:
            if self._stability.settled:
                return
            yield batch

    def add(self, best: Sequence[int]) -> None:
        """Note what is best after one more batch, and save."""
        self._stability.add(best)
        self.cost.seconds = self._watch.seconds
        sums: Any = self.sums
        self._progress.save(
            {"sums": asdict(sums), "cost": asdict(self.cost), "history": self.history}
        )

    @property
    def history(self) -> list[list[int]]:
        """The best, ascending, after every batch."""
        return self._stability.history

    @property
    def stopped_early(self) -> bool:
        """The best had settled before the batches were used up."""
        return self._stability.settled and len(self.history) < self._count
