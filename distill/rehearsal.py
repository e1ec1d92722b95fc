"""Triton's compiler at work beside PyTorch's, before the first step of stage `align`.

Triton compiles a kernel where it is first launched, those of a backward pass one after the other
once PyTorch's compiler is done with the layer. A thread that runs the same layers uncompiled has
them compiled by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING

import torch

from ltconvert.distill.compilation import choose, importing
from ltconvert.distill.data import Batch
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.processes import rank_and_world
from ltconvert.distill.stage import StageInputs
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import AlignSettings

if TYPE_CHECKING:
    from ltconvert.distill.align import AlignObjective


@contextmanager
def rehearsing(
    objective: AlignObjective, settings: AlignSettings, inputs: StageInputs
) -> Iterator[None]:
    """Rehearse in a thread while the body trains, where that is worth it; it has ended then."""
    if not rehearses(settings, inputs):
        yield
        return
    importing().join()  # two threads must not import modules that need each other
    dispatch.preload()

    ids_BT = torch.zeros(settings.rows_at_once, settings.seq_len_tokens, dtype=torch.int64)
    # Made here: a new thread has a current device of its own.
    batch = Batch(ids_BT, ids_BT.int(), ids_BT, ids_BT == 0).to(inputs.device)

    def rehearse() -> None:
        # The stage runs into whatever goes wrong here by itself, and says so.
        with suppress(Exception), torch.cuda.device_of(batch.input_ids_BT), inputs.autocast():
            objective.rehearse(batch)

    objective.rehearsal = Thread(target=rehearse, daemon=True)
    objective.rehearsal.start()
    try:
        yield
    finally:
        objective.rehearsal.join()


def rehearses(settings: AlignSettings, inputs: StageInputs) -> bool:
    """Whether a stage's steps are compiled for a GPU that has room for two at a time."""
    device, steps = inputs.device, plan_steps(settings, rank_and_world()[1]).steps
    if device.type != "cuda" or not choose(inputs.recipe.runtime.compile, device, steps).compiled:
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free > total // 2
