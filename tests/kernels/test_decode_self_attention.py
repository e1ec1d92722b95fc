"""decode_self_attention: heads and attention by definition, in fp64; the Triton kernels three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, attention_by, needs_triton
from heads_case import attention_of, heads_of, token
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_attention import decode_attention, decode_self_attention
from ltconvert.kernels.parity import check, judge

# batch, query heads, key/value heads, slots, width: 1, 4, 16 and 32 query heads share keys
SHAPES = [
    (1, 1, 1, 1, 2), (3, 2, 2, 45, 16), (2, 3, 3, 37, 40), (2, 4, 1, 70, 20), (1, 32, 2, 50, 16),
    (1, 32, 1, 40, 16),
]  # fmt: skip
if GPU:
    SHAPES += [
        (1, 16, 16, 8192, 128), (8, 16, 16, 777, 128), (2, 32, 8, 2049, 128), (3, 9, 3, 515, 64),
        (2, 8, 4, 1031, 256), (1, 4, 4, 301, 256), (2, 8, 8, 3000, 80), (1, 64, 2, 900, 128),
    ]  # fmt: skip
MODES = [("none", False, None), ("head", True, 2.0), ("full", True, None)]  # norms, rope, soft cap

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with attention_by(request.param, monkeypatch):
        yield request.param


def inputs(
    shape: tuple[int, ...],
    mode: tuple[str, bool, float | None] = MODES[0],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Rows in turn: the last slot of a row, and one in its middle, as in a ring that is full.

    What stands in the token's own slot and behind the length is NaN.
    """
    norm, rope, soft_cap = mode
    given = token(shape, norm, rope, dtype)
    given |= {"scale": shape[-1] ** -0.5, "soft_cap": soft_cap}
    lengths = torch.full_like(given["slots_B"], shape[3])
    lengths[::2] = given["slots_B"][::2] + 1
    return _with_lengths(given, lengths)


def _with_lengths(given: dict[str, Any], lengths: Tensor) -> dict[str, Any]:
    pairs = zip(given["slots_B"].tolist(), lengths.tolist(), strict=True)
    for row, (slot, length) in enumerate(pairs):
        for name in ("keys_BGSD", "values_BGSD"):
            given[name][row, :, length:] = given[name][row, :, slot] = torch.nan
    return {**given, "lengths_B": lengths}


def definition(given: dict[str, Any], work: torch.dtype) -> dict[str, Tensor]:
    """Outputs and the cache, in ``work``."""
    more = {name: given[name] for name in ("scale", "soft_cap")}
    rest = {k: v for k, v in given.items() if k not in (*more, "lengths_B", "arrivals_BH")}
    # NaN is where nobody looks: it cannot be compared.
    made = heads_of(rest, work)
    attention = {
        "q_BHD": made["q"], "k_BGSD": made["keys"], "v_BGSD": made["values"],
        "lengths_B": given["lengths_B"],
    }  # fmt: skip
    o = attention_of(attention, work, **more)["o"]
    return {"o": o, "keys": made["keys"].nan_to_num(), "values": made["values"].nan_to_num()}


def run(given: dict[str, Any]) -> dict[str, Tensor]:
    """The op on a cache of its own, laid out as the one given."""
    names = ("keys_BGSD", "values_BGSD")
    keys, values = torch.stack([given[name] for name in names], dim=2).unbind(2)
    o = decode_self_attention(**{**given, "keys_BGSD": keys, "values_BGSD": values})
    assert o.dtype == given["qkv_BM"].dtype and o.is_contiguous()
    return {"o": o, "keys": keys.nan_to_num(), "values": values.nan_to_num()}


def arrivals(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape[:2], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_value(
    backend: str,
    shape: tuple[int, ...],
    mode: tuple[str, bool, float | None],
    dtype: torch.dtype,
) -> None:
    given = inputs(shape, mode, dtype)
    truth, plain = definition(given, torch.float64), definition(given, dtype)
    counted = arrivals(shape)
    check(judge(truth, plain, run({**given, "arrivals_BH": counted}), dtype))
    assert not counted.any()


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("shape", [(1, 2, 2, 90, 16), (1, 6, 2, 90, 16)])
def test_the_slot_may_be_anywhere_and_parts_any_number(
    backend: str, shape: tuple[int, ...], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key, ends and beginnings of blocks, a full cache; a ring begins again at slot 0."""
    if backend == "triton":
        from ltconvert.kernels.decode_attention import triton

        monkeypatch.setattr(triton, "_parts", lambda *sizes: parts)
    counted = arrivals(shape)
    for slot, length in ((0, 1), (15, 16), (16, 17), (89, 90), (0, 90)):
        given = token(shape, "head", True) | {"scale": 0.3, "soft_cap": None}
        given["slots_B"] = torch.tensor([slot], device=DEVICE)
        given = _with_lengths(given, torch.tensor([length], device=DEVICE))
        want = definition(given, torch.float64)
        for room in (None, counted):
            found = run({**given, "arrivals_BH": room})
            for name, value in found.items():
                torch.testing.assert_close(value.double(), want[name], atol=1e-5, rtol=1e-4)
    assert not counted.any()


@needs_triton
def test_who_counts_last_gives_what_a_second_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries alone, too; layers of other sizes share the room."""
    from ltconvert.kernels.decode_attention import triton

    launched = []
    kernel = triton.combine_kernel

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton, "combine_kernel", Noted())
    monkeypatch.setattr(triton, "_parts", lambda *sizes: 7)
    triton._plan.cache_clear()
    counted = arrivals((2, 3))
    with dispatch.use("triton"):
        for slots in (300, 90):
            q = torch.randn(2, 3, 16, device=DEVICE)
            k, v = torch.randn(2, 2, 3, slots, 16, device=DEVICE)
            lengths = torch.tensor([slots - 7, slots], device=DEVICE)
            want = decode_attention(q, k, v, lengths, scale=0.3)
            assert len(launched) == 1
            found = decode_attention(q, k, v, lengths, scale=0.3, arrivals_BH=counted)
            torch.testing.assert_close(found, want)
            assert len(launched) == 1 and not counted.any()
            launched.clear()
    triton._plan.cache_clear()


def test_a_length_that_cannot_be_is_nan_and_writes_nothing(backend: str) -> None:
    given = inputs((2, 2, 2, 40, 16))
    given["keys_BGSD"].nan_to_num_()
    given["lengths_B"] = torch.tensor([0, 40], device=DEVICE)
    if backend == "triton":
        keys = given["keys_BGSD"].clone()
        assert run(given)["o"][0].isnan().all()
        assert torch.equal(run(given)["keys"][0], keys[0])
    given["lengths_B"][1] = 10**6
    beyond = run(given)["o"][1]
    given["lengths_B"][1] = 40
    assert torch.equal(beyond, run(given)["o"][1])


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("groups", [4, 16])
def test_a_cuda_graph_takes_a_token_after_the_other(groups: int) -> None:
    shape = (2, 16, groups, 1500, 128)
    given = inputs(shape, MODES[1], torch.bfloat16)
    given |= {"arrivals_BH": arrivals(shape)}
    for name in ("keys_BGSD", "values_BGSD"):
        given[name].nan_to_num_()
    keys, values = given["keys_BGSD"].clone(), given["values_BGSD"].clone()
    decode_self_attention(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_self_attention(**given)
    for slots, lengths in (((0, 1), (1, 2)), ((699, 63), (700, 64)), ((3, 1499), (1500, 1500))):
        given["slots_B"].copy_(torch.tensor(slots))
        given["lengths_B"].copy_(torch.tensor(lengths))
        given["keys_BGSD"].copy_(keys)
        given["values_BGSD"].copy_(values)
        truth, plain = definition(given, torch.float64), definition(given, torch.bfloat16)
        graph.replay()
        found = {"o": o, "keys": given["keys_BGSD"], "values": given["values_BGSD"]}
        check(judge(truth, plain, found, torch.bfloat16))


def test_wrong_arguments_are_named() -> None:
    given = inputs((3, 4, 2, 5, 12), MODES[1])
    room = arrivals((3, 4))
    for changed, message in (
        ({"num_heads": 3}, r"qkv must be \[3, 84\]"),
        ({"cos_BD": None}, "go together"),
        ({"lengths_B": given["lengths_B"][:2]}, r"lengths \[3\]"),
        ({"soft_cap": -1.0}, "soft_cap must be positive or None, got -1"),
        ({"qkv_BM": given["qkv_BM"].double()}, "one dtype, got torch.float64, torch.float32"),
        ({"arrivals_BH": room.long()}, r"int32 \[3, 4\] and contiguous, got torch.int64 \[3, 4\]"),
        ({"arrivals_BH": room[:, :2]}, r"got torch.int32 \[3, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_self_attention(**(given | changed))
    given["qkv_BM"] = given["qkv_BM"].clone().requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        decode_self_attention(**given)
