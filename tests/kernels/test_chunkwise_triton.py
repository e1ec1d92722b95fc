"""Numbers of the chunkwise Triton kernels: delta rule and decay attention, forward and backward."""

from __future__ import annotations

import pytest
import torch
from chunkwise_case import DEVICE, DTYPES, GPU, VARIANTS, inputs_of, op, steps, three_way
from helpers import diagonal
from recurrence_case import tokens
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import check, judge

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# (tokens, batch, heads)
SIZES = [(1, 2, 1), (63, 1, 1), (65, 1, 2), (130, 1, 1)]
if GPU:
    SIZES = [(1, 2, 3), (63, 3, 2), (65, 2, 3), (1000, 2, 4), (4097, 1, 4)]


@every_dtype
@pytest.mark.parametrize(("size", "variant"), diagonal(SIZES, VARIANTS, each=2))
def test_lengths(size: tuple[int, int, int], variant: str, dtype: torch.dtype) -> None:
    length, batch, heads = size
    sizes = {"width": 64, "value": 128} if GPU else {}
    three_way(variant, inputs_of(variant, length, batch=batch, heads=heads, dtype=dtype, **sizes))


WIDTHS = [(8, 40, torch.float32)]
if GPU:  # every width takes a while to compile
    pairs = [
        (16, 16), (16, 24), (24, 16), (20, 100), (64, 64), (64, 16), (128, 64), (128, 128),
        (96, 192), (64, 256), (256, 64), (256, 128), (128, 256),
    ]  # fmt: skip
    WIDTHS = [(*pair, DTYPES[i % 3]) for i, pair in enumerate(pairs)]
    WIDTHS += [(256, 256, dtype) for dtype in DTYPES]


@every_variant
@pytest.mark.parametrize(("width", "value", "dtype"), WIDTHS)
def test_widths(variant: str, width: int, value: int, dtype: torch.dtype) -> None:
    length = 200 if GPU else 20
    three_way(variant, inputs_of(variant, length, heads=2, width=width, value=value, dtype=dtype))


def test_another_chunk_size_is_refused() -> None:
    inputs = inputs_of("token", 20)
    with pytest.raises(ValueError, match="64 tokens, got chunk_size 32"), dispatch.use("triton"):
        op("token", inputs, chunk_size=32)


SEGMENTS = {
    "cut inside and at a chunk's edge": [0] * 7 + [1] + [2] + [0] * 55 + [3] * 6,
    "one token each": list(range(70)),
    "one": [4] * 70,
}
PADS = {
    "none": [1] * 70,
    "left": [0] * 9 + [1] * 61,
    "across a chunk's edge": [1] * 50 + [0] * 17 + [1] * 3,
    "scattered": [1, 0, 0, 1, 1] * 14,
    "all": [0] * 70,
}
GRIDS = [("cut inside and at a chunk's edge", "across a chunk's edge"), ("one token each", "left")]
if GPU:
    GRIDS = [(ids, pads) for ids in SEGMENTS for pads in PADS]


@every_variant
@every_dtype
@pytest.mark.parametrize(("ids", "pads"), GRIDS)
def test_segments_and_padding(variant: str, dtype: torch.dtype, ids: str, pads: str) -> None:
    batch = 2 if GPU else 1
    keep_BT = torch.tensor([PADS[pads], PADS["scattered"]])[:batch].bool().to(DEVICE)
    ids_BT = torch.tensor([SEGMENTS[ids], [0] * 40 + [1] * 30])[:batch].to(DEVICE)
    inputs = inputs_of(variant, 70, batch=batch, dtype=dtype)
    for name, x in inputs.items():
        if name != "initial_state_BHKV":
            x[~keep_BT] = torch.nan
    kernel = three_way(variant, inputs, segment_ids_BT=ids_BT, keep_BT=keep_BT)
    assert (kernel["output"][~keep_BT] == 0).all()
    for name in inputs:
        if name != "initial_state_BHKV":
            assert (kernel[f"gradient of {name}"][~keep_BT] == 0).all(), name


@every_variant
@every_dtype
def test_without_an_initial_state(variant: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(variant, 70, dtype=dtype)
    del inputs["initial_state_BHKV"]
    three_way(variant, inputs, scale=0.3)


@pytest.mark.parametrize("variant", VARIANTS[:3])
@every_dtype
@pytest.mark.parametrize("l2norm", [True, False])
def test_zero_vectors(variant: str, dtype: torch.dtype, l2norm: bool) -> None:
    inputs = inputs_of(variant, 70 if GPU else 40, dtype=dtype)
    inputs["k"] *= 0.2  # short enough for an update that does not overshoot
    for name in ("q", "k", "v"):
        inputs[name][:, 5:9] = 0
    three_way(variant, inputs, l2norm_qk=l2norm)


EXTREMES = torch.tensor([0.0, -1e-4, -30.0, -300.0, -1000.0, -torch.inf], device=DEVICE)


@pytest.mark.parametrize("variant", VARIANTS[1:])
@every_dtype
@pytest.mark.parametrize("share", [1, 4])
def test_extreme_decays(variant: str, dtype: torch.dtype, share: int) -> None:
    """All decays extreme, or one in `share`, next to mild ones in tokens and channels."""
    inputs = inputs_of(variant, 130 if GPU else 66, heads=2 if GPU else 1, dtype=dtype)
    log_decay = inputs["log_decay"]
    place = torch.arange(log_decay.numel(), device=DEVICE)
    picked = (place % share == 0).view_as(log_decay)
    log_decay[picked] = EXTREMES[(place * 7 % 23 % 6).view_as(log_decay)[picked]]
    three_way(variant, inputs)


@pytest.mark.parametrize("variant", VARIANTS[1:])
@every_dtype
def test_strong_decays_leave_digits_for_what_follows(variant: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(variant, 64, dtype=dtype)
    inputs["log_decay"][:] = -1e-3
    inputs["log_decay"][:, :20] = -900.0
    three_way(variant, inputs)


@every_variant
@every_dtype
def test_large_inputs(variant: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(variant, 70, dtype=dtype)
    # Decay attention takes lengths as they are; its products would leave the range of fp16.
    for name in ("v",) if variant == "attention" and dtype == torch.float16 else ("q", "k", "v"):
        inputs[name] *= 100
    three_way(variant, inputs)


@every_variant
@every_dtype
def test_equal_keys_and_a_full_update(variant: str, dtype: torch.dtype) -> None:
    """The delta rule's system of equations as far from the identity as it gets."""
    inputs = inputs_of(variant, 130 if GPU else 64, dtype=dtype)
    inputs["k"][:] = inputs["k"][:, :1]
    if "beta" in inputs:
        inputs["beta"][:] = 1.0
    if "log_decay" in inputs:
        inputs["log_decay"][:] = 0.0
    three_way(variant, inputs)


@every_variant
@every_dtype
def test_all_zeros(variant: str, dtype: torch.dtype) -> None:
    inputs = {n: torch.zeros_like(x) for n, x in inputs_of(variant, 20, dtype=dtype).items()}
    kernel = three_way(variant, inputs)
    assert (kernel["output"] == 0).all() and (kernel["final state"] == 0).all()


@every_variant
@every_dtype
def test_two_calls_equal_one(variant: str, dtype: torch.dtype) -> None:
    def twice(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first, state = op(variant, tokens(x, slice(0, 37)))
        second = tokens(x, slice(37, None)) | {"initial_state_BHKV": state}
        second, state = op(variant, second)
        return torch.cat([first, second], 1), state

    three_way(variant, inputs_of(variant, 70, dtype=dtype), call=twice)


@every_variant
@every_dtype
def test_steps_equal_the_sequence(variant: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(variant, 6, heads=2, dtype=dtype)
    high = {n: x.double() for n, x in inputs.items()}
    runs = []
    for backend, x in (("reference", high), ("reference", inputs), ("triton", inputs)):
        before = x["initial_state_BHKV"].clone()
        with dispatch.use(backend), torch.no_grad():
            runs.append(dict(zip(("output", "state"), steps(variant, x), strict=True)))
        assert torch.equal(x["initial_state_BHKV"], before)
    check(judge(*runs, dtype))
    assert runs[2]["output"].dtype == dtype and runs[2]["state"].dtype == torch.float32
