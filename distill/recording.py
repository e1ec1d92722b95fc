"""A micro-batch's forward and backward passes as one CUDA graph.

A step of a small model is thousands of kernels of a few microseconds, more than a host can launch
in the time that a GPU needs for them. Every step does the same work on other numbers, so its
launches are recorded once and then replayed together (torch.cuda.CUDAGraph).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from ltconvert.distill.data import Batch
from ltconvert.distill.objective import Objective
from ltconvert.errors import first_line
from ltconvert.recipes.runtime import GraphSetting

LEAST_STEPS = 50  # recording takes about as long as this many steps save
PLAIN = 2  # micro-batches of a kind before one is recorded: they compile kernels and make gradients
_TENSORS = ("input_ids_BT", "segment_ids_BT", "labels_BT", "keep_BT")

Values = dict[str, Tensor]
Run = Callable[[Batch, float], Values]
Record = Callable[[Callable[[], Values]], tuple[Values, Callable[[], None]]]


def wanted(setting: GraphSetting, device: torch.device, steps: int) -> bool:
    """Whether the steps of a stage, so many in all, are to be recorded on a device."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return setting == "auto" and nvidia and steps >= LEAST_STEPS


class Passes:
    """Runs an objective's micro-batches: as they are at first, then as a recording of one.

    What ``Objective.work`` answers and the form of a batch say which recording serves; one is kept,
    since each holds the memory of a whole pass. Gradients have to stay where they are between
    steps, set to zero, not to None. Where recording fails, all goes on without.

    Args:
        run: both passes of a micro-batch, at a share of the stage's steps that are done; gradients
            add up.
        on: whether to record at all.
        say: told in a line why recording failed.
        record: launches -> (values that every replay leaves in the same memory, replay).
    """

    def __init__(
        self,
        objective: Objective,
        run: Run,
        *,
        on: bool,
        say: Callable[[str], None],
        record: Record | None = None,
    ) -> None:
        self.on = on
        self._objective, self._run, self._say = objective, run, say
        self._record = _cuda_graph if record is None else record
        self._kind: Hashable = None
        self._seen = 0  # micro-batches of this kind in a row
        self._recording: _Recording | None = None

    def __call__(self, batch: Batch, progress: float) -> Values:
        """Losses of the micro-batch, to be read before the next one."""
        work = self._objective.work(progress) if self.on else None
        if work is None:
            return self._run(batch, progress)
        self._count((work, batch.padded, batch.input_ids_BT.shape))
        if self._recording is None and self._seen > PLAIN:
            try:
                self._recording = _Recording(batch, progress, self._run, self._record)
            except Exception as error:
                self.on = False
                self._say(f"recording steps failed, going on without: {first_line(error)}")
        if self._recording is None:
            return self._run(batch, progress)
        return self._recording(batch)

    def _count(self, kind: Hashable) -> None:
        if kind != self._kind:
            self._kind, self._seen, self._recording = kind, 0, None
        self._seen += 1


class _Recording:
    """One micro-batch's launches, over tensors of its own that each batch is copied into."""

    def __init__(self, batch: Batch, progress: float, run: Run, record: Record) -> None:
        self._batch = replace(batch, **{name: getattr(batch, name).clone() for name in _TENSORS})
        self._values, self._replay = record(lambda: run(self._batch, progress))

    def __call__(self, batch: Batch) -> Values:
        for name in _TENSORS:
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._replay()
        return self._values


def _cuda_graph(launch: Callable[[], Values]) -> tuple[Values, Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    # Other threads, which read data into pinned memory, may go on meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values = launch()
    return values, graph.replay
