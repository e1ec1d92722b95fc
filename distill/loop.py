"""Stage `loop`: a dense teacher whose layers were tied into loops learns the teacher's logits."""

from __future__ import annotations

from pathlib import Path

from ltconvert.distill import logits
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.recipes.stages import LoopSettings


def run(settings: LoopSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Train all parameters of the looped model; resumes from ``stage_dir`` by itself."""
    return logits.run(settings, inputs, stage_dir, stage="loop")
