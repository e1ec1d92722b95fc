"""Settings of the text that a student learns from."""

from __future__ import annotations

from pydantic import Field

from ltconvert.recipes.base import Settings


class DataSettings(Settings):
    """Where documents come from and how they are split."""

    source: str = Field(
        "pydoc",
        description="`pydoc` (the reference text inside Python, nothing to download), a file or"
        " folder (jsonl, parquet, txt, md, rst; gz, bz2, xz, zst), or a hub id",
    )
    text_field: str = Field("text", description="field that holds the text")
    messages_field: str = Field(
        "messages", description="field that holds a chat, [{role, content}, ...]; used when present"
    )
    hub_config: str | None = Field(None, description="configuration name of a hub data set")
    hub_split: str = Field("train", description="split of a hub data set")
    heldout_share: float = Field(
        0.05, gt=0, lt=1, description="share of documents never trained on"
    )
    shuffle_seed: int = Field(0, ge=0, description="order of the documents")
