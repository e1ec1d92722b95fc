"""Where the students of a run lie: one a stage while it is needed, and the run's result.

What stays when all is done: ``<run>/student``, the aligned student (selection can be repeated
from it) and the looped model that layers are taken from, where there is one. A stage's checkpoints
go when it has finished, a later stage's student when the next stage or the run has finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltconvert.convert.checkpoint import (
    load_student,
    read_provenance,
    remove_folder,
    save_student,
)
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.processes import is_main_process
from ltconvert.distill.resume import CHECKPOINT
from ltconvert.distill.stage import STUDENT_FOLDER
from ltconvert.errors import UserError

KEPT = ("loop", "align")  # stages whose students are never deleted


@dataclass
class Shelf:
    """The students of one run folder; of several processes only the first may save."""

    run_dir: Path
    tokenizer: Any
    device: torch.device

    @property
    def final(self) -> Path:
        """Folder of the run's result."""
        return self.run_dir / STUDENT_FOLDER

    def folder(self, stage: str) -> Path:
        """Where a stage keeps its files."""
        return self.run_dir / "stages" / stage

    def final_hash(self) -> str | None:
        """The fingerprint of the stage that the result comes from; None when there is none."""
        return read_provenance(self.final).get("stage_hash")

    def save(self, student: LT2ForCausalLM, stage: str, provenance: Mapping[str, Any]) -> None:
        """Keep a stage's student."""
        save_student(student, self.tokenizer, self.folder(stage) / STUDENT_FOLDER, provenance)

    def save_final(self, student: LT2ForCausalLM, provenance: Mapping[str, Any]) -> None:
        """Make a student the run's result."""
        save_student(student, self.tokenizer, self.final, provenance)

    def load(self, stage: str, stage_hash: str) -> LT2ForCausalLM:
        """The student that a finished stage left, in fp32.

        Raises:
            UserError: it is gone, or its files are broken.
        """
        folder = self.folder(stage) / STUDENT_FOLDER
        if not folder.exists():
            if self.final_hash() != stage_hash:
                raise UserError(
                    f"stage {stage} has finished, but its student is not in {folder}; delete "
                    f"{self.folder(stage)} and the folders of later stages to run them again"
                )
            folder = self.final
        try:
            student = load_student(folder, dtype=torch.float32, device=self.device)
        except UserError as error:
            raise UserError(
                f"{error}; to make it again delete {folder}, {self.folder(stage)} and the "
                "folders of later stages"
            ) from error
        return student.requires_grad_(False)

    def clear_checkpoints(self, stage: str) -> None:
        """Delete what a finished stage would have been resumed from."""
        if is_main_process():
            for checkpoint in self.folder(stage).glob(f"**/{CHECKPOINT}*"):
                shutil.rmtree(checkpoint, ignore_errors=True)

    def drop(self, stages: Sequence[str]) -> None:
        """Delete the students of stages that nothing will be read from any more."""
        if is_main_process():
            for stage in stages:
                if stage not in KEPT:
                    remove_folder(self.folder(stage) / STUDENT_FOLDER)
