"""What there is: free memory and disk, and how fast this device multiplies and moves data."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_REPEATS = 3


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        free_bytes: memory that a new process can have.
        flops: multiplications and additions a second of a large matrix product in that precision.
        bytes_per_second: of an element-wise pass over memory, reads and writes together.
    """

    name: str
    free_bytes: int
    flops: float
    bytes_per_second: float


def measure(device: torch.device | str, precision: str) -> Machine:
    """Look at the device, for a fraction of a second."""
    device = torch.device(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if device.type == "cuda":
        name, free = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
    else:
        name, free = f"{torch.get_num_threads()} CPU threads", free_memory()
    return Machine(name, free, _flops(device, dtype), _bandwidth(device))


def free_memory() -> int:
    """Bytes of main memory that are free, the container's limit counted."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        limit, used = _number_in(limit_file), _number_in(used_file)
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


def free_disk(folder: Path) -> int:
    """Free bytes where ``folder`` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if device.type == "cuda" else 1024
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    return 2 * size**3 / _best_seconds(device, lambda: a @ a)


def _bandwidth(device: torch.device) -> float:
    a = torch.zeros(1 << (28 if device.type == "cuda" else 24), device=device)
    return 2 * a.numel() * a.element_size() / _best_seconds(device, lambda: a.add_(1.0))


def _best_seconds(device: torch.device, work: object) -> float:
    best = float("inf")
    for repeat in range(_REPEATS + 1):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:  # the first one sets up the library
            best = min(best, time.perf_counter() - start)
    return best
