"""Chunked decayed linear attention against its recurrence, token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from recurrence_case import compare, make_inputs, recurrence, tokens
from torch import Tensor

from ltconvert.kernels.chunkwise import spans
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step

NAMES = ("q", "k", "v", "log_decay")


def inputs_of(length: int, **sizes: int) -> dict[str, Tensor]:
    inputs = make_inputs(length, **sizes)
    del inputs["beta"]
    return inputs


def chunked(inputs: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    initial = inputs.get("initial_state_BHKV")
    return decay_attention(*(inputs[n] for n in NAMES), initial_state_BHKV=initial, **options)


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 64), (2, 1), (63, 64), (65, None), (127, 64), (33, 16), (48, 16)]
)
def test_equals_the_recurrence_at_odd_lengths(length: int, chunk: int | None) -> None:
    compare(chunked, inputs_of(length), chunk_size=chunk)


def test_a_given_scale() -> None:
    compare(chunked, inputs_of(37), chunk_size=16, scale=0.7)


@pytest.mark.parametrize(
    "ids",
    [
        [0] * 20 + [1] * 20,
        [5] * 16 + [3] * 16 + [5] * 8,
        list(range(40)),
        [0] * 7 + [1] + [2] + [0] * 22 + [1] * 8 + [2],
    ],
    ids=["two", "at a chunk's edge", "one token each", "one-token ones between"],
)
def test_segments_do_not_see_each_other(ids: list[int]) -> None:
    grid_BT = torch.tensor([ids, [0] * 25 + [1] * 15])
    compare(chunked, inputs_of(40), segment_ids_BT=grid_BT, chunk_size=16)


PADS = {
    "left": [0] * 9 + [1] * 31,
    "right": [1] * 31 + [0] * 9,
    "middle": [1] * 10 + [0] * 17 + [1] * 13,
    "scattered": [1, 0, 0, 1, 1] * 8,
    "all": [0] * 40,
}


@pytest.mark.parametrize("name", PADS)
@pytest.mark.parametrize("packed", [False, True])
def test_padding_leaves_the_state_alone_and_may_hold_anything(name: str, packed: bool) -> None:
    keep = torch.tensor([PADS[name], [1] * 40]).bool()
    ids = torch.tensor([[0] * 12 + [1] * 16 + [2] * 12, [0] * 40]) if packed else None
    inputs = inputs_of(40)
    compare(chunked, inputs, keep_BT=keep, segment_ids_BT=ids, chunk_size=16)
    clean = chunked(inputs, keep_BT=keep, segment_ids_BT=ids, chunk_size=16)
    assert (clean[0][~keep] == 0).all()
    for entry in NAMES:
        inputs[entry][~keep] = torch.nan
        inputs[entry].requires_grad_()
    o, state = chunked(inputs, keep_BT=keep, segment_ids_BT=ids, chunk_size=16)
    assert torch.equal(o, clean[0]) and torch.equal(state, clean[1])
    (o.sum() + state.sum()).backward()
    for entry in NAMES:
        grad = inputs[entry].grad
        assert (grad[~keep] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("strength", [0.0, -1e-4, -30.0, -300.0, -1000.0, -torch.inf])
def test_extreme_decays(strength: float) -> None:
    inputs = inputs_of(70)
    inputs["log_decay"][:, ::3] = strength
    compare(chunked, inputs)


def test_strong_decays_keep_fp32_digits_for_what_follows() -> None:
    inputs = inputs_of(64, width=16, value=16)
    inputs["log_decay"][:] = -1e-3
    inputs["log_decay"][:, :20] = -200.0
    want, _ = recurrence(inputs)
    got, _ = chunked({n: x.float() for n, x in inputs.items()})
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_decay_for_each_head_holds_at_every_token_and_sums_their_gradients() -> None:
    inputs = inputs_of(40)
    fixed_H = torch.tensor([-0.1, -0.7], dtype=torch.float64, requires_grad=True)
    each_BTH = fixed_H.detach().repeat(2, 40, 1).requires_grad_()
    for log_decay in (fixed_H, each_BTH):
        o, state = chunked(inputs | {"log_decay": log_decay})
        (o.square().sum() + state.square().sum()).backward()
    torch.testing.assert_close(fixed_H.grad, each_BTH.grad.sum((0, 1)), atol=1e-9, rtol=1e-9)
    compare(chunked, inputs | {"log_decay": each_BTH.detach()}, chunk_size=16)


def test_heads_that_share_keys_sum_their_gradients() -> None:
    inputs = inputs_of(20)
    shared = inputs["k"][:, :, :1].requires_grad_()
    repeated = shared.detach().repeat(1, 1, 2, 1).requires_grad_()
    for k in (shared.expand(-1, -1, 2, -1), repeated):
        chunked(inputs | {"k": k})[0].square().sum().backward()
    want = repeated.grad.sum(2, keepdim=True)
    torch.testing.assert_close(shared.grad, want, atol=1e-12, rtol=1e-12)


def test_no_state_is_a_zero_state() -> None:
    inputs = inputs_of(40)
    inputs["initial_state_BHKV"].zero_()
    want = recurrence(inputs)
    del inputs["initial_state_BHKV"]
    torch.testing.assert_close(chunked(inputs, chunk_size=16), want, atol=1e-12, rtol=1e-12)


def test_two_halves_equal_the_whole() -> None:
    inputs = inputs_of(90)
    whole = chunked(inputs, chunk_size=16)
    o_first, state = chunked(tokens(inputs, slice(0, 37)), chunk_size=16)
    second = tokens(inputs, slice(37, None)) | {"initial_state_BHKV": state}
    o_second, state = chunked(second, chunk_size=16)
    torch.testing.assert_close(torch.cat([o_first, o_second], 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("fixed", [True, False])
def test_steps_equal_the_chunked_form(fixed: bool) -> None:
    inputs = inputs_of(30)
    if fixed:
        inputs["log_decay"] = torch.tensor([-0.1, -0.7], dtype=torch.float64)
    whole = chunked(inputs, chunk_size=8, scale=0.4)
    state, outputs = inputs["initial_state_BHKV"].clone(), []
    for t in range(30):
        q, k, v = (inputs[n][:, t] for n in NAMES[:3])
        now = inputs["log_decay"] if fixed else inputs["log_decay"][:, t]
        o, after = decay_attention_step(q, k, v, now, state, scale=0.4)
        assert after is not state
        state = after
        outputs.append(o)
    torch.testing.assert_close(torch.stack(outputs, 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


def test_spans_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SPAN_ELEMENTS", 1)
    ids = torch.tensor([[0] * 30 + [1] * 70, [0] * 64 + [1] * 36])
    compare(chunked, inputs_of(100), segment_ids_BT=ids, chunk_size=16)


def test_low_precision_inputs_compute_in_fp32_also_under_autocast() -> None:
    inputs = {n: x.to(torch.bfloat16) for n, x in inputs_of(65, width=16).items()}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunked(leaves)
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves.values())
    want, state_want = recurrence({n: x.double() for n, x in inputs.items()})
    torch.testing.assert_close(state.double(), state_want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 10, 2, 4)}, "q and k must both be"),
        ({"v": torch.zeros(2, 10, 1, 5)}, "repeat kv heads"),
        ({"log_decay": torch.zeros(2, 10, 2, 8)}, r"log_decay must be \[2, 10, 2\], or \[2\]"),
        ({"initial_state_BHKV": torch.zeros(2, 2, 5, 8)}, "initial_state must be"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        chunked(inputs_of(10) | change)
    assert "\n" not in str(caught.value)


def test_wrong_grids_and_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"segment_ids must be \[batch, tokens\] = \[2, 10\]"):
        chunked(inputs_of(10), segment_ids_BT=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="keep must be"):
        chunked(inputs_of(10), keep_BT=torch.ones(1, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one token"):
        chunked(inputs_of(0))
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        chunked(inputs_of(2), chunk_size=0)
    q, k, v, log_decay = (inputs_of(1)[n][:, 0] for n in NAMES)
    with pytest.raises(ValueError, match="state must be"):
        decay_attention_step(q, k, v, log_decay, q)
    with pytest.raises(ValueError, match=r"log_decay must be \[2, 2\]"):
        decay_attention_step(q, k, v, q, inputs_of(1)["initial_state_BHKV"])
