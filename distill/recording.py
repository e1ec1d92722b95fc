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
from ltconvert.kernels import dispatch
from ltconvert.recipes.runtime import GraphSetting

LEAST_STEPS = 50  # fewer gain little; where it begins to pay was not measured
PLAIN = 2  # micro-batches of a kind before one is recorded: they compile kernels and make gradients
_TENSORS = ("input_ids_BT", "segment_ids_BT", "labels_BT", "keep_BT")

Values = dict[str, Tensor]
Run = Callable[[Batch, float], Values]
Record = Callable[[Callable[[], Values], torch.device], tuple[Values, Callable[[], None]]]


def wanted(setting: GraphSetting, device: torch.device, steps: int) -> bool:
    """Whether the steps of a stage, so many in all, are to be recorded on a device."""
    if setting != "auto" or steps < LEAST_STEPS:
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # The loss in plain PyTorch looks at values, which cannot be recorded.
    return dispatch.choose("linear_kl", dispatch.asked_for("linear_kl"), device)[0] == "triton"


class Passes:
    """Runs an objective's micro-batches: as they are at first, then as a recording of one.

    What ``Objective.work`` answers and the form of a batch say which recording serves; one is kept,
    since each holds the memory of a whole pass. Where recording fails, all goes on without.

    Args:
        on: whether to record at all.
        say: told in a line why recording failed.
        record: (launches, device) -> (values that every replay leaves in the same memory, replay).

    Attributes:
        holds: whether gradients have to stay where they are until the next step, set to zero, not
            to None: a recording adds to those that it was made with.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        on: bool,
        say: Callable[[str], None],
        record: Record | None = None,
    ) -> None:
        self.holds = False
        self._on, self._objective, self._say = on, objective, say
        self._record = _cuda_graph if record is None else record
        self._kind: Hashable = None
        self._seen = 0  # micro-batches of this kind in a row
        self._recording: _Recording | None = None

    def __call__(self, run: Run, batch: Batch, progress: float) -> Values:
        """Losses of the micro-batch, to be read before the next one.

        Args:
            run: both passes of a micro-batch, at a share of the stage's steps that are done;
                gradients add up.
        """
        work = self._objective.work(progress) if self._on else None
        self.holds = work is not None
        self._count((work, batch.padded, batch.input_ids_BT.shape) if self.holds else None)
        if self.holds and self._recording is None and self._seen > PLAIN:
            try:
                self._recording = _Recording(batch, progress, run, self._record)
            except Exception as error:
                self._on = self.holds = False
                # What ends a capture complains of its own; the cause came before.
                cause = first_line(error.__context__ or error)
                self._say(f"recording steps failed, going on without: {cause}")
        if self._recording is None:
            return run(batch, progress)
        return self._recording(batch)

    def close(self) -> None:
        """Give up what a recording holds."""
        self._recording = None

    def _count(self, kind: Hashable) -> None:
        if kind != self._kind:
            self._kind, self._seen, self._recording = kind, 0, None
        self._seen += 1


class _Recording:
    """One micro-batch's launches, over tensors of its own that each batch is copied into."""

    def __init__(self, batch: Batch, progress: float, run: Run, record: Record) -> None:
        own = replace(batch, **{name: getattr(batch, name).clone() for name in _TENSORS})
        device = batch.input_ids_BT.device
        self._values, self._replay = record(lambda: run(own, progress), device)
        self._batch = own

    def __call__(self, batch: Batch) -> Values:
        for name in _TENSORS:
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._replay()
        return self._values


def _cuda_graph(
    launch: Callable[[], Values], device: torch.device
) -> tuple[Values, Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    # A capture that fails does not leave its stream; `here` is gone back to all the same. Other
    # threads, which read data into pinned memory, may go on meanwhile.
    with (
        torch.cuda.device(device),
        torch.cuda.stream(here),
        torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"),
    ):
        values = launch()
    return values, graph.replay
