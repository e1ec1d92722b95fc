"""Kernels compiled ahead: when, how often, and what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ltconvert.kernels import ahead

pytest.importorskip("triton")


class Kernel:
    """Stands for a kernel of Triton's: notes launches and compilations."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.go_on = threading.Event()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> str:
        """What Triton's does."""
        if warmup:
            assert self.go_on.wait(20)
            if options.get("bad"):
                raise RuntimeError("no such layout")
        kinds = tuple((x.dtype, x.data_ptr() % 16) if hasattr(x, "dtype") else x for x in args)
        self.events.append(("compile" if warmup else "launch", *kinds, *options.items()))
        return "launched"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(ahead, "_launcher", lambda: Kernel)
    return Kernel()


def fake(*size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=torch.bfloat16)


def test_fake_launches_compile_each_form_once_and_launch_nothing(kernel: Kernel) -> None:
    own = Kernel.run
    kernel.go_on.set()
    with FakeTensorMode(), ahead.compiling_ahead(torch.device("cpu")):
        assert kernel[(1,)](fake(3), 5, BLOCK=16) is None
        kernel[(2,)](fake(9)[8:], 5, BLOCK=16)  # the same type, as aligned, the same number
        kernel[(1,)](fake(3), 7, BLOCK=16)  # a number like 5
        kernel[(1,)](fake(3)[1:], 5, BLOCK=64)
        kernel[(1,)](fake(3), 32, BLOCK=16)
        kernel[(1,)](fake(3), 5, BLOCK=32)
    assert len(kernel.events) == 4 and set(kernel.events) == {
        ("compile", (torch.bfloat16, 0), 5, ("BLOCK", 16)),
        ("compile", (torch.bfloat16, 1), 5, ("BLOCK", 64)),
        ("compile", (torch.bfloat16, 0), 32, ("BLOCK", 16)),
        ("compile", (torch.bfloat16, 0), 5, ("BLOCK", 32)),
    }
    assert Kernel.run is own


def test_a_launch_waits_for_its_kernel_alone(kernel: Kernel) -> None:
    other, real = Kernel(), torch.ones(3)
    with FakeTensorMode(), ahead.compiling_ahead(torch.device("cpu")):
        kernel[(1,)](fake(3))
        thread = threading.Thread(target=lambda: (other[(1,)](real), kernel[(1,)](real)))
        thread.start()
        while not other.events:
            thread.join(0.01)
        assert not kernel.events
        kernel.go_on.set()
        thread.join(20)
        assert [event[0] for event in kernel.events] == ["compile", "launch"]


def test_what_cannot_be_compiled_fails_where_it_is_needed(kernel: Kernel) -> None:
    kernel.go_on.set()
    with FakeTensorMode(), ahead.compiling_ahead(torch.device("cpu")):
        kernel[(1,)](fake(3), bad=True)
    assert not kernel.events


def test_an_error_between_puts_the_launcher_back(kernel: Kernel) -> None:
    own = Kernel.run
    with pytest.raises(ValueError, match="in between"):  # noqa: SIM117
        with ahead.compiling_ahead(torch.device("cpu")):
            raise ValueError("in between")
    assert Kernel.run is own


def test_registered_ops_run_their_bodies_on_fake_tensors() -> None:
    """PyTorch alone would ask for the shape of the output."""
    from ltconvert.kernels.norm_gate.triton import norm_gate

    launched = []
    with FakeTensorMode(), ahead.Bodies(), pytest.MonkeyPatch.context() as patch:
        import ltconvert.kernels.norm_gate.triton as module

        class Noted:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                return lambda *args, **options: launched.append(options["D"])

        patch.setattr(module, "forward_kernel", Noted())
        y = norm_gate(fake(4, 8), fake(8), fake(4, 8), eps=1e-5, gate_fn="silu")
    assert launched == [8] and y.shape == (4, 8)
