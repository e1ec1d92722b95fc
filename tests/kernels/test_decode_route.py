"""decode_route against the choice by its definition, one logit after the other, in fp64.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_route import decode_route

# rows, channels, experts, nulls, choices
SHAPES = [(1, 1, 1, 0, 1), (3, 40, 7, 0, 2), (2, 70, 70, 3, 5), (4, 33, 3, 2, 3)]
if GPU:
    SHAPES += [(1, 576, 120, 0, 6), (8, 2048, 96, 4, 6), (16, 2047, 1000, 24, 16)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> dict[str, Any]:
    """Biases far enough apart that no rounding changes an order."""
    rows, channels, experts, nulls, top = shape
    every = experts + nulls
    generator = torch.Generator().manual_seed(sum(shape))
    key = torch.randn(every, channels, generator=generator)
    apart = torch.randperm(every, generator=generator) / every
    steps = torch.randint(-2, 3, (experts,), generator=generator)
    return {
        "h_BC": torch.randn(rows, channels, generator=generator).to(device, dtype),
        "keys_XC": (0.005 / every / channels**0.5 * key).to(device, dtype),
        "bias_X": (4 * apart - 2).to(device),
        "balance_E": (steps * (1 + 1 / (7 * every))).to(device),
        "top": top,
        "total": 2.0,
        "eps": 1e-5,
    }


def definition(given: dict[str, Any], by_scores: bool) -> list[tuple[Tensor, list[int], Tensor]]:
    """Of each row: x, the chosen ones in order of their numbers, scores of all."""
    h, keys, bias, balance = (
        given[n].double().cpu() for n in ("h_BC", "keys_XC", "bias_X", "balance_E")
    )
    found = []
    for row in h:
        x = row / (row.square().mean() + given["eps"]).sqrt()
        logits = torch.stack([key @ x + b for key, b in zip(keys, bias, strict=True)])
        scores = 1 / (1 + (-logits).exp())
        ranked = scores if by_scores else logits
        best = sorted(range(len(ranked)), key=lambda e: -float(ranked[e]))[: given["top"]]
        nulls = [e for e in best if e >= len(balance)]
        others = sorted(range(len(balance)), key=lambda e: -float(ranked[e] + balance[e]))
        found.append((x, sorted(nulls + others[: given["top"] - len(nulls)]), scores))
    return found


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest) -> Any:
    with dispatch.use(request.param):
        yield request.param


@pytest.mark.parametrize("by_scores", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value(backend: str, shape: tuple[int, ...], dtype: torch.dtype, by_scores: bool) -> None:
    given = inputs(shape, dtype)
    found = decode_route(**given, by_scores=by_scores)
    assert found.x_BC.dtype == dtype and found.weights_BK.dtype == torch.float32
    close = 1e-5 if dtype == torch.float32 else 1e-2
    for row, (x, chosen, scores) in enumerate(definition(given, by_scores)):
        torch.testing.assert_close(found.x_BC[row].double().cpu(), x, atol=close, rtol=close)
        order = found.chosen_BK[row].cpu().argsort()
        assert found.chosen_BK[row].cpu()[order].tolist() == chosen
        weights = 2.0 * scores[chosen] / scores[chosen].sum()
        torch.testing.assert_close(
            found.weights_BK[row].double().cpu()[order], weights, atol=close, rtol=close
        )
        top = found.top_B[row].double().cpu()
        torch.testing.assert_close(top, scores[chosen].max(), atol=close, rtol=close)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys_XC": torch.zeros(9, 3)}, r"keys must be \[7 or more, 40\]"),
        ({"bias_X": torch.zeros(8)}, r"got \[7, 40\] and \[8\]"),
        ({"top": 8}, "at least the 8 to be chosen"),
        ({"keys_XC": torch.zeros(7, 40).requires_grad_()}, "has no gradient"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = inputs((3, 40, 7, 0, 2), device="cpu")
    with pytest.raises(ValueError, match=message):
        decode_route(**(given | changed), by_scores=False)
