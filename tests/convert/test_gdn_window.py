"""The window beside the recurrence: against the split of a softmax, and as the teacher itself."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.transfer import build_student
from ltconvert.distill.calibrate import calibrate
from ltconvert.distill.data.batch import Batch
from ltconvert.errors import UserError
from ltconvert.kernels.window_attention import window_attention

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


def test_a_teacher_with_output_gates_is_refused() -> None:
    """They would act on the recurrence alone."""
    teacher = tiny_model(tiny_spec(), ["full"] * 3, sdpa_gate=True)
    with pytest.raises(UserError, match="output gates"):
        build_student(teacher, ["gdn_window"] * 3)


def test_with_the_teachers_rest_and_outside_it_is_full_attention() -> None:
    """The formula: share of the window times its output, and the rest times the rest's output."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 17, 8, generator=g, dtype=torch.float64) for _ in range(3))
    near = window_attention(*(y.transpose(1, 2) for y in (q, k, v)), window=WINDOW, scale=0.3)
    o_local, log_sum = (y.transpose(1, 2) for y in near)
    scores = 0.3 * q @ k.mT
    behind = torch.arange(17)[:, None] - torch.arange(17)
    outside = scores.masked_fill(behind < WINDOW, float("-inf"))[:, :, WINDOW:]
    share = torch.sigmoid(log_sum[:, :, WINDOW:] - outside.logsumexp(-1))[..., None]
    mixed = share * o_local[:, :, WINDOW:] + (1 - share) * outside.softmax(-1) @ v
    whole = scores.masked_fill(behind < 0, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(mixed, whole[:, :, WINDOW:], atol=1e-12, rtol=1e-10)


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
