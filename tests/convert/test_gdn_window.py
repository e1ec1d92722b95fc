"""The window beside the recurrence: against the split of a softmax, and as the teacher itself."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.local import local_attention
from ltconvert.convert.transfer import build_student
from ltconvert.distill.calibrate import calibrate
from ltconvert.distill.data.batch import Batch

WINDOW = 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 3])
def test_up_to_the_window_it_is_the_teacher(family: str, loops: int) -> None:
    teacher = tiny_model(tiny_spec(family, num_loops=loops)).double()
    student = build_student(teacher, ["gdn_window"] * 3, {"window_tokens": WINDOW})
    with torch.no_grad():
        for layer in student.model.layers:  # whatever the new parts hold
            layer.mixer.rest_proj.bias.normal_()
        ids = tokens(2, 15)
        found, wanted = student(ids).logits, teacher(ids).logits
    torch.testing.assert_close(found[:, :WINDOW], wanted[:, :WINDOW], atol=1e-9, rtol=1e-9)
    assert (found[:, WINDOW:] - wanted[:, WINDOW:]).abs().max() > 1e-3


def test_with_the_teachers_rest_and_outside_it_is_full_attention() -> None:
    """The formula: share of the window times its output, and the rest times the rest's output."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 17, 8, generator=g, dtype=torch.float64) for _ in range(3))
    context = context_of(17)
    o_local, log_sum = local_attention(q, k, v, context, window=WINDOW, scale=0.3)
    scores = 0.3 * q @ k.mT
    behind = torch.arange(17)[:, None] - torch.arange(17)
    outside = scores.masked_fill(behind < WINDOW, float("-inf"))[:, :, WINDOW:]
    share = torch.sigmoid(log_sum[:, :, WINDOW:] - outside.logsumexp(-1))[..., None]
    mixed = share * o_local[:, :, WINDOW:] + (1 - share) * outside.softmax(-1) @ v
    whole = scores.masked_fill(behind < 0, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(mixed, whole[:, :, WINDOW:], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("cached", [0, 3, WINDOW - 1])
def test_blocks_of_queries_equal_single_queries(cached: int, cap: float | None) -> None:
    """23 tokens behind a cache, padding on the left and documents, one query at a time in fp64."""
    g = torch.Generator().manual_seed(1)
    length = 23
    total = cached + length
    q = torch.randn(2, 3, length, 4, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 3, total, 4, generator=g, dtype=torch.float64) for _ in range(2))
    keep = torch.ones(2, total, dtype=torch.bool)
    keep[0, :4] = False
    ids = None if cached else torch.tensor([[0] * 9 + [1] * 14, [0] * 2 + [1] * 3 + [2] * 18])
    context = context_of(length, keep_BS=keep, segment_ids_BT=ids)
    o, log_sum = local_attention(q, k, v, context, window=WINDOW, scale=0.7, cap=cap)
    for row in range(2):
        for t in range(length):
            at = cached + t
            seen = [
                s
                for s in range(max(0, at - WINDOW + 1), at + 1)
                if keep[row, s] and (ids is None or ids[row, s] == ids[row, t])
            ] or [at]
            scores = 0.7 * k[row, :, seen] @ q[row, :, t, :, None]
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            wanted = (scores.softmax(1) * v[row, :, seen]).sum(1)
            torch.testing.assert_close(o[row, :, t], wanted)
            torch.testing.assert_close(log_sum[row, :, t], scores[..., 0].logsumexp(-1))


def context_of(length: int, **parts: torch.Tensor | None) -> SequenceContext:
    return SequenceContext({}, length, torch.device("cpu"), torch.arange(length)[None], **parts)


@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
def test_calibration_measures_what_lies_outside(family: str) -> None:
    """Against the attention weights of each token alone, all in fp64."""
    teacher = tiny_model(tiny_spec(family, num_loops=1)).double()
    student = build_student(teacher, ["gdn_window"] * 3, {"window_tokens": WINDOW})
    ids = tokens(3, 40)
    segments = torch.zeros(3, 40, dtype=torch.int32)
    segments[1, 17:] = 1
    batch = Batch(ids, segments, ids, torch.ones(3, 40, dtype=torch.bool))
    calibrate(teacher, student, [batch], range(3))
    layer = next(i for i in range(3) if teacher.model.layers[i].mixer.window is None)
    inputs, sums, outputs = outside_of(teacher, layer, ids, segments)
    mixer = student.model.layers[layer].mixer
    torch.testing.assert_close(
        mixer.out_norm_weight, outputs.square().mean(0).sqrt(), atol=1e-6, rtol=1e-5
    )
    error = (mixer.rest_proj(inputs) - sums).square().mean()
    best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(len(inputs), 1)], -1), sums).solution
    least = (torch.cat([inputs, torch.ones(len(inputs), 1)], -1) @ best - sums).square().mean()
    assert least <= error <= least + 0.1 * sums.var()


def outside_of(teacher, layer, ids, segments):  # type: ignore[no-untyped-def]
    """Inputs [N, C], log sums [N, H] and outputs [N, H, D] of all tokens with keys outside."""
    seen = []
    mixer = teacher.model.layers[layer].mixer
    hook = mixer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
    with torch.no_grad():
        teacher(ids, segment_ids=segments)
        hook.remove()
        x, context = seen[0]
        scores, v = mixer.scores(x, context, torch.arange(ids.shape[1]))
    rows = []
    for b in range(len(ids)):
        for t in range(ids.shape[1]):
            keys = [s for s in range(t - WINDOW + 1) if segments[b, s] == segments[b, t]]
            if keys:
                some = scores[b, :, t, keys]
                o = (some.softmax(-1)[..., None] * v[b, :, keys]).sum(1)
                rows.append((x[b, t], some.logsumexp(-1), o))
    return tuple(torch.stack(part).double() for part in zip(*rows, strict=True))


def test_where_the_teachers_own_window_ends_there_is_nothing_outside() -> None:
    spec = tiny_spec("gemma3")
    windows = [w for w in spec.layer_windows if w is not None]
    assert windows
    teacher = tiny_model(spec).double()
    student = build_student(teacher, ["gdn_window"] * 3, {"window_tokens": 16})
    windowed = build_student(teacher, ["window"] * 3, {"window_tokens": 16})
    for layer, window in enumerate(spec.layer_windows):
        if window is None:
            student.model.layers[layer].mixer = windowed.model.layers[layer].mixer
    ids = tokens(2, 30)
    batch = Batch(ids, torch.zeros_like(ids), ids, torch.ones(2, 30, dtype=torch.bool))
    closed = [i for i, w in enumerate(spec.layer_windows) if w is not None]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(student(ids).logits, windowed(ids).logits)
            calibrate(teacher, student, [batch], closed)


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("length", [9, 64])
def test_under_autocast_scores_are_not_rounded(length: int, size: float) -> None:
    """The inputs are; from there on the log of the sum is good to fp32."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (size * torch.randn(1, 2, length, 32, generator=g).bfloat16() for _ in range(3))
    context = context_of(length)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = local_attention(q, k, v, context, window=WINDOW, scale=0.2)
    exact = [x.double() for x in (q, k, v)]
    _, wanted = local_attention(*exact, context_of(length), window=WINDOW, scale=0.2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
