"""What leaves the pools of a Dreamer before a step of the stage `shrink`, judged on training rows.

Judging takes a forward pass an entry. What is done is on disk within about a second, so that a
killed run goes on from there, and so does its clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.dreamer.shrink import Cut, choose, likeness, pool_sizes
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.routing_record import POOLS, pool_usage
from ltconvert.distill.pool_damage import Damage, pool_damage
from ltconvert.distill.selection.partial import Progress
from ltconvert.distill.selection.probe import Stopwatch
from ltconvert.distill.stage import StageInputs
from ltconvert.recipes.stages import ShrinkSettings

PARTIAL_FILE = "cut.partial.json"
SAVE_SECONDS = 1.0  # between two writes of what is judged


@dataclass(frozen=True)
class Choice:
    """What becomes of both pools, by name, and the seconds that it took to find out."""

    cuts: dict[str, Cut]
    seconds: float


class Judge:
    """Judges the entries of a student's pools.

    Args:
        folder: of the step; partial results lie there until ``clear``.
    """

    def __init__(
        self, student: LT2ForCausalLM, inputs: StageInputs, settings: ShrinkSettings, folder: Path
    ) -> None:
        assert student.model.dreamer is not None, "not a Dreamer"
        self.student, self.layer = student, student.model.dreamer
        self.inputs, self.settings, self.recipe = inputs, settings, inputs.recipe.student
        identity = {"shrink": settings.model_dump(mode="json"), "precision": inputs.precision}
        self.progress = Progress(folder / PARTIAL_FILE, identity | asdict(self.layer.config))
        self.watch = Stopwatch(self.progress.state.get("seconds", 0.0))
        self.saved_at = time.monotonic()

    def choose(self, share: float) -> Choice:
        """What leaves so that this share of the teacher's layers is left."""
        layer, cuts = self.layer, {}
        keeps = pool_sizes(layer.config, self.student.config.num_layers, share)
        pools = (layer.attention, layer.experts)
        routers = (layer.attention_router, layer.expert_router)
        for name, pool, router, keep in zip(POOLS, pools, routers, keeps, strict=True):
            leaves = keep < router.experts
            cuts[name] = choose(
                self._effect(name, router, leaves),
                likeness(pool).cpu(),
                keep,
                self.recipe.pool_cut,
                self._damage(name, router, leaves),
            )
        return Choice(cuts, self.watch.seconds)

    def clear(self) -> None:
        """Forget partial results: the choice itself is written."""
        self.progress.clear()

    def _effect(self, name: str, router: Router, leaves: bool) -> Tensor:
        """What entries did at each depth, [D, E]; zeros where nothing is decided by that."""
        by_use = self.recipe.pool_rank == "use" or self.recipe.pool_cut == "merge"
        if not (leaves and by_use):
            return torch.zeros(1, router.experts, dtype=torch.float64)
        if "effects" not in self.progress.state:
            rows = training_rows(self.inputs, self.settings, self.settings.usage_tokens)
            used = pool_usage(self.student, rows, precision=self.inputs.precision)
            self._save("effects", {pool: usage.effect_DE.tolist() for pool, usage in used.items()})
        return torch.tensor(self.progress.state["effects"][name], dtype=torch.float64)

    def _damage(self, name: str, router: Router, leaves: bool) -> Tensor | None:
        """What entries are worth, [E]; None where nothing leaves, or use decides."""
        if not leaves or self.recipe.pool_rank == "use":
            return None
        rows = list(training_rows(self.inputs, self.settings, self.settings.damage_tokens))
        before = Damage(**self.progress.state.get(name, {}))
        total = router.experts * len(rows)

        def note(found: Damage) -> None:
            bar.advance()
            if found.passes == total or time.monotonic() - self.saved_at > SAVE_SECONDS:
                self._save(name, asdict(found))

        with self.inputs.log.bar(f"damage of {name}", total, "passes", before.passes) as bar:
            return pool_damage(
                self.student,
                router,
                rows,
                precision=self.inputs.precision,
                so_far=before,
                done=note,
            )

    def _save(self, name: str, value: Any) -> None:
        self.progress.save(self.progress.state | {name: value, "seconds": self.watch.seconds})
        self.saved_at = time.monotonic()


def training_rows(inputs: StageInputs, settings: ShrinkSettings, tokens: int) -> Iterator[Batch]:
    """The first training rows, of all processes, no longer than they need to be."""
    length = min(settings.seq_len_tokens, tokens)
    rows = max(1, min(settings.rows_at_once, tokens // length))
    own = settings.model_copy(update={"seq_len_tokens": length, "micro_batch_rows": rows})
    return islice(inputs.stream(own, own=False), -(-tokens // (rows * length)))
