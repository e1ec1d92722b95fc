"""Which of the processes of one run this is, how they meet, and the randomness of each."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState

T = TypeVar("T")
_TOGETHER = 2**24  # numbers: 64 MiB of gradients


def rank_and_world() -> tuple[int, int]:
    """(this process, number of processes), as torchrun and `accelerate launch` set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True for the one process of a run that writes and prints."""
    return rank_and_world()[0] == 0


def join_processes(device: torch.device) -> None:
    """Connect the processes of a run; before anything else asks accelerate for its state."""
    if rank_and_world()[1] > 1:
        PartialState(cpu=device.type == "cpu")


def _joined() -> bool:
    """Whether this is one of several processes that have met."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def wait_for_everyone() -> None:
    """Let all processes of a run meet; nothing before ``join_processes``, or in a single one."""
    if _joined():
        torch.distributed.barrier()


def all_values(value: T) -> list[T]:
    """What each process of a run has, in their order, for all of them to agree on one."""
    if not _joined():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def take_from_the_first(tensors: Iterable[torch.Tensor]) -> None:
    """Make tensors those of the first process, in place: GPUs that differ compute others."""
    if _joined():
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)


def sum_of_processes(value: torch.Tensor) -> torch.Tensor:
    """A value added up over the processes of a run, in place; as it is in a single one."""
    if _joined():
        torch.distributed.all_reduce(value)
    return value


def average_over_processes(tensors: Sequence[torch.Tensor]) -> None:
    """The mean over the processes of a run, in place; many small tensors travel as one."""
    if not _joined():
        return
    begin, held = 0, 0
    for end, tensor in enumerate(tensors, 1):
        held += tensor.numel()
        if held >= _TOGETHER or end == len(tensors):
            part = tensors[begin:end]
            mean = sum_of_processes(torch.cat([x.flatten() for x in part]))
            mean /= torch.distributed.get_world_size()
            pieces = mean.split([x.numel() for x in part])
            for x, piece in zip(part, pieces, strict=True):
                x.copy_(piece.view_as(x))
            begin, held = end, 0


def seed_everything(seed: int, stage: str, step: int, process: int) -> None:
    """Start all random generators at a point that these four alone decide."""
    key = f"{seed}/{stage}/{step}/{process}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
