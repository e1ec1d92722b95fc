"""Clock and judge of `tune_decode.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import Case, Inputs, parity

CALLS = 48  # in a graph at least, so that launching the graph does not count
REPLAYS = 9


def graph_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds a call, of many in one CUDA graph."""
    if device.type != "cuda":
        return timing.round_ms(calls, device) * 1e3
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    rounds = -(-CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize(device)
    spans = [first.elapsed_time(second) for first, second in pairwise(events)]
    return statistics.median(spans) * 1e3 / (rounds * len(calls))


def right_and_timed(case: Case, inputs: list[Inputs], device: torch.device) -> float:
    """Microseconds of a call.

    Raises:
        ArithmeticError: the result is wrong.
    """
    red = [
        x for x in parity(replace(case, ours=partial(alone, case)), inputs[0], "triton") if not x.ok
    ]
    if red:
        raise ArithmeticError("; ".join(map(str, red)))
    return graph_us([partial(case.ours, **given) for given in inputs], device)


def alone(case: Case, **inputs: Any) -> Any:
    """A call behind everything that made its inputs, as `overlapping` asks for."""
    some = next(iter(inputs.values()))
    timing.synchronize(some.device)
    return case.ours(**inputs)
