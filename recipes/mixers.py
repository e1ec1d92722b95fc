"""Settings of mixers: which there are, which layers stay full, what each is made with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from ltconvert.recipes.base import Settings

Mixer = Literal[
    "gdn",
    "gdn_window",
    "kda",
    "deltanet",
    "mamba2",
    "retnet",
    "dsa",
    "nsa",
    "window",
    "moda",
    "full",
]
LINEAR: tuple[Mixer, ...] = ("gdn", "gdn_window", "kda", "deltanet", "mamba2", "retnet")


class MixerSettings(Settings):
    """Part of the settings of a student; a setting of a mixer that is not there does nothing."""

    mixer: Mixer | list[Mixer] = Field(
        "gdn",
        description="mixer of the converted layers; several take turns from layer to layer;"
        " `dreamer`: `full`, and mixers are the teacher's, whatever they are",
    )
    full_layers: int | float | list[int] | str = Field(
        0.25,
        description="layers kept as full attention: a share (0.25), a count (8), a list ([0, 4]), "
        "every fifth (4:1), or a count at both ends (bookend:8)",
    )
    full_mixer: Literal["full", "moda"] = Field(
        "full", description="what these are: attention, or attention that reads a depth stream"
    )
    window_tokens: PositiveInt | list[PositiveInt] = Field(
        128,
        description=(
            "window of `window`, `gdn_window` and `nsa` mixers, the token itself counted; `window`:"
            " also a list, one a loop"
        ),
    )
    top_k_tokens: int = Field(
        2048, gt=0, description="tokens that a query of a `dsa` mixer attends to"
    )
    index_heads: int = Field(
        4, gt=0, description="heads of the indexer that chooses them, as wide as the teacher's"
    )
    block_tokens: int = Field(32, gt=0, description="size of the blocks of an `nsa` mixer")
    chosen_blocks: int = Field(
        16, gt=0, description="blocks that a query of an `nsa` mixer attends to, its window aside"
    )
    depth_writers: Literal["attention", "ffn", "projected"] = Field(
        "projected",
        description="`moda`: what leaves keys and values in the depth stream: attention its own,"
        " MLPs beside it by a projection, or both by projections",
    )
    depth_slots: str = Field(
        "all",
        pattern=r"^(all|(last|every|mean):[1-9][0-9]*)$",
        description="`moda`: of which earlier layer visits: `all`, `last:8`, of every fourth"
        " (`every:4`), the means of four at a time (`mean:4`)",
    )
    depth_rope: bool = Field(
        True,
        description="`moda`: depth keys stand at the token's own position; else, as published,"
        " they have none",
    )
    depth_bias: float | None = Field(
        None, description="`moda`: where a learned bias of depth for each head starts"
    )
    depth_linear_writes: bool = Field(
        False, description="`moda` beside linear layers: their MLPs write, too"
    )
    short_conv: bool = Field(
        True, description="causal depthwise convolution on q, k, v (starts as the identity)"
    )
    conv_size: int = Field(4, ge=2, description="taps of the short convolution")
    sdpa_gate: bool = Field(False, description="output gate on full layers, neutral at the start")

    @property
    def kinds(self) -> list[Mixer]:
        """The mixers of converted layers, each once or, where they take turns, in their order."""
        return self.mixer if isinstance(self.mixer, list) else [self.mixer]

    @property
    def converts(self) -> bool:
        """Whether a mixer stands for the teacher's attention, and does not merely start as it."""
        return not set(self.kinds) <= {"full", "moda"}

    @property
    def exact_tokens(self) -> tuple[str, int]:
        """Up to how many tokens the student is the teacher, and the settings that say so; 0: none.

        That of the least exact mixer.
        """
        return min((self._exact(kind) for kind in self.kinds), key=lambda found: found[1])

    def _exact(self, kind: Mixer) -> tuple[str, int]:
        windows = self.window_tokens
        least = windows if isinstance(windows, int) else min(windows)
        if kind in ("window", "gdn_window"):
            return "student.window_tokens", least
        if kind == "dsa":
            return "student.top_k_tokens", self.top_k_tokens
        if kind == "nsa":
            tokens = least + self.block_tokens * self.chosen_blocks
            return "student.window_tokens + block_tokens * chosen_blocks", tokens
        return "", 0

    def full(self, num_layers: int) -> int | float | list[int]:
        """``full_layers`` with patterns written out as lists; not held against ``num_layers``."""
        if isinstance(self.full_layers, str):
            return full_by_pattern(self.full_layers, num_layers)
        return self.full_layers

    def mixers(self, full: Collection[int], num_layers: int) -> list[str]:
        """The mixer of every physical layer."""
        kinds = self.kinds
        return [self.full_mixer if i in full else kinds[i % len(kinds)] for i in range(num_layers)]

    @field_validator("mixer")
    @classmethod
    def _mixer(cls, value: Mixer | list[Mixer]) -> Mixer | list[Mixer]:
        if value == []:
            raise ValueError("name at least one mixer")
        return value

    @field_validator("full_layers")
    @classmethod
    def _full_layers(cls, value: int | float | list[int] | str) -> int | float | list[int] | str:
        """A share lies in [0, 1], a count is not negative, a list names each layer once."""
        if isinstance(value, str):
            full_by_pattern(value, 1)
            return value
        if isinstance(value, list):
            if len(set(value)) != len(value) or any(layer < 0 for layer in value):
                raise ValueError("a list of layers names each once, counted from 0")
            return sorted(value)
        if value < 0 or (isinstance(value, float) and value > 1):
            raise ValueError("expected a share in [0, 1], a count, or a list of layers")
        return value

    @model_validator(mode="after")
    def _moda_leaves_nothing_to_choose(self) -> Self:
        """All its layers have full attention: a number of full layers would mean nothing."""
        if self.mixer == "moda" and isinstance(self.full_layers, int | float) and self.full_layers:
            raise ValueError(
                f"with student.mixer moda, student.full_layers {self.full_layers} would choose"
                " nothing: set it to 0, or list the layers that do not read depth"
            )
        return self


def full_by_pattern(pattern: str, num_layers: int) -> list[int]:
    """Full layers of ``a:b``, b after every a others, or ``bookend:n``, n at both ends together.

    The first end gets one more where n is odd.

    Raises:
        ValueError: words of another form.
    """
    name, _, size = pattern.partition(":")
    if not size.isdecimal() or not (name == "bookend" or name.isdecimal()):
        raise ValueError(f"expected a:b (4:1) or bookend:n (bookend:8), got {pattern!r}")
    if name == "bookend":
        ends = min(int(size), num_layers)
        front = -(-ends // 2)
        return [*range(front), *range(num_layers - ends + front, num_layers)]
    others = int(name)
    if others + int(size) == 0:
        raise ValueError("0:0 names no layer")
    return [i for i in range(num_layers) if i % (others + int(size)) >= others]
