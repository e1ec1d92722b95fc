"""What makes a Dreamer of a layered architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ltconvert.errors import UserError

SelectBy = Literal["logits", "scores"]


@dataclass(frozen=True)
class DreamerConfig:
    """Sizes of the pools, and how a token uses them at each depth.

    Attributes:
        entries: of the pool of attention projections; the teacher's layers at first.
        experts: of the pool of MLPs; the teacher's layers times ``slices`` at first.
        slices: experts that one MLP of the teacher is cut into, along its width.
        top_entries, top_experts: how many of either a token uses at a depth, nulls among them.
        depth_heads: heads of depth attention; 0 for none.
        shared_size: width of the expert that is always on; 0 for none.
        parallel: depth attention stands beside sequence attention, not before it.
        stream_norm: a learned share of the residual stream is normed after each depth.
        select_by: the balancing bias is added to logits (as published) or to their sigmoids.
        null_entries, null_experts: of either pool's router, see ``Router``; 0 until entries leave.
        skipped_attention, skipped_experts: depths that go without attention, or without experts.
    """

    entries: int
    experts: int
    slices: int = 1
    top_entries: int = 2
    top_experts: int = 2
    depth_heads: int = 4
    shared_size: int = 128
    parallel: bool = False
    stream_norm: bool = False
    select_by: SelectBy = "logits"
    null_entries: int = 0
    null_experts: int = 0
    skipped_attention: list[int] = field(default_factory=list)
    skipped_experts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for used, pool in (("top_entries", self.entries), ("top_experts", self.experts)):
            if not 1 <= getattr(self, used) <= pool:
                raise UserError(
                    f"student.{used} is {getattr(self, used)}, the pool holds {pool}; "
                    f"choose 1 to {pool}"
                )
        if self.top_experts < self.slices:
            raise UserError(
                f"student.top_experts {self.top_experts} is less than the {self.slices} slices of "
                "one MLP (student.slices); a token could not use a whole one"
            )
