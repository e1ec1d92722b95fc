"""What every stage gets and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ltconvert.distill.data import PackedStream, data_identity
from ltconvert.distill.precision import autocast
from ltconvert.distill.processes import rank_and_world
from ltconvert.distill.trainer import Objective, TrainResult, train

if TYPE_CHECKING:
    from ltconvert.convert.students.lt2 import LT2ForCausalLM
    from ltconvert.convert.teachers.load import Teacher
    from ltconvert.distill.runlog import RunLog
    from ltconvert.recipes.schema import Recipe
    from ltconvert.recipes.stages import TrainSettings

STUDENT_FOLDER = "student"
SELECTION_FILE = "selection.json"


@dataclass
class StageInputs:
    """What a stage may read.

    Attributes:
        student: the student that the stage before left, on ``device``.
        precision: ``fp32`` or ``bf16`` (matrix products; weights stay as they are).
        seed: differs from stage to stage, the same in every run of a recipe.
    """

    teacher: Teacher
    recipe: Recipe
    student: LT2ForCausalLM
    tokenizer: Any
    log: RunLog
    precision: str
    device: torch.device
    seed: int = 0

    @cached_property
    def text(self) -> dict[str, Any]:
        """What tells the training text from another one."""
        return data_identity(self.recipe.data)

    def stream(self, settings: TrainSettings, *, own: bool = True) -> PackedStream:
        """A stage's training rows from the beginning: this process's ``own``, or all of them."""
        rank, world = rank_and_world() if own else (0, 1)
        return PackedStream(
            self.recipe.data,
            self.tokenizer,
            split="train",
            seq_len_tokens=settings.seq_len_tokens,
            rows=settings.rows_at_once,
            seed=self.seed,
            rank=rank,
            world=world,
        )

    def train(
        self, objective: Objective, settings: TrainSettings, stage_dir: Path, stage: str
    ) -> TrainResult:
        """Train for the stage's budget; goes on from ``stage_dir/checkpoint`` by itself."""
        return train(
            objective,
            self.stream(settings),
            settings,
            stage=stage,
            stage_dir=stage_dir,
            log=self.log,
            precision=self.precision,
            device=self.device,
            seed=self.seed,
            runtime=self.recipe.runtime,
        )

    def autocast(self) -> torch.autocast:
        """Matrix products in the run's precision."""
        return autocast(self.device, self.precision)


@dataclass
class StageResult:
    """What a stage leaves: the student, and facts (tokens, steps, seconds, ...)."""

    student: LT2ForCausalLM
    facts: dict[str, Any] = field(default_factory=dict)
