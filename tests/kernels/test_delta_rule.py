"""The chunked gated delta rule against the recurrence it stands for, token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ltconvert.kernels.delta_rule import chunks, delta_rule, delta_rule_step

NAMES = ("q", "k", "v", "beta", "log_decay", "initial_state_BHKV")


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor,
    segments: Tensor | None = None, keep: Tensor | None = None,
    scale: float | None = None, l2norm: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, row by row, head by head, token by token, with outer products."""
    batch, length, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    outputs = torch.zeros_like(v)
    final = torch.zeros_like(state)
    for b in range(batch):
        for h in range(heads):
            s, last = state[b, h], None
            for t in range(length):
                if keep is not None and not keep[b, t]:
                    continue
                if segments is not None:
                    if last is not None and segments[b, t] != last:
                        s = torch.zeros_like(s)
                    last = segments[b, t]
                qt, kt = q[b, t, h], k[b, t, h]
                if l2norm:
                    qt = qt / torch.sqrt(qt.dot(qt) + 1e-6)
                    kt = kt / torch.sqrt(kt.dot(kt) + 1e-6)
                if log_decay is not None:
                    s = s * torch.exp(log_decay[b, t, h])
                s = s + beta[b, t, h] * torch.outer(kt, v[b, t, h] - s.T @ kt)
                outputs = outputs.index_put(
                    (torch.tensor(b), torch.tensor(t), torch.tensor(h)), scale * (s.T @ qt)
                )
            final = final.index_put((torch.tensor(b), torch.tensor(h)), s)
    return outputs, final


def make_inputs(
    length: int, batch: int = 2, heads: int = 2, width: int = 8, value: int = 5, seed: int = 0
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "q": normal(batch, length, heads, width),
        "k": normal(batch, length, heads, width),
        "v": normal(batch, length, heads, value),
        "beta": torch.sigmoid(normal(batch, length, heads)) * 1.5,
        "log_decay": -torch.nn.functional.softplus(normal(batch, length, heads)),
        "initial_state_BHKV": normal(batch, heads, width, value),
    }


def chunked(inputs: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    q, k, v, beta, log_decay = (inputs[n] for n in NAMES[:5])
    initial = inputs["initial_state_BHKV"]
    return delta_rule(q, k, v, beta, log_decay, initial_state_BHKV=initial, **options)


def compare(inputs: dict[str, Tensor], tolerance: float = 1e-9, **options: object) -> None:
    """Outputs, final state and all six gradients, with fp64 on both sides."""
    segments, keep = options.get("segment_ids_BT"), options.get("keep_BT")
    scale, l2norm = options.get("scale"), options.get("l2norm_qk", True)
    ours = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    truth = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    got = chunked(ours, **options)
    want = recurrence(*(truth[n] for n in NAMES), segments, keep, scale, l2norm)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in want]
    for results in (got, want):
        sum((x * w).sum() for x, w in zip(results, weights, strict=True)).backward()
    torch.testing.assert_close(got[0], want[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], want[1], atol=tolerance, rtol=tolerance)
    for name in NAMES:
        a, b = ours[name].grad, truth[name].grad
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(
            a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"grad of {n}: {m}"
        )


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 64), (2, 1), (63, 64), (65, 64), (127, 64), (33, 16), (48, 16)]
)
def test_equals_the_recurrence_at_odd_lengths(length: int, chunk: int) -> None:
    compare(make_inputs(length), chunk_size=chunk)


def test_unnormalised_with_a_given_scale() -> None:
    inputs = make_inputs(37)
    inputs["k"] *= 0.3
    compare(inputs, chunk_size=16, l2norm_qk=False, scale=0.7)


SEGMENTS = {
    "two": [0] * 20 + [1] * 20,
    "at a chunk's edge": [5] * 16 + [3] * 16 + [5] * 8,
    "one token each": list(range(40)),
    "one-token ones between": [0] * 7 + [1] + [2] + [0] * 22 + [1] * 8 + [2],
    "one": [4] * 40,
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_do_not_see_each_other(name: str) -> None:
    ids = torch.tensor([SEGMENTS[name], SEGMENTS["two"]])
    compare(make_inputs(40), segment_ids_BT=ids, chunk_size=16)


def test_packed_segments_equal_separate_runs() -> None:
    inputs = make_inputs(50, batch=1)
    inputs["initial_state_BHKV"].zero_()
    ids = torch.tensor([[0] * 11 + [1] * 1 + [2] * 38])
    o, state = chunked(inputs, segment_ids_BT=ids, chunk_size=16)
    for part in (slice(0, 11), slice(11, 12), slice(12, 50)):
        alone = {n: x[:, part] if x.shape[1] == 50 else x for n, x in inputs.items()}
        o_alone, state_alone = chunked(alone)
        torch.testing.assert_close(o[:, part], o_alone, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, state_alone, atol=1e-12, rtol=1e-12)


PADS = {
    "left": [0] * 9 + [1] * 31,
    "right": [1] * 31 + [0] * 9,
    "middle": [1] * 10 + [0] * 17 + [1] * 13,
    "scattered": [1, 0, 0, 1, 1] * 8,
    "all": [0] * 40,
}


@pytest.mark.parametrize("name", PADS)
@pytest.mark.parametrize("packed", [False, True])
def test_padding_leaves_the_state_alone(name: str, packed: bool) -> None:
    keep = torch.tensor([PADS[name], [1] * 40]).bool()
    ids = torch.tensor([[0] * 12 + [1] * 16 + [2] * 12, [0] * 40]) if packed else None
    inputs = make_inputs(40)
    compare(inputs, keep_BT=keep, segment_ids_BT=ids, chunk_size=16)
    o, _ = chunked(inputs, keep_BT=keep, chunk_size=16)
    assert (o[~keep] == 0).all()


def test_padding_may_hold_anything() -> None:
    keep = torch.tensor([PADS["middle"], PADS["left"]]).bool()
    inputs = make_inputs(40)
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


@pytest.mark.parametrize("decay", [0.0, -1e-4, -30.0, -300.0])
def test_extreme_decays(decay: float) -> None:
    inputs = make_inputs(70)
    inputs["log_decay"][:, ::3] = decay
    compare(inputs)


def test_forgetting_everything_is_a_new_start() -> None:
    inputs = make_inputs(40)
    inputs["log_decay"][:, 13] = -torch.inf
    o, state = chunked(inputs, chunk_size=16)
    late = {n: x[:, 13:] if x.shape[1] == 40 else torch.zeros_like(x) for n, x in inputs.items()}
    o_late, state_late = chunked(late, chunk_size=16)
    torch.testing.assert_close(o[:, 13:], o_late, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, state_late, atol=1e-12, rtol=1e-12)


def test_strong_decays_keep_fp32_digits_for_what_follows() -> None:
    inputs = make_inputs(64, width=16, value=16)
    inputs["log_decay"][:] = -1e-3
    inputs["log_decay"][:, :20] = -200.0
    want, _ = recurrence(*(inputs[n] for n in NAMES))
    got, _ = chunked({n: x.float() for n, x in inputs.items()})
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_no_decay_is_decay_one() -> None:
    inputs = make_inputs(40)
    o, state = delta_rule(*(inputs[n] for n in NAMES[:4]), None, chunk_size=16)
    zero = torch.zeros_like(inputs["initial_state_BHKV"])
    want = recurrence(*(inputs[n] for n in NAMES[:4]), None, zero)
    torch.testing.assert_close(o, want[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, want[1], atol=1e-12, rtol=1e-12)


def test_zero_vectors_are_harmless() -> None:
    inputs = make_inputs(20)
    for name in ("q", "k", "v"):
        inputs[name][:, 5:9] = 0
    compare(inputs, chunk_size=16)


def test_repeated_keys_stay_exact_in_fp32() -> None:
    """All keys equal and beta 1: the system is as far from the identity as it gets."""
    inputs = make_inputs(256, batch=1, width=16, value=16)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["beta"][:] = 1.0
    inputs["log_decay"][:] = 0.0
    want, _ = recurrence(*(inputs[n] for n in NAMES))
    got, _ = chunked({n: x.float() for n, x in inputs.items()})
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_two_halves_equal_the_whole() -> None:
    inputs = make_inputs(90)
    whole = chunked(inputs, chunk_size=16)
    first = {n: x[:, :37] if x.shape[1] == 90 else x for n, x in inputs.items()}
    o_first, state = chunked(first, chunk_size=16)
    second = {n: x[:, 37:] if x.shape[1] == 90 else state for n, x in inputs.items()}
    o_second, state = chunked(second, chunk_size=16)
    torch.testing.assert_close(torch.cat([o_first, o_second], 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("decays", [True, False])
def test_steps_equal_the_chunked_form(l2norm: bool, decays: bool) -> None:
    inputs = make_inputs(30)
    inputs["k"] *= 0.3
    log_decay = inputs["log_decay"] if decays else None
    qkvb = [inputs[n] for n in NAMES[:4]]
    initial = inputs["initial_state_BHKV"]
    whole = delta_rule(
        *qkvb, log_decay, initial_state_BHKV=initial, chunk_size=8, l2norm_qk=l2norm, scale=0.4
    )
    state, outputs = initial.clone(), []
    for t in range(30):
        decay = None if log_decay is None else log_decay[:, t]
        o, state = delta_rule_step(
            *(x[:, t] for x in qkvb), decay, state, l2norm_qk=l2norm, scale=0.4
        )
        outputs.append(o)
    assert torch.equal(initial, inputs["initial_state_BHKV"])
    torch.testing.assert_close(torch.stack(outputs, 1), whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, whole[1], atol=1e-12, rtol=1e-12)


def test_spans_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(100)
    monkeypatch.setattr(chunks, "SPAN_ELEMENTS", 1)
    ids = torch.tensor([[0] * 30 + [1] * 70, [0] * 64 + [1] * 36])
    compare(inputs, segment_ids_BT=ids, chunk_size=16)


def test_causal() -> None:
    inputs = make_inputs(40)
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
    want, state_want = recurrence(*(inputs[n].double() for n in NAMES))
    torch.testing.assert_close(state.double(), state_want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(o.double(), want, atol=1e-6, rtol=2**-8)


def test_fp32_gradients() -> None:
    inputs = make_inputs(130, batch=1, width=32, value=32)
    ours = {n: x.float().requires_grad_() for n, x in inputs.items()}
    truth = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    chunked(ours)[0].square().sum().backward()
    recurrence(*(truth[n] for n in NAMES))[0].square().sum().backward()
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
        ({"log_decay": torch.zeros(2, 10, 2, 8)}, "log_decay must have beta's shape"),
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
