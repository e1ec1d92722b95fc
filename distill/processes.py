"""Which of the processes of one run this is, and the randomness that is its own."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def rank_and_world() -> tuple[int, int]:
    """(this process, number of processes), as torchrun and `accelerate launch` set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def seed_everything(seed: int, stage: str, step: int, process: int) -> None:
    """Start all random generators at a point that these four alone decide."""
    key = f"{seed}/{stage}/{step}/{process}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
