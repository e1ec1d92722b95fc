"""Which precision matrix products run in. Weights and optimiser stay in fp32 either way."""

from __future__ import annotations

import time
from typing import Literal

import torch

from ltconvert.errors import UserError

Precision = Literal["fp32", "bf16"]

_SIZE = 768  # tokens and width of the probe; the shapes of small models on a CPU
_REPEATS = 3
# A near tie goes to fp32, also so that a repeated measurement does not flip the choice.
_CLEARLY_FASTER = 1.3


def pick_precision(device: torch.device | str, requested: str = "auto") -> tuple[Precision, str]:
    """`fp32` or `bf16` for a device, and the reason in a few words.

    A CPU is measured, not assumed: with bf16 matrix units bf16 is many times faster than fp32,
    without them it is slower.

    Raises:
        UserError: `requested` is none of auto, fp32, bf16, or the device has no bf16.
    """
    device = torch.device(device)
    if requested == "fp32":
        return "fp32", "as asked"
    if requested == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise UserError(f"--precision bf16: {device} has no bf16; use --precision fp32")
        return "bf16", "as asked"
    if requested != "auto":
        raise UserError(f"--precision {requested!r}: expected auto, fp32 or bf16")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return "bf16", "the GPU has bf16 matrix units"
        return "fp32", "the GPU has no bf16"
    return _measured(device)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Matrix products in bf16 where `precision` says so, else everything as stored."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _measured(device: torch.device) -> tuple[Precision, str]:
    fp32 = _matmul_seconds(device, torch.float32)
    bf16 = _matmul_seconds(device, torch.bfloat16, limit=4 * _REPEATS * fp32)
    times = f"a matrix product takes {bf16 * 1e3:.1f} ms in bf16, {fp32 * 1e3:.1f} ms in fp32"
    return ("bf16" if bf16 * _CLEARLY_FASTER < fp32 else "fp32"), f"measured: {times}"


def _matmul_seconds(device: torch.device, dtype: torch.dtype, limit: float = float("inf")) -> float:
    """Best of a few products, the first one (which sets up the library) left out."""
    a = torch.full((_SIZE, _SIZE), 0.5, device=device, dtype=dtype)
    best, begun = float("inf"), time.perf_counter()
    for repeat in range(_REPEATS + 1):
        start = time.perf_counter()
        a @ a
        end = time.perf_counter()
        if repeat:
            best = min(best, end - start)
        if repeat and end - begun > limit:  # hopelessly slow: do not wait for the rest
            break
    return best
