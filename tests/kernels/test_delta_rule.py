"""The chunked gated delta rule against the recurrence it stands for, token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from recurrence_case import NAMES, compare, make_inputs, recurrence, tokens
from torch import Tensor

from ltconvert.kernels.chunkwise import spans
from ltconvert.kernels.delta_rule import delta_rule, delta_rule_step

BOTH_DECAYS = pytest.mark.parametrize("decay", ["token", "channel"])


def chunked(inputs: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    q, k, v, beta, log_decay, initial = (inputs.get(n) for n in NAMES)
    return delta_rule(q, k, v, beta, log_decay, initial_state_BHKV=initial, **options)


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 64), (2, 1), (63, 64), (65, 64), (127, 64), (33, 16), (48, 16)]
)
@pytest.mark.parametrize("decay", ["token", "channel", None])
def test_equals_the_recurrence_at_odd_lengths(length: int, chunk: int, decay: str | None) -> None:
    compare(chunked, make_inputs(length, decay=decay), chunk_size=chunk)


@BOTH_DECAYS
def test_unnormalised_with_a_given_scale(decay: str) -> None:
    inputs = make_inputs(37, decay=decay)
    inputs["k"] *= 0.3
    compare(chunked, inputs, chunk_size=16, l2norm_qk=False, scale=0.7)


SEGMENTS = {
    "two": [0] * 20 + [1] * 20,
    "at a chunk's edge": [5] * 16 + [3] * 16 + [5] * 8,
    "one token each": list(range(40)),
    "one-token ones between": [0] * 7 + [1] + [2] + [0] * 22 + [1] * 8 + [2],
    "one": [4] * 40,
}


@BOTH_DECAYS
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_do_not_see_each_other(name: str, decay: str) -> None:
    ids = torch.tensor([SEGMENTS[name], SEGMENTS["two"]])
    compare(chunked, make_inputs(40, decay=decay), segment_ids_BT=ids, chunk_size=16)


def test_packed_segments_equal_separate_runs() -> None:
    inputs = make_inputs(50, batch=1)
    inputs["initial_state_BHKV"].zero_()
    ids = torch.tensor([[0] * 11 + [1] * 1 + [2] * 38])
    o, state = chunked(inputs, segment_ids_BT=ids, chunk_size=16)
    for part in (slice(0, 11), slice(11, 12), slice(12, 50)):
        o_alone, state_alone = chunked(tokens(inputs, part))
        torch.testing.assert_close(o[:, part], o_alone, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, state_alone, atol=1e-12, rtol=1e-12)


PADS = {
    "left": [0] * 9 + [1] * 31,
    "right": [1] * 31 + [0] * 9,
    "middle": [1] * 10 + [0] * 17 + [1] * 13,
    "scattered": [1, 0, 0, 1, 1] * 8,
    "all": [0] * 40,
}


@BOTH_DECAYS
@pytest.mark.parametrize("name", PADS)
@pytest.mark.parametrize("packed", [False, True])
def test_padding_leaves_the_state_alone(name: str, packed: bool, decay: str) -> None:
    keep = torch.tensor([PADS[name], [1] * 40]).bool()
    ids = torch.tensor([[0] * 12 + [1] * 16 + [2] * 12, [0] * 40]) if packed else None
    inputs = make_inputs(40, decay=decay)
    compare(chunked, inputs, keep_BT=keep, segment_ids_BT=ids, chunk_size=16)
    o, _ = chunked(inputs, keep_BT=keep, chunk_size=16)
    assert (o[~keep] == 0).all()


@BOTH_DECAYS
def test_padding_may_hold_anything(decay: str) -> None:
    keep = torch.tensor([PADS["middle"], PADS["left"]]).bool()
    inputs = make_inputs(40, decay=decay)
    clean = chunked(inputs, keep_BT=keep, chunk_size=16)
    dirty = {n: x.clone() for n, x in inputs.items()}
    for name in NAMES[:5]:
        dirty[name][~keep] = torch.nan
        dirty[name].requires_grad_()
    o, state = chunked(dirty, keep_BT=keep, chunk_size=16)
    (o.sum() + state.sum()).backward()
    assert torch.equal(o, clean[0]) and torch.equal(state, clean[1])
    for name in NAMES[:5]:
        assert (dirty[name].grad[~keep] == 0).all() and dirty[name].grad.isfinite().all()


def test_a_pad_with_another_id_does_not_cut_its_segment() -> None:
    keep = torch.tensor([[1, 1, 0, 1, 1]]).bool()
    inputs = make_inputs(5, batch=1)
    whole, _ = chunked(inputs, keep_BT=keep)
    o, _ = chunked(inputs, keep_BT=keep, segment_ids_BT=torch.tensor([[1, 1, 0, 1, 1]]))
    assert torch.equal(o, whole)


@BOTH_DECAYS
@pytest.mark.parametrize("strength", [0.0, -1e-4, -30.0, -300.0, -1000.0, -torch.inf])
def test_extreme_decays(strength: float, decay: str) -> None:
    inputs = make_inputs(70, decay=decay)
    inputs["log_decay"][:, ::3] = strength
    compare(chunked, inputs)


def test_channels_of_one_token_decay_apart() -> None:
    """Extremes next to each other: no channel and no token may spoil its neighbours' digits."""
    inputs = make_inputs(70, decay="channel")
    extremes = torch.tensor([0.0, -1e-4, -30.0, -300.0, -1000.0, -torch.inf], dtype=torch.float64)
    picked = torch.arange(inputs["log_decay"].numel()) * 7 % 23 % 6
    some = torch.arange(picked.numel()) % 5 == 0
    inputs["log_decay"].view(-1)[some] = extremes[picked[some]]
    compare(chunked, inputs)
    compare(chunked, inputs, chunk_size=33, segment_ids_BT=torch.arange(70).expand(2, -1) // 27)


def test_equal_channels_are_one_decay_a_token() -> None:
    inputs = make_inputs(70)
    channels = inputs | {"log_decay": inputs["log_decay"].unsqueeze(-1).expand_as(inputs["q"])}
    for one, each in zip(chunked(inputs), chunked(channels), strict=True):
        torch.testing.assert_close(each, one, atol=1e-12, rtol=1e-12)


@BOTH_DECAYS
def test_forgetting_everything_is_a_new_start(decay: str) -> None:
    inputs = make_inputs(40, decay=decay)
    inputs["log_decay"][:, 13] = -torch.inf
    o, state = chunked(inputs, chunk_size=16)
    late = tokens(inputs, slice(13, None))
    late["initial_state_BHKV"] = torch.zeros_like(late["initial_state_BHKV"])
    o_late, state_late = chunked(late, chunk_size=16)
    torch.testing.assert_close(o[:, 13:], o_late, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, state_late, atol=1e-12, rtol=1e-12)


@BOTH_DECAYS
def test_strong_decays_keep_fp32_digits_for_what_follows(decay: str) -> None:
    inputs = make_inputs(64, width=16, value=16, decay=decay)
    inputs["log_decay"][:] = -1e-3
    inputs["log_decay"][:, :20] = -200.0
    want, _ = recurrence(inputs)
    got, _ = chunked({n: x.float() for n, x in inputs.items()})
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_no_state_is_a_zero_state() -> None:
    inputs = make_inputs(40, decay=None)
    o, state = delta_rule(*(inputs[n] for n in NAMES[:4]), chunk_size=16)
    inputs["initial_state_BHKV"].zero_()
    want = recurrence(inputs)
    torch.testing.assert_close(o, want[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, want[1], atol=1e-12, rtol=1e-12)


def test_zero_vectors_are_harmless() -> None:
    inputs = make_inputs(20)
    for name in ("q", "k", "v"):
        inputs[name][:, 5:9] = 0
    compare(chunked, inputs, chunk_size=16)


def test_repeated_keys_stay_exact_in_fp32() -> None:
    """All keys equal and beta 1: the system is as far from the identity as it gets."""
    inputs = make_inputs(256, batch=1, width=16, value=16)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["beta"][:] = 1.0
    inputs["log_decay"][:] = 0.0
    want, _ = recurrence(inputs)
    got, _ = chunked({n: x.float() for n, x in inputs.items()})
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@BOTH_DECAYS
def test_two_halves_equal_the_whole(decay: str) -> None:
    inputs = make_inputs(90, decay=decay)
    whole = chunked(inputs, chunk_size=16)
    o_first, state = chunked(tokens(inputs, slice(0, 37)), chunk_size=16)
    second = tokens(inputs, slice(37, None)) | {"initial_state_BHKV": state}
    o_second, state = chunked(second, chunk_size=16)
    torch.testing.assert_close(torch.cat([o_first, o_second], 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("decay", ["token", "channel", None])
def test_steps_equal_the_chunked_form(l2norm: bool, decay: str | None) -> None:
    inputs = make_inputs(30, decay=decay)
    inputs["k"] *= 0.3
    log_decay = inputs.get("log_decay")
    qkvb = [inputs[n] for n in NAMES[:4]]
    initial = inputs["initial_state_BHKV"]
    whole = delta_rule(
        *qkvb, log_decay, initial_state_BHKV=initial, chunk_size=8, l2norm_qk=l2norm, scale=0.4
    )
    state, outputs = initial.clone(), []
    for t in range(30):
        now = None if log_decay is None else log_decay[:, t]
        o, state = delta_rule_step(
            *(x[:, t] for x in qkvb), now, state, l2norm_qk=l2norm, scale=0.4
        )
        outputs.append(o)
    assert torch.equal(initial, inputs["initial_state_BHKV"])
    torch.testing.assert_close(torch.stack(outputs, 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


@BOTH_DECAYS
def test_spans_change_nothing(monkeypatch: pytest.MonkeyPatch, decay: str) -> None:
    inputs = make_inputs(100, decay=decay)
    monkeypatch.setattr(spans, "SPAN_ELEMENTS", 1)
    ids = torch.tensor([[0] * 30 + [1] * 70, [0] * 64 + [1] * 36])
    compare(chunked, inputs, segment_ids_BT=ids, chunk_size=16)


@BOTH_DECAYS
def test_causal(decay: str) -> None:
    inputs = make_inputs(40, decay=decay)
    o, _ = chunked(inputs, chunk_size=16)
    for name in NAMES[:5]:
        inputs[name][:, 23] += 0.1
    changed, _ = chunked(inputs, chunk_size=16)
    assert torch.equal(o[:, :23], changed[:, :23])
    assert not torch.allclose(o[:, 23], changed[:, 23])


def test_low_precision_inputs_compute_in_fp32_also_under_autocast() -> None:
    inputs = {n: x.to(torch.bfloat16) for n, x in make_inputs(65, width=16).items()}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunked(leaves)
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves.values())
    want, state_want = recurrence({n: x.double() for n, x in inputs.items()})
    torch.testing.assert_close(state.double(), state_want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(o.double(), want, atol=1e-6, rtol=2**-8)


@BOTH_DECAYS
def test_fp32_gradients(decay: str) -> None:
    inputs = make_inputs(130, batch=1, width=32, value=32, decay=decay)
    ours = {n: x.float().requires_grad_() for n, x in inputs.items()}
    truth = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    chunked(ours)[0].square().sum().backward()
    recurrence(truth)[0].square().sum().backward()
    for name in NAMES:
        torch.testing.assert_close(ours[name].grad.double(), truth[name].grad, atol=1e-5, rtol=1e-4)


def test_transposed_inputs_are_read_rightly() -> None:
    inputs = make_inputs(20)
    strided = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    assert torch.equal(chunked(strided)[0], chunked(inputs)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 10, 2, 4)}, "q and k must both be"),
        ({"v": torch.zeros(2, 10, 1, 5)}, "repeat kv heads"),
        ({"beta": torch.zeros(2, 10)}, "beta must be"),
        ({"log_decay": torch.zeros(2, 10, 2, 4)}, "log_decay must have beta's shape"),
        ({"initial_state_BHKV": torch.zeros(2, 2, 5, 8)}, "initial_state must be"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        chunked(make_inputs(10) | change)
    assert "\n" not in str(caught.value)


def test_wrong_grids_are_named() -> None:
    with pytest.raises(ValueError, match=r"segment_ids must be \[batch, tokens\] = \[2, 10\]"):
        chunked(make_inputs(10), segment_ids_BT=torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="keep must be"):
        chunked(make_inputs(10), keep_BT=torch.ones(1, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one token"):
        chunked(make_inputs(0))


def test_wrong_shapes_of_a_step_are_named() -> None:
    inputs = make_inputs(1)
    q, k, v, beta, log_decay = (inputs[n][:, 0] for n in NAMES[:5])
    state = inputs["initial_state_BHKV"]
    with pytest.raises(ValueError, match=r"beta must be \[2, 2\]"):
        delta_rule_step(q, k, v, q, log_decay, state)
    with pytest.raises(ValueError, match=r"log_decay must have beta's shape \[2, 2\], or q's"):
        delta_rule_step(q, k, v, beta, v, state)
