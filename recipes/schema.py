"""The Recipe: settings of a whole pipeline, one frozen model a section.

The sections have a module each beside this one. A default stands there once; the CLI help, docs
and README read it from there. Sizes carry their unit in their names. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ltconvert.recipes.base import Settings
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.evaluation import EvalSettings
from ltconvert.recipes.runtime import RuntimeSettings
from ltconvert.recipes.stages import (
    STAGES,
    AlignSettings,
    LogitsSettings,
    LongctxSettings,
    LoopSettings,
    SelectSettings,
    ShrinkSettings,
)
from ltconvert.recipes.student import StudentSettings


class Recipe(Settings):
    """A whole conversion."""

    name: str = Field(description="name of the recipe; of a file without it, the file's")
    description: str = Field("", description="what it is for")
    seed: int = Field(0, ge=0, description="seed of new weights, batch order and sampling")
    student: StudentSettings = StudentSettings()
    data: DataSettings = DataSettings()
    loop: LoopSettings = LoopSettings()
    align: AlignSettings = AlignSettings()
    select: SelectSettings = SelectSettings()
    logits: LogitsSettings = LogitsSettings()
    shrink: ShrinkSettings = ShrinkSettings()
    longctx: LongctxSettings = LongctxSettings()
    eval: EvalSettings = EvalSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    @property
    def stages(self) -> list[str]:
        """Stages that run, in order; what is not tied needs no loops learnt, and a student with
        nothing converted is not aligned.
        """
        wanted = [stage for stage in STAGES if getattr(self, stage).enabled]
        idle = [] if self.student.converts else ["align", "select"]
        idle += [] if self.student.loop_start is not None else ["loop"]
        idle += [] if self.student.shrinks else ["shrink"]
        return [stage for stage in wanted if stage not in idle]

    @model_validator(mode="after")
    def _rows_reach_beyond_the_window(self) -> Self:
        """Where rows are no longer than what is exact nothing is there to learn or to measure."""
        name, exact = self.student.exact_tokens
        for stage in self.stages if exact else ():
            settings = getattr(self, stage)
            if stage == "loop":  # all layers are full then
                continue
            idle = stage == "select" and settings.method in ("uniform", "list")
            # An indexer learns from all the attention there is, chosen or not.
            idle |= stage == "align" and self.student.kinds == ["dsa"]
            if settings.seq_len_tokens <= exact and not idle:
                raise ValueError(
                    f"{stage}.seq_len_tokens {settings.seq_len_tokens} shows nothing outside"
                    f" {name} {exact}; make the rows longer or that smaller"
                )
        return self

    @model_validator(mode="after")
    def _pools_shrink_once_routing_is_learned(self) -> Self:
        """While a depth has its layer, nothing of it can leave."""
        if "shrink" in self.stages and not self.logits.enabled:
            raise ValueError(
                "the stage shrink needs routing that the stage logits has released; set"
                " logits.enabled=true, or leave out student.pool_schedule"
            )
        for stage in ("shrink", "longctx") if "shrink" in self.stages else ():
            if share := getattr(self, stage).release_share:
                raise ValueError(
                    f"{stage}.release_share is {share}, but pools that shrank lack layers to begin"
                    " from; leave it at 0"
                )
        return self

    @model_validator(mode="after")
    def _list_method_has_a_list(self) -> Self:
        """`select.method: list` takes the layers from `student.full_layers`."""
        if self.select.method == "list" and not isinstance(self.student.full_layers, list):
            raise ValueError(
                "select.method list needs the layers themselves: student.full_layers=[0,4,8]"
            )
        return self
