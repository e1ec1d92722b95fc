"""Settings of a student: its mixers, its loops, or the one layer of a Dreamer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ltconvert.recipes.dreamer import DreamerSettings
from ltconvert.recipes.mixers import MixerSettings


class StudentSettings(MixerSettings, DreamerSettings):
    """What the student is: its mixer, how many layers stay full, how it loops."""

    loop_residual: bool = Field(
        False, description="per-loop residual h + rho * h_in, rho = 0 at the start"
    )
    loops: int | None = Field(None, ge=1, description="loops of the core; default: the teacher's")
    prelude_layers: int | None = Field(
        None, ge=0, description="layers run once before the looped core; default: the teacher's"
    )
    coda_layers: int | None = Field(
        None, ge=0, description="layers run once after the looped core; default: the teacher's"
    )
    loop_start: Literal["stepwise", "average", "lower"] | None = Field(
        None,
        description=(
            "make a dense teacher's core run `loops` times before anything is converted; its shared"
            " matrices start from evenly spaced layers, from the mean of the layers that are tied,"
            " or from the first loop's"
        ),
    )
    loop_rank: int = Field(
        64,
        ge=0,
        description=(
            "with `loop_start`: rank of each loop's own correction of every matrix, from the SVD of"
            " what tying changes; exact from the hidden width on"
        ),
    )
    loop_calibration_tokens: int = Field(
        8192,
        ge=0,
        description=(
            "with `loop_start`: tokens of text on whose inputs the corrections are the best of"
            " their rank; 0: on all inputs alike"
        ),
    )
    drop_layers: int | float | list[int] = Field(
        0,
        description="leave out layers of the teacher, and convert nothing: a share, a count (those"
        " whose loss alone costs least KL), or a list",
    )
    drop_calibration_tokens: int = Field(
        16_384, gt=0, description="with `drop_layers`: tokens of text on which that is measured"
    )

    @property
    def shrinks(self) -> bool:
        """Whether it has pools that get smaller."""
        return self.kind == "dreamer" and bool(self.pool_schedule)

    @model_validator(mode="after")
    def _dropping_converts_nothing(self) -> Self:
        """A shorter teacher is a yardstick, and looping or converting it would be another one."""
        dropped = self.drop_layers
        if isinstance(dropped, int | float) and (
            dropped < 0 or (isinstance(dropped, float) and dropped >= 1)
        ):
            raise ValueError(
                f"student.drop_layers is {dropped}; expected a share in [0, 1), a count, or a list"
            )
        if isinstance(dropped, list) and len(set(dropped)) != len(dropped):
            raise ValueError(f"student.drop_layers names each layer once, got {dropped}")
        converts = self.kinds != ["full"] or self.kind != "lt2" or self.loop_start is not None
        if dropped and converts:
            raise ValueError(
                "student.drop_layers shortens the teacher and converts nothing: set student.mixer"
                " to full, and leave out student.loop_start and student.kind"
            )
        return self

    @model_validator(mode="after")
    def _dreamers_attention_is_full(self) -> Self:
        """Its mixers are the teacher's; there is no place for a gate, or loops of its own."""
        if self.kind == "dreamer":
            wanted = {
                "mixer": "full", "full_mixer": "full", "sdpa_gate": False, "loop_start": None,
            }  # fmt: skip
            for name, value in wanted.items():
                if (given := getattr(self, name)) != value:
                    why = "; its mixers are the teacher's, which may be a student with others"
                    raise ValueError(
                        f"student.kind dreamer needs student.{name} {value}, got {given}"
                        + (why if name == "mixer" else "")
                    )
        return self

    @model_validator(mode="after")
    def _every_step_has_its_experts(self) -> Self:
        """A number for each step of `shrink`, that holds a whole MLP."""
        tops, shares = self.top_schedule, self.pool_schedule
        if tops and len(tops) != len(shares):
            raise ValueError(
                f"student.top_schedule {tops} needs a student.pool_schedule of as many steps, got "
                f"{shares} (1.0 leaves the pools whole)"
            )
        if tops and min(tops) < self.slices:
            raise ValueError(
                f"student.top_schedule {tops} has less than the {self.slices} slices of an MLP "
                "(student.slices); a token could not use a whole one"
            )
        return self

    @model_validator(mode="after")
    def _tying_needs_loops(self) -> Self:
        """How often the core of a dense teacher runs cannot be read off the teacher."""
        if self.loop_start is not None and (self.loops or 1) < 2:
            raise ValueError(
                f"student.loop_start {self.loop_start} needs student.loops of 2 or more, "
                f"got {self.loops}"
            )
        return self
