"""What a benchmark case is made of.

Parity is judged at the timed shape, so on the very kernels that are timed: the upstream gradient is
zero outside a sample, and of every result the sample is compared with the reference on the sample
alone. For causal ops the sample is the beginning of the last row, for ops by token a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ltconvert.benchmarks.rows import Target
from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import Verdict, judge

Inputs = dict[str, Tensor]
Scale = Literal["full", "quick", "tiny"]  # tiny: to try the benchmark itself on a CPU
Function = Callable[..., Any]  # inputs by name -> a tensor, or a tuple of tensors

TRAINING, STEP = ("fwd", "bwd", "fwd+bwd"), ("eager", "graph")
_RESULT = "result"


@dataclass(frozen=True)
class Peer:
    """What ours is compared with.

    Attributes:
        load: imports the package and returns the function; may raise, the row says why.
        same_result: whether its result has to be ours.
    """

    load: Callable[[], Function]
    same_result: bool = True


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        make: fresh random inputs, from a seed.
        ours: takes what ``make`` gives by name.
        grads: names of the inputs that get gradients; the first result is differentiated.
        phases: of TRAINING or STEP.
        sample: the part of an input or result (by name) on which parity is judged.
        sample_first: ours runs on the sample, too, where a sample of the results is not enough.
        sets: how many sets of inputs calls take turns with (STEP only).
        floor: milliseconds by phase; a copy of the bytes that have to move when None.
        targets: by phase.
        peer_memory: peak memory of peers is of interest.
    """

    op: str
    shape: str
    make: Callable[[int], Inputs]
    ours: Function
    grads: tuple[str, ...] = ()
    phases: tuple[str, ...] = TRAINING
    peers: Mapping[str, Peer] = field(default_factory=dict)
    sample: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    sample_first: bool = False
    sets: int = 1
    floor: Callable[[Inputs], Mapping[str, float]] | None = None
    floor_name: str = "copy"
    targets: Mapping[str, Target] = field(default_factory=dict)
    peer_memory: bool = False


@dataclass(frozen=True)
class Options:
    """How a run measures.

    Attributes:
        until: time.time() after which peers are skipped.
    """

    device: torch.device
    backend: str = "triton"
    peers: bool = True
    peer_seconds: float = 60.0
    until: float = float("inf")
    rep_ms: int = 100


def parity(case: Case, inputs: Inputs, backend: str) -> list[Verdict]:
    """The three-way judgement of every result and gradient on the case's sample."""
    small = {name: case.sample(name, tensor.detach()) for name, tensor in inputs.items()}
    dtypes = {tensor.dtype for tensor in inputs.values() if tensor.dtype.is_floating_point}
    working = min(dtypes, key=lambda x: x.itemsize)
    upstream = torch.randn(0)

    def results(values: Inputs, wide: bool, sampled: bool) -> dict[str, Tensor]:
        nonlocal upstream
        values = {
            # A copy: a decode step changes its state in place.
            name: x.detach().to(
                torch.float64 if wide and x.is_floating_point() else x.dtype, copy=True
            )
            for name, x in values.items()
        }
        for name in case.grads:
            values[name].requires_grad_()
        outputs = case.ours(**values)
        outputs = tuple(outputs) if isinstance(outputs, tuple) else (outputs,)

        def cut(name: str, x: Tensor) -> Tensor:
            return x.detach().clone() if sampled else case.sample(name, x.detach()).clone()

        found = {f"{_RESULT} {i}": cut(_RESULT, x) for i, x in enumerate(outputs)}
        if case.grads:
            part = found[f"{_RESULT} 0"]
            if upstream.shape != part.shape:
                upstream = torch.randn_like(part) if part.dim() else torch.ones_like(part)
            whole = torch.zeros_like(outputs[0])
            (whole if sampled else case.sample(_RESULT, whole)).copy_(upstream)
            leaves = [values[name] for name in case.grads]
            grads = torch.autograd.grad(outputs[0], leaves, whole)
            found |= {f"d {n}": cut(n, g) for n, g in zip(case.grads, grads, strict=True)}
        return found

    with dispatch.use(backend):
        kernel = results(small if case.sample_first else inputs, False, case.sample_first)
    with dispatch.use("reference"):
        plain = results(small, False, True)
        truth = results(small, True, True)
    return judge(truth, plain, kernel, working)
