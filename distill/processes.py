"""Which of the processes of one run this is."""

from __future__ import annotations

import os


def rank_and_world() -> tuple[int, int]:
    """(this process, number of processes), as torchrun and `accelerate launch` set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
