"""Which implementation runs each op, and why.

Every op is a package `kernels/<op>/` with one module a backend, `kernels/<op>/<backend>.py`, that
defines the functions of the op under the public names. `OPS` lists the backends that exist: adding
one is adding its name there. `auto` takes the fastest that can run; a backend asked for by name
either runs or is an error that says why not, never a silent fallback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, get_args

import torch

Backend = Literal["auto", "reference", "triton"]
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None  # a graph cannot trace the search

OPS: dict[str, tuple[str, ...]] = {
    "delta_rule": ("reference", "triton"),
    "decay_attention": ("reference", "triton"),
    "short_conv": ("reference", "triton"),
    "norm_gate": ("reference", "triton"),
    "window_attention": ("reference", "triton"),
    "depth_attention": ("reference", "triton"),
    "gdn_step": ("reference", "triton"),
    "gdn_window_step": ("reference", "triton"),
    "decode_attention": ("reference", "triton"),
    "decode_linear": ("reference", "triton"),
    "decode_experts": ("reference", "triton"),
    "decode_route": ("reference", "triton"),
    "decode_heads": ("reference", "triton"),
    "decode_norm": ("reference", "triton"),
    "linear_kl": ("reference", "triton"),
    "sparse_attention": ("reference", "triton"),
    "index_topk": ("reference", "triton"),
    "permute": ("reference", "triton"),
    "index_kl": ("reference", "triton"),
}


@dataclass(frozen=True)
class Requests:
    """What the process asks for: one backend for all ops, and exceptions by op."""

    everywhere: str = "auto"
    per_op: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.per_op:
            _check_op(op)
        for backend in (self.everywhere, *self.per_op.values()):
            _check_backend(backend)

    def backend(self, op: str) -> str:
        """The backend asked for `op`."""
        return self.per_op.get(op, self.everywhere)


def choose(
    op: str, requested: str, device: torch.device | str, limit: str | None = None
) -> tuple[str, str]:
    """Pick the backend of `op` on `device`: (backend, reason).

    `limit`: why the Triton kernel does not take this call (`kernels.limits`).
    Raises ValueError when `op` or `requested` is unknown, or when a backend asked for by name
    cannot run there.
    """
    _check_op(op)
    _check_backend(requested)
    device = torch.device(device)
    if requested == "auto":
        obstacle = _obstacle(op, "triton", device, limit) or _slow(device)
        return ("triton", "fastest here") if obstacle is None else ("reference", obstacle)
    obstacle = _obstacle(op, requested, device, limit)
    if obstacle is not None:
        raise ValueError(
            f"kernel backend {requested!r} cannot run {op} on {device}: {obstacle}; "
            f"use 'auto' or one of {', '.join(OPS[op])}"
        )
    return requested, "asked for"


def table(requested: str, device: torch.device | str) -> list[tuple[str, str, str]]:
    """What `choose` says of every op: rows (op, backend, reason)."""
    return [(op, *choose(op, requested, device)) for op in OPS]


def set_default(requested: str = "auto", **per_op: str) -> None:
    """Set the backend that ops use in this process; by name, exceptions: `linear_kl="triton"`."""
    global _requests
    _requests = Requests(requested, dict(per_op))


@contextmanager
def use(requested: str = "auto", **per_op: str) -> Iterator[None]:
    """Set the process's default inside a `with` block, then put the earlier one back."""
    global _requests
    before, _requests = _requests, Requests(requested, dict(per_op))
    try:
        yield
    finally:
        _requests = before


def asked_for(op: str) -> str:
    """The backend that this process asks for `op`: `auto`, or a name."""
    return _requests.backend(op)


def implementation(op: str, device: torch.device, limit: str | None = None) -> ModuleType:
    """The module that runs `op` on `device` under the process's default; `limit` as in `choose`."""
    backend, _ = choose(op, asked_for(op), device, limit)
    return sys.modules[_imported(f"{__package__}.{op}.{backend}")]


def preload() -> None:
    """Import every backend: while a graph is traced, an import comes too late for the tracer."""
    for op, backends in OPS.items():
        for backend in backends:
            if backend != "triton" or TRITON_INSTALLED:
                _imported(f"{__package__}.{op}.{backend}")


@torch.compiler.assume_constant_result
def _imported(name: str) -> str:
    """`name`, imported; apart because a graph cannot trace an import."""
    importlib.import_module(name)
    return name


def _obstacle(op: str, backend: str, device: torch.device, limit: str | None) -> str | None:
    """Why `backend` cannot run `op` on `device`; None when it can."""
    if backend not in OPS[op]:
        return f"no {backend} kernel for this op yet"
    if backend == "triton":
        if not TRITON_INSTALLED:
            return "triton is not installed"
        if device.type not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
            return f"triton needs a GPU, the tensors are on {device.type}"
        return limit
    return None


def _slow(device: torch.device) -> str | None:
    """Why Triton, although it can run on `device`, is not the fastest there."""
    return f"Triton is only interpreted on {device.type}" if device.type == "cpu" else None


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; the ops are {', '.join(OPS)}")


def _check_backend(backend: str) -> None:
    if backend not in get_args(Backend):
        known = ", ".join(get_args(Backend))
        raise ValueError(f"unknown kernel backend {backend!r}; use one of {known}")


_requests = Requests()
