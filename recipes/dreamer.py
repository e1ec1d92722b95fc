"""Settings of Dreamer students: one layer whose experts are the teacher's layers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ltconvert.recipes.base import Settings


class DreamerSettings(Settings):
    """Part of the settings of a student; all but ``kind`` are of no effect unless that says so."""

    kind: Literal["lt2", "dreamer"] = Field(
        "lt2", description="family of the student: layers, or one layer of experts"
    )
    slices: int = Field(
        1, ge=1, description="`dreamer`: experts that each MLP of the teacher is cut into"
    )
    top_entries: int = Field(
        2, ge=1, description="`dreamer`: layers' attention projections that a token uses at a depth"
    )
    top_experts: int = Field(
        2, ge=1, description="`dreamer`: experts that a token uses at a depth, at least `slices`"
    )
    depth_heads: int = Field(4, ge=0, description="`dreamer`: heads of depth attention; 0: none")
    shared_size: int = Field(
        128, ge=0, description="`dreamer`: width of the expert that is always on; 0: none"
    )
    parallel: bool = Field(
        False, description="`dreamer`: depth attention beside sequence attention, not before it"
    )
    stream_norm: bool = Field(
        False,
        description="`dreamer`: a learned share of the residual stream is normed at each depth",
    )
    select_by: Literal["logits", "scores"] = Field(
        "logits",
        description="`dreamer`: the balancing bias is added to logits, as published, or to their"
        " sigmoids",
    )
