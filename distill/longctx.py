"""Stage `longctx`: the objective of `logits` on longer rows, mostly cross-entropy."""

from __future__ import annotations

from pathlib import Path

from ltconvert.distill import logits
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.recipes.stages import LongctxSettings


def run(settings: LongctxSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Go on with longer rows; resumes from ``stage_dir`` by itself."""
    return logits.run(settings, inputs, stage_dir, stage="longctx")
