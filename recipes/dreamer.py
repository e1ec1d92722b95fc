"""Settings of Dreamer students: one layer whose experts are the teacher's layers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ltconvert.recipes.base import Settings


class DreamerSettings(Settings):
    """Part of the settings of a student; all but ``kind`` do nothing unless that says so."""

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
    pool_schedule: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        [],
        description="`dreamer`: shares of both pools that the stage `shrink` leaves, step by step:"
        " [0.75, 0.5]",
    )
    top_schedule: list[Annotated[int, Field(ge=1)]] = Field(
        [],
        description="`dreamer`: experts that a token uses at a depth from each of those steps on, a"
        " number for each; default: `top_experts` all along",
    )
    pool_cut: Literal["drop", "merge"] = Field(
        "drop",
        description="`dreamer`: entries that are worth least leave a pool, or enter the mean of the"
        " entry most like them",
    )
    pool_rank: Literal["damage", "use"] = Field(
        "damage",
        description="`dreamer`: what an entry is worth: the KL that doing without it costs (a"
        " forward pass each), or what it adds to the stream",
    )
    pool_skip: bool = Field(
        False,
        description="`dreamer`: where next to nothing is left of a depth's attention, or of its"
        " experts, it goes without from then on: faster, with less cache, and unable to learn to"
        " use others' there",
    )

    @property
    def steps(self) -> list[tuple[float, int]]:
        """Of the stage `shrink`: the share of the pools, and experts that a token uses."""
        tops = self.top_schedule or [self.top_experts] * len(self.pool_schedule)
        return list(zip(self.pool_schedule, tops, strict=True))

    @field_validator("pool_schedule")
    @classmethod
    def _pools_only_shrink(cls, value: list[float]) -> list[float]:
        """What has left a pool does not come back."""
        if value != sorted(value, reverse=True):
            raise ValueError(f"shares never rise from step to step, got {value}")
        return value
