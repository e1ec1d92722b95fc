"""What a selection method gets to see, and the measures that several methods share.

Shape letters: B rows, T tokens, C hidden width, N scored tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.selection.partial import Progress
from ltconvert.distill.selection.walk import Inputs

if TYPE_CHECKING:
    from ltconvert.distill.data import Batch
    from ltconvert.distill.progress import Bar
    from ltconvert.distill.stage import StageInputs
    from ltconvert.recipes.stages import SelectSettings


@dataclass
class Probe:
    """Inputs of a selection method.

    Attributes:
        teacher: all layers full, frozen; may hold rounded weights, see ``logits.frozen_copy``.
        student: all layers linear, mixers aligned; for forward passes, like the teacher.
        keep: how many physical layers will stay full.
        batches: the text that scores are measured on, the same in every call.
        progress: partial results; a method saves there after every unit of work.
        stage_dir: folder of the stage, for methods that train.
        inputs: the stage's own inputs, with both models' exact weights, for methods that train.
    """

    teacher: LT2ForCausalLM
    student: LT2ForCausalLM
    keep: int
    settings: SelectSettings
    batches: Sequence[Batch]
    progress: Progress
    stage_dir: Path
    inputs: StageInputs

    @property
    def num_layers(self) -> int:
        """Physical layers."""
        return len(self.teacher.model.layers)

    @property
    def device(self) -> torch.device:
        """Where both models are."""
        return self.inputs.device

    def bar(self, total: int) -> AbstractContextManager[Bar]:
        """A progress bar over ``total`` scored layers."""
        return self.inputs.log.bar(f"select {self.settings.method}", total, "layers")

    @contextmanager
    def quiet_forward(self) -> Iterator[None]:
        """Both models in eval mode, no gradients, matrix products in the run's precision."""
        modes = [(model, model.training) for model in (self.teacher, self.student)]
        for model, _ in modes:
            model.eval()
        try:
            with torch.no_grad(), self.inputs.autocast():
                yield
        finally:
            for model, training in modes:
                model.train(training)


def read_batch(batch: Batch, device: torch.device) -> Inputs:
    """The inputs of a pass that scores every token which has a successor."""
    batch = batch.to(device)
    at_BT = (batch.labels_BT >= 0) & batch.keep_BT
    return Inputs(batch.input_ids_BT, batch.keep_BT, batch.segment_ids_BT, at_BT)


class Stopwatch:
    """Seconds since it was made, on top of those of an earlier part."""

    def __init__(self, earlier: float = 0.0) -> None:
        self.started, self.earlier = time.perf_counter(), earlier

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return self.earlier + time.perf_counter() - self.started
