"""Clocks of the benchmark: kernels with a cold cache, rounds of small calls, graphs, memory.

On a CPU the same functions use the wall clock, so that the benchmark itself can be tried there.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _device as default_device

Call = Callable[[], object]


class TimeLimit(BaseException):
    """A call took longer than it was given; no `except Exception` on its way may hold it up."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeLimit once the block takes longer, in the middle of compiling or tuning as well.

    A backward pass inside has to run in the calling thread, where signals arrive. One may arrive
    while a block within is being left: modes that it would have restored are restored here.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"no result within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    with _same_modes():
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _same_modes() -> Iterator[None]:
    """Leave PyTorch's modes as they were, whatever the block did to them."""
    gradients, nesting = torch.is_grad_enabled(), _autocast_nesting()
    autocast = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    modes, where, dtype = function_modes(), default_device.CURRENT_DEVICE, torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        while function_modes():
            _pop_mode()
        for mode in modes:
            _push_mode(mode)
        default_device.CURRENT_DEVICE = where  # of `with torch.device(...)`, beside its mode
        for device, enabled in autocast.items():
            torch.set_autocast_enabled(device, enabled)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        if not nesting:
            torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    """How many autocast blocks there are around; the last to be left empties the cache of casts."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once_s(call: Call, device: torch.device) -> tuple[object, float]:
    """What one call returns and the seconds it takes."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def median_ms(call: Call, device: torch.device, rep_ms: int = 100) -> float:
    """Median of single calls, each with an emptied second-level cache."""
    if device.type != "cuda":
        return statistics.median(once_s(call, device)[1] for _ in range(3)) * 1e3
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=25, rep=rep_ms, return_mode="median"))


def round_ms(calls: Sequence[Call], device: torch.device, rounds: int = 20) -> float:
    """Milliseconds a call of calls made back to back, launching included: median over rounds.

    Between calls nothing is awaited, as in a decode loop. Calls that read different memory, in
    sum more than the second-level cache, keep it cold.
    """

    def whole() -> None:
        for call in calls:
            call()

    whole()
    times = [once_s(whole, device)[1] for _ in range(rounds if device.type == "cuda" else 3)]
    return statistics.median(times) / len(calls) * 1e3


def graph_ms(calls: Sequence[Call], device: torch.device) -> float:
    """Milliseconds a call when all calls are replayed as one CUDA graph."""
    if device.type != "cuda":
        raise RuntimeError("CUDA graphs need a GPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what compiles or allocates on a first call may not be captured
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = []  # results have to live as long as the graph
    with torch.cuda.graph(graph):
        for call in calls:
            kept.append(call())
    return round_ms([graph.replay], device) / len(calls)


def peak_gib(call: Call, device: torch.device) -> float | None:
    """Memory that one call adds at its peak, its results included; None where unknown."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    synchronize(device)
    del result
    return float((torch.cuda.max_memory_allocated(device) - before) / 2**30)


def copy_ms(moved_bytes: int, device: torch.device) -> float:
    """Time of a copy that reads and writes so many bytes in sum.

    Copies too small to reach the full bandwidth are scaled down from one that does.
    """
    least = 2**28 if device.type == "cuda" else 2**22
    size = max(moved_bytes, least)
    source = torch.empty(size // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source), device) * moved_bytes / size
