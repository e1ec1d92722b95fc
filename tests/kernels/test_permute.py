"""permute and unpermute: fp64 definition by a one-hot matrix, plain PyTorch and kernel.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.permute import permute, unpermute

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
KERNELS = dispatch.TRITON_INSTALLED and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
SHAPES = [(1, 1, 1), (5, 3, 11), (67, 2, 40), (9, 6, 600)]
SHAPES += [(4097, 6, 576), (1000, 8, 4096)] if GPU else []

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(tokens: int, choices: int, channels: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, y, weights, places and upstream gradients."""
    generator = torch.Generator().manual_seed(1)
    rows = tokens * choices

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    return {
        "x": normal(tokens, channels).to(dtype),
        "y": normal(rows, channels).to(dtype),
        "weight": normal(tokens, choices),
        "place": torch.randperm(rows, generator=generator).view(tokens, choices).to(DEVICE),
        "dx": normal(rows, channels).to(dtype),
        "dy": normal(tokens, channels).to(dtype),
    }


def without_some(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every third choice has no place; what lies in those rows is no number."""
    place = given["place"].clone()
    place.view(-1)[::3] = -1
    nobody = torch.ones(len(given["y"]), dtype=torch.bool, device=DEVICE)
    nobody[place[place >= 0]] = False
    lost = {name: given[name].masked_fill(nobody[:, None], torch.nan) for name in ("y", "dx")}
    return {**given, **lost, "place": place}


def placed_rows(found: dict[str, Tensor], place: Tensor) -> dict[str, Tensor]:
    """The same without what lies in rows that nobody has."""
    rows = place[place >= 0]
    return {n: x[rows] if n in ("permuted", "y gradient") else x for n, x in found.items()}


def results(given: dict[str, Tensor], by: str) -> dict[str, Tensor]:
    """Values and gradients, by a backend or, for "definition", by a one-hot matrix in fp64."""
    x, y, weight, dx, dy = (
        given[name].detach().to(torch.float64 if by == "definition" else given[name].dtype)
        for name in ("x", "y", "weight", "dx", "dy")
    )
    leaves = [leaf.requires_grad_() for leaf in (x, y, weight)]
    if by == "definition":
        rows = torch.arange(len(y), device=DEVICE)
        is_at_NKM = (given["place"][..., None] == rows).double()
        handed = torch.einsum("nkm,nc->mc", is_at_NKM, x)
        together = torch.einsum("nk,nkm,mc->nc", weight, is_at_NKM, y)
    else:
        with dispatch.use(by):
            handed = permute(x, given["place"])
            together = unpermute(y, given["place"], weight)
    grads = torch.autograd.grad((handed, together), leaves, (dx, dy))
    names = ("x gradient", "y gradient", "weight gradient")
    values = {"permuted": handed.detach(), "together": together.detach()}
    return {**values, **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = inputs(*shape, dtype)
    if shape[0] > 100:  # the one-hot matrix of a large case does not fit
        wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
        truth = results(wide, "reference")
    else:
        truth = results(given, "definition")
    plain = results(given, "reference")
    found = results(given, "triton") if KERNELS else plain
    check(judge(truth, plain, found, dtype))
    assert found["together"].dtype == dtype and found["weight gradient"].dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_choices_without_a_place_meet_nothing(shape: tuple[int, int, int]) -> None:
    given = without_some(inputs(*shape, DTYPES[-1]))
    clean = {n: x.nan_to_num() for n, x in given.items()}
    backend = "triton" if KERNELS else "reference"
    truth, plain, found = (
        placed_rows(results(values, by), given["place"])
        for values, by in ((clean, "definition"), (given, "reference"), (given, backend))
    )
    check(judge(truth, plain, found, DTYPES[-1]))


def test_rows_that_are_not_contiguous() -> None:
    given = inputs(6, 2, 16, DTYPES[-1])
    want = results(given, "auto")
    strided = {n: x.mT.contiguous().mT for n, x in given.items()}
    for name, value in results(strided, "triton" if KERNELS else "reference").items():
        torch.testing.assert_close(value, want[name], msg=name)


def test_wrong_arguments_are_named() -> None:
    given = inputs(5, 3, 4, torch.float32)
    with pytest.raises(ValueError, match=r"places are \[4, choices\]"):
        permute(given["x"][:4], given["place"])
    with pytest.raises(ValueError, match="there are 15 rows"):
        unpermute(given["y"][:14], given["place"], given["weight"])
