"""Kernels of a decoded token that begin before the one ahead of them has ended.

A step of decoding is a chain of short kernels, each bound by memory. Where one waits for the other
to end, memory idles while the last programs finish, the next ones start and their first reads come.
Programmatic dependent launch (NVIDIA, from Hopper on) starts a kernel as soon as all programs of
the one ahead have started; the kernel itself waits, at a point of its choice, until all before it
have ended. CUDA graphs keep this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

ALLOWED = True  # False: as on a GPU that cannot
_HOPPER = (9, 0)
_active = ContextVar("active", default=False)


@contextmanager
def overlapping() -> Iterator[None]:
    """Let the decode ops called inside begin early, where the GPU can.

    Such a kernel waits before it writes, and before it reads activations, keys and values. What it
    may read earlier are weights, lengths, positions, and what steps before have left in recurrent
    states, convolution histories and in the windows of ``gdn_window_step``: between the kernel that
    wrote these and the op, one has to be launched that is not a decode op. A step of decoding is
    so: its embedding comes between. A state or window must not be used twice in one block.
    """
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def options(device: torch.device, *read_early: Tensor | None) -> dict[str, bool]:
    """The constant and the launch option that say whether a decode kernel begins early.

    Not where one of ``read_early`` has to be copied: the copy is made just before.
    """
    early = ALLOWED and _active.get() and device.type == "cuda" and _able(device.index)
    early = early and all(x is None or x.is_contiguous() for x in read_early)
    # Other backends of Triton do not know the option.
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


@cache
def _able(index: int | None) -> bool:
    from ltconvert.kernels.overlap_kernels import AVAILABLE

    if torch.version.hip is not None or not AVAILABLE:
        return False
    return torch.cuda.get_device_capability(index) >= _HOPPER
