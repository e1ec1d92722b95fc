"""Settings of the machine's side of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ltconvert.recipes.base import Settings

CompileSetting = Literal["auto", "off", "layers"]
GraphSetting = Literal["auto", "off"]


class RuntimeSettings(Settings):
    """How fast a run is on its machine; no result depends on it beyond rounding."""

    compile: CompileSetting = Field(
        "auto",
        description=(
            "compile the layers of training steps: `layers`, `off`, or `auto`: on a GPU in"
            " stages with enough steps to make up for it (200)"
        ),
    )

    cuda_graph: GraphSetting = Field(
        "auto",
        description=(
            "record the launches of a training step once and replay them: `off`, or `auto`: on an"
            " NVIDIA GPU in stages of 50 steps or more that do the same work (not a Dreamer's)"
        ),
    )

    @field_validator("compile", "cuda_graph", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML 1.1 reads `off` as false."""
        return "off" if value is False else value
