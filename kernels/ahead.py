"""Triton kernels compiled before their first launch, many at a time.

Triton compiles a kernel where it is first launched: that thread waits, for one kernel after the
other. Little of it is Python; the rest (MLIR, LLVM, ptxas) goes on in several threads at once.
Which kernels there will be, of which types and constants, the ops say themselves: called on fake
tensors, which have all but values, they launch nothing, and what they would launch is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACE = "ltconvert"
_MOST_THREADS = 8
THREADS = "ltconvert-compile"  # how their names begin
BUSY = Lock()  # held while kernels are compiled ahead


class Bodies(TorchDispatchMode):
    """Run the body of our registered ops on fake tensors, where PyTorch asks for shapes alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What PyTorch calls in place of an op."""
        if func.namespace == _NAMESPACE:
            op = torch._library.custom_ops.OPDEFS[func.name()]
            return op._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Ahead:
    """What is being compiled; ``launch`` stands in for the launch of every kernel meanwhile.

    Args:
        launch: Triton's own, called with the kernel.
        device: the GPU that is compiled for.
    """

    def __init__(self, launch: Callable[..., Any], device: torch.device) -> None:
        self._launch = launch
        self._coming: dict[Any, dict[Hashable, Future[Any]]] = {}  # by kernel, by what is known
        self._threads = ThreadPoolExecutor(
            max_workers=min(_MOST_THREADS, os.cpu_count() or 1),
            thread_name_prefix=THREADS,
            initializer=_use,
            initargs=(device,),
        )

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Compile in a thread if an argument is fake; else launch what may have to come first."""
        coming = self._coming.get(kernel, {})
        if not any(isinstance(x, FakeTensor) for x in args):
            wait(list(coming.values()))
            return self._launch(kernel, *args, grid=grid, warmup=warmup, **options)
        known = tuple(_Pointer.of(x) if isinstance(x, FakeTensor) else x for x in args)
        key = (*map(_form, known), *options.items())
        if key not in coming:
            compiled = self._threads.submit(self._compile, kernel, known, grid, options)
            self._coming[kernel] = {**coming, key: compiled}
        return None

    def finish(self) -> None:
        """Wait for all. What failed fails again where it is needed."""
        self._threads.shutdown(wait=True)

    def _compile(self, kernel: Any, args: Any, grid: Any, options: dict[str, Any]) -> None:
        self._launch(kernel, *args, grid=grid, warmup=True, **options)


def _form(argument: Any) -> Any:
    """What is compiled anew for: of a number no more than whether it is 1, a multiple of 16, long.

    The constants of our kernels are given by name, which leaves them as they are.
    """
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return type(argument) if isinstance(argument, float) else argument


@dataclass(frozen=True)
class _Pointer:
    """What Triton looks at in a tensor: its type, and whether 16 bytes can be read at once."""

    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, fake: Tensor) -> _Pointer:
        """As a tensor of its own memory begins, which is aligned, or a view of one."""
        return cls(fake.dtype, fake.storage_offset() * fake.element_size() % 16 == 0)

    def data_ptr(self) -> int:
        """Stands for the address."""
        return 0 if self.aligned else 1

    def ptr_range(self) -> int:
        """Stands for the size of the memory, which some backends ask for."""
        return 0


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Compile what ops launch on fake tensors, inside their mode; waits for it at the end.

    Launches on real tensors go on meanwhile in other threads, each after what is being compiled of
    its kernel.
    """
    with BUSY:
        _use(device)
        launcher = _launcher()
        own = launcher.run
        ahead = Ahead(own, device)

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            return ahead.launch(kernel, *args, **options)

        launcher.run = run
        try:
            with Bodies():
                yield
        finally:
            ahead.finish()
            launcher.run = own


def _launcher() -> Any:
    """The class of kernels, whose ``run`` launches them."""
    # Compiling imports it, and what imports each other is not for several threads at once.
    import triton.compiler.code_generator  # noqa: F401
    from triton.runtime.jit import JITFunction

    return JITFunction


def _use(device: torch.device) -> None:
    """Let this thread use the GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
