"""Settings of what is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from ltconvert.recipes.base import Settings


class EvalSettings(Settings):
    """What is measured after every stage and at the end."""

    heldout_tokens: int = Field(
        65_536, gt=0, description="held-out tokens for KL and perplexity after every stage"
    )
    heldout_seq_len_tokens: int = Field(1024, gt=0, description="length of a held-out row")
    recall_lengths_tokens: list[PositiveInt] = Field(
        [1024, 2048, 4096], description="context lengths of the synthetic recall"
    )
    recall_examples: int = Field(32, gt=0, description="examples a length")
    generation_prompts: int = Field(
        8, ge=0, description="held-out prompts continued by teacher and student"
    )
    generation_tokens: int = Field(48, gt=0, description="new tokens a prompt")
    decode_contexts_tokens: list[PositiveInt] = Field(
        [1024, 4096], description="contexts at which decode speed and cache size are measured"
    )
    loop_cache: Literal["own", "last"] = Field(
        "own",
        description="looped models: `last` also measures decoding in which loops share keys",
    )
    exit_thresholds: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [], description="looped models: also measure decoding that leaves loops at these"
    )
    tasks: list[str] = Field(["ltconvert_offline"], description="lm-eval task names")
    task_limit: int | None = Field(None, gt=0, description="documents a task")
