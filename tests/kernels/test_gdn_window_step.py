"""gdn_window_step against loops over rows and heads in fp64; the Triton kernel three ways.

Without a GPU the kernel runs in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import gdn_case
import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from gdn_case import EPS
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.gdn_window_step import Ring, gdn_window_step
from ltconvert.kernels.parity import check, judge

# batch, heads, width, taps of the convolution, slots
SHAPES = [(3, 2, 6, 4, 5), (1, 1, 2, 0, 1), (2, 2, 16, 2, 40), (1, 1, 64, 4, 128)]
if GPU:
    SHAPES += [
        (1, 16, 128, 4, 128), (8, 16, 128, 4, 128), (1, 16, 128, 4, 512), (3, 9, 64, 4, 512),
        (2, 3, 80, 0, 100), (2, 2, 256, 4, 200), (2, 2, 128, 4, 16), (1, 16, 64, 4, 1000),
    ]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    return request.param


def inputs(
    shape: tuple[int, ...], seen: int, dtype: torch.dtype = torch.float32, rope: bool = True,
    cap: float | None = None, device: str = DEVICE, apart: bool = False,
) -> tuple[Ring, dict[str, Any]]:  # fmt: skip
    """Row b has seen ``seen + b`` tokens; slots that none of them has filled are NaN.

    ``apart``: with room to count in, so that recurrence and window may be two programs.
    """
    batch, heads, width, taps, slots = shape
    # Far from the seeds of gdn_case: with as many slots as channels the sums are the same, and keys
    # that are the queries have scores whose exponentials no fp16 holds.
    generator = torch.Generator().manual_seed(10_000 + sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    seen_B = torch.arange(seen, seen + batch, device=device)
    empty_BS = torch.arange(slots, device=device) >= seen_B[:, None]
    keys, values = (
        normal(batch, heads, slots, width).masked_fill(empty_BS[:, None, :, None], torch.nan)
        for _ in range(2)
    )
    angle_BD = (seen_B[:, None] / 7.0 ** torch.arange(width // 2, device=device)).repeat(1, 2)
    ring = Ring(
        keys, values, seen_B % slots, (seen_B + 1).clamp(max=slots), seen_B >= slots,
        2 * normal(batch, heads + 3)[:, 1:-2], scale=width**-0.5, soft_cap=cap,
        cos_BD=angle_BD.cos() if rope else None, sin_BD=angle_BD.sin() if rope else None,
        arrivals_BH=keys.new_zeros(batch, heads, dtype=torch.int32) if apart else None,
    )  # fmt: skip
    return ring, gdn_case.inputs((batch, heads, width, width, taps), dtype, device)


def with_tensors(ring: Ring, change: Any) -> Ring:
    """``change`` made of every tensor."""
    made = {field.name: getattr(ring, field.name) for field in fields(ring)}
    return replace(ring, **{k: change(v) for k, v in made.items() if isinstance(v, Tensor)})


def definition(ring: Ring, given: dict[str, Any], work: torch.dtype) -> dict[str, Tensor]:
    """One row and head at a time, in ``work``; returns what changes in place, too."""
    ring = with_tensors(
        ring, lambda x: x.to(work, copy=True) if x.is_floating_point() else x.clone()
    )
    options: Any = {"gate_fn": "2sigmoid", "activation": None, "beta_factor": 1.0}
    found = gdn_case.definition(given, work, **options)
    batch, heads, _, width = ring.keys_BHSD.shape
    qkv = given["qkv_BC"].to(work).unflatten(1, (3, heads, width))
    y = torch.empty_like(found["y"])
    for b in range(batch):
        slot, length = int(ring.slots_B[b]), int(ring.lengths_B[b])
        for h in range(heads):
            q, k, v = qkv[b, :, h]
            if ring.cos_BD is not None and ring.sin_BD is not None:
                q, k = (_turned(x, ring.cos_BD[b], ring.sin_BD[b]) for x in (q, k))
            ring.keys_BHSD[b, h, slot], ring.values_BHSD[b, h, slot] = k, v
            scores = ring.keys_BHSD[b, h, :length] @ q * ring.scale
            if ring.soft_cap is not None:
                scores = ring.soft_cap * torch.tanh(scores / ring.soft_cap)
            rest = ring.rest_BH[b, h].masked_fill(~ring.outside_B[b], -torch.inf)
            weights = torch.cat([scores, rest[None]]).softmax(0)
            inside, outside = weights[:-1], weights[-1]
            y[b, h] = inside @ ring.values_BHSD[b, h, :length] + outside * found["y"][b, h]
    return found | {"y": y, "keys": ring.keys_BHSD, "values": ring.values_BHSD}


def _turned(x_D: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """Channels d and d + D / 2 as one complex number, turned by the angle."""
    half = len(x_D) // 2
    x = torch.complex(x_D[:half].double(), x_D[half:].double())
    x = x * torch.complex(cos_D[:half].double(), sin_D[:half].double())
    return torch.cat([x.real, x.imag]).to(x_D.dtype)


def run(ring: Ring, given: dict[str, Any]) -> dict[str, Tensor]:
    """The op on copies, and what it changed in place."""
    ring = with_tensors(ring, Tensor.clone)
    given = {name: value.clone() for name, value in given.items()}
    y = gdn_window_step(ring, **_named(given), eps=EPS)
    assert ring.arrivals_BH is None or not ring.arrivals_BH.any()
    found = {"y": y, "state": given["state_BHKV"], "keys": ring.keys_BHSD}
    found |= {"values": ring.values_BHSD}
    return found | ({"history": given["conv_history_BCP"]} if "conv_history_BCP" in given else {})


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """The inputs of ``gdn_step``, by the names that they have here."""
    names = {"state_BHKV": "state_BHDD", "norm_weight_HV": "norm_weight_HD", "gate_BHV": "gate_BHD"}
    return {names.get(name, name): value for name, value in given.items()}


def filled(found: dict[str, Tensor], ring: Ring) -> dict[str, Tensor]:
    """The same, slots that hold nothing set to 0."""
    slots = ring.keys_BHSD.shape[2]
    empty_BS = torch.arange(slots, device=ring.lengths_B.device) >= ring.lengths_B[:, None]
    empty = {k: found[k].masked_fill(empty_BS[:, None, :, None], 0) for k in ("keys", "values")}
    return found | empty


def parity(
    ring: Ring, given: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """What the op gives, which has to be right."""
    truth, plain = (filled(definition(ring, given, x), ring) for x in (torch.float64, dtype))
    found = run(ring, given)
    check(judge(truth, plain, filled(found, ring), dtype))
    return found


BEFORE = {  # tokens that the first row has seen, by the number of slots
    "nothing": lambda slots: 0,
    "half": lambda slots: slots // 2,
    "one slot free": lambda slots: slots - 1,
    "full": lambda slots: slots,
    "round": lambda slots: 2 * slots + slots // 3,
}


@pytest.fixture(params=[False, True], ids=["one", "two"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is room for two programs a row and head, which then run, also of many rows."""
    if request.param:
        triton = pytest.importorskip("ltconvert.kernels.gdn_window_step.triton")
        monkeypatch.setattr(triton, "APART", {"single": True, "several": True})
    return request.param


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_state_history_and_ring(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, before: str, apart: bool
) -> None:
    given = inputs(shape, BEFORE[before](shape[-1]), dtype, apart=apart)
    found = parity(*given, dtype)
    assert found["y"].dtype == found["keys"].dtype == dtype
    if apart and GPU:  # where either program may be last
        again = run(*given)
        assert all(torch.equal(x.nan_to_num(), again[k].nan_to_num()) for k, x in found.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rope", "cap"), [(False, None), (True, 2.0)])
def test_no_positions_and_a_soft_cap(
    backend: str, rope: bool, cap: float | None, dtype: torch.dtype, apart: bool
) -> None:
    parity(*inputs(SHAPES[0], 3, dtype, rope, cap, apart=apart), dtype)


@pytest.mark.parametrize("before", ["half", "round"])
def test_exponentials_of_scores_and_rest_may_overflow(backend: str, before: str) -> None:
    """In fp32 above e^88; scores and rests of both signs."""
    ring, given = inputs(SHAPES[0], BEFORE[before](SHAPES[0][-1]))
    parity(replace(ring, keys_BHSD=200 * ring.keys_BHSD, rest_BH=100 * ring.rest_BH), given)


@pytest.mark.parametrize("before", ["half", "round"])
@needs_triton
def test_windows_and_heads_of_many_blocks(
    before: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 slots, and of 16 columns."""
    from ltconvert.kernels.gdn_window_step import triton

    monkeypatch.setattr(triton, "TILE", 1)
    triton._plan.cache_clear()
    plan = triton._plan(33, 1, 75, 4, True, 16)
    assert plan["LONG"] and plan["BLOCKS"] == 3
    with dispatch.use("triton"):
        parity(*inputs((2, 1, 33, 0, 75), BEFORE[before](75), rope=False, apart=apart))
    triton._plan.cache_clear()


@needs_triton
@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[4:7])
def test_the_output_does_not_depend_on_who_is_last(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts that begin at 1 make last whoever comes first, with the other's part of before."""
    from ltconvert.kernels.gdn_window_step import triton

    monkeypatch.setattr(triton, "APART", {"single": True, "several": True})
    ring, given = inputs(shape, 2 * shape[-1], apart=True)
    assert ring.arrivals_BH is not None
    _, *parts = triton._room(given["gate_BHV"], None)
    monkeypatch.setattr(triton, "_room", lambda y_BHD, arrivals_BH: (arrivals_BH, *parts))
    with dispatch.use("triton"):
        want = run(ring, given)
        copies = {name: value.clone() for name, value in _named(given).items()}
        ring = with_tensors(ring, Tensor.clone)
        first = replace(ring, arrivals_BH=torch.ones_like(ring.arrivals_BH))
        y = gdn_window_step(first, **copies, eps=EPS)
    assert torch.equal(y, want["y"]) and torch.equal(copies["state_BHDD"], want["state"])


def test_steps_follow_each_other_round_the_ring(backend: str) -> None:
    """Seven tokens in five slots: each finds what those before have left."""
    ring, given = inputs(SHAPES[0], 0)
    live, wide = with_tensors(ring, Tensor.clone), {k: v.double() for k, v in given.items()}
    slots = ring.keys_BHSD.shape[2]
    for step in range(7):
        seen_B = torch.arange(step, step + 3, device=DEVICE)
        token, _ = inputs(SHAPES[0], step)
        _, drawn = inputs((3, 2, 6, 4, 6 + step), 0)  # other numbers at every step
        moving = {k: drawn[k] for k in ("qkv_BC", "beta_BH", "decay_BH", "gate_BHV")}
        place = {
            "slots_B": seen_B % slots, "lengths_B": (seen_B + 1).clamp(max=slots),
            "outside_B": seen_B >= slots, "cos_BD": token.cos_BD, "sin_BD": token.sin_BD,
        }  # fmt: skip
        ring, live = replace(ring, **place), replace(live, **place)
        given, wide = given | moving, wide | {k: v.double() for k, v in moving.items()}
        want = definition(ring, wide, torch.float64)
        y = gdn_window_step(live, **_named(given), eps=EPS)
        torch.testing.assert_close(y.double(), want["y"], rtol=1e-4, atol=1e-5)
        ring = replace(ring, keys_BHSD=want["keys"], values_BHSD=want["values"])
        wide |= {"state_BHKV": want["state"], "conv_history_BCP": want["history"]}


def test_everything_may_lie_anywhere(backend: str) -> None:
    ring, given = inputs(SHAPES[0], 3)
    want = run(ring, given)
    spread = given | {"state_BHKV": given["state_BHKV"].mT.contiguous().mT}
    product = torch.cat([given[k].flatten(1) for k in ("gate_BHV", "qkv_BC", "beta_BH")], dim=1)
    gate, spread["qkv_BC"], spread["beta_BH"] = product.split([12, 36, 2], dim=1)
    spread["gate_BHV"] = gate.view(3, 2, 6)
    ring = with_tensors(ring, lambda x: x.repeat_interleave(2, 0)[::2])
    by_token = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (ring.keys_BHSD, ring.values_BHSD)
    ]
    ring = replace(
        ring,
        keys_BHSD=by_token[0],
        values_BHSD=by_token[1],
        rest_BH=ring.rest_BH.mT.contiguous().mT,
    )
    y = gdn_window_step(ring, **_named(spread), eps=EPS)
    found = {"y": y, "state": spread["state_BHKV"], "keys": by_token[0], "values": by_token[1]}
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], equal_nan=True)


def test_fp64_in_the_reference() -> None:
    ring, given = inputs(SHAPES[0], 3, torch.float64, device="cpu")
    with dispatch.use("reference"):
        found = run(ring, given)
    want = definition(ring, given, torch.float64)
    torch.testing.assert_close(filled(found, ring), filled(want, ring))


def test_no_rows(backend: str, apart: bool) -> None:
    assert run(*inputs((0, 2, 6, 4, 5), 3, apart=apart))["y"].shape == (0, 2, 6)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1, 16, 128, 4, 128), (2, 16, 128, 4, 512)])
def test_a_cuda_graph_takes_it(shape: tuple[int, ...], apart: bool) -> None:
    """Every replay gives what a call on copies gives, bit for bit."""
    ring, given = inputs(shape, 700, torch.bfloat16, apart=apart)
    run(ring, given)  # compiled
    live, moved = with_tensors(ring, Tensor.clone), {k: v.clone() for k, v in given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gdn_window_step(live, **_named(moved), eps=EPS)
    for _ in range(50):
        want = run(live, moved)
        graph.replay()
        assert torch.equal(y, want["y"]) and torch.equal(moved["state_BHKV"], want["state"])
        assert torch.equal(live.keys_BHSD, want["keys"])
    assert live.arrivals_BH is None or not live.arrivals_BH.any()


def test_wrong_arguments_are_named() -> None:
    ring, given = inputs(SHAPES[0], 3)

    def call(**changed: Any) -> None:
        gdn_window_step(replace(ring, **changed), **_named(given), eps=EPS)

    with pytest.raises(ValueError, match=r"rest \[3, 2\].*\[3, 1\]"):
        call(rest_BH=ring.rest_BH[:, 1:])
    with pytest.raises(ValueError, match=r"keys and values must be \[3, 2, slots, 6\]"):
        call(keys_BHSD=ring.keys_BHSD[..., 1:])
    with pytest.raises(ValueError, match="outside must be boolean"):
        call(outside_B=ring.lengths_B)
    with pytest.raises(ValueError, match="cos and sin go together"):
        call(sin_BD=None)
    with pytest.raises(ValueError, match=r"arrivals must be int32 \[3, 2\] and contiguous"):
        call(arrivals_BH=ring.lengths_B)
    with pytest.raises(ValueError, match="no gradient"):
        call(rest_BH=ring.rest_BH.requires_grad_())
    with pytest.raises(ValueError, match=r"qkv must be \[3, 36\]"):
        gdn_window_step(ring, **_named(given | {"qkv_BC": given["qkv_BC"][:, 1:]}), eps=EPS)
