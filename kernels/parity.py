"""Whether a kernel is as right as PyTorch: three results of one computation, compared.

The truth is computed in fp64; `plain` is PyTorch in the working dtype, `kernel` the kernel on the
same inputs. A kernel may be as far from the truth as plain PyTorch is, plus a tolerance for the
order of its sums and for operands that it rounds on the way to matrix units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Relative to the truth's largest entry (elementwise) and to its norm (as a whole).
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}
# States and their gradients have passed through the rounded operands of every chunk, where plain
# PyTorch keeps them in fp32.
OF_STATES = 1.5
MEANINGLESS = 0.3


class Verdict(NamedTuple):
    """One result. Errors are relative to the norm of the truth; `ok` also looks elementwise."""

    name: str
    kernel_error: float
    plain_error: float
    ok: bool

    def __str__(self) -> str:
        state = "ok" if self.ok else "WRONG"
        return f"{self.name}: kernel {self.kernel_error:.1e}, plain {self.plain_error:.1e}, {state}"


def judge(
    truth: Mapping[str, Tensor | None],
    plain: Mapping[str, Tensor | None],
    kernel: Mapping[str, Tensor | None],
    dtype: torch.dtype,
) -> list[Verdict]:
    """Compare named results (outputs and gradients); what is None in `truth` must be in all.

    Where the truth is all zeros, the kernel has to be within the tolerance itself. NaN is wrong.
    """
    return [
        _judge_one(name, want, plain[name], kernel[name], _tolerance(name, dtype))
        for name, want in truth.items()
    ]


def _tolerance(name: str, dtype: torch.dtype) -> float:
    wider = "state" in name and dtype in (torch.float16, torch.bfloat16)
    return TOLERANCES[dtype] * (OF_STATES if wider else 1.0)


def check(verdicts: list[Verdict]) -> None:
    """Raise AssertionError that lists every verdict unless all are ok."""
    if not all(verdict.ok for verdict in verdicts):
        raise AssertionError("; ".join(map(str, verdicts)))


def _judge_one(
    name: str, truth: Tensor | None, plain: Tensor | None, kernel: Tensor | None, tolerance: float
) -> Verdict:
    if truth is None or plain is None or kernel is None:
        return Verdict(name, 0.0, 0.0, truth is plain is kernel)
    if truth.shape != kernel.shape:
        return Verdict(name, float("inf"), 0.0, False)
    truth, plain, kernel = truth.double(), plain.double(), kernel.double()
    kernel_gap, plain_gap = (truth - kernel).abs(), (truth - plain).abs()
    largest, norm = truth.abs().max(), truth.norm()
    if not largest:
        largest = norm = torch.ones_like(norm)
    elementwise = (kernel_gap <= plain_gap + tolerance * largest).all()
    kernel_error, plain_error = kernel_gap.norm() / norm, plain_gap.norm() / norm
    # A plain result far off measures nothing: a mistake in the comparison must not pass.
    ok = bool(elementwise & (kernel_error <= plain_error + tolerance) & (plain_error < MEANINGLESS))
    return Verdict(name, float(kernel_error), float(plain_error), ok)
