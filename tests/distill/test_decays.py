"""Half-lives from the teacher's attention: found again where attention is a decay."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor, nn

from ltconvert.convert.mixers import MIXERS, SequenceContext
from ltconvert.convert.transfer import build_student
from ltconvert.distill.calibrate import calibrate
from ltconvert.distill.data import Batch
from ltconvert.distill.decays import CHOICES, LONGEST, SHORTEST, Reach

RATIO = (LONGEST / SHORTEST) ** (1 / (CHOICES - 1))  # from one choice to the next
HALF_LIVES = torch.tensor([2.0, 30.0, 400.0, math.inf])


class DecayingAttention(nn.Module):
    """Attention whose weights fall to a half in HALF_LIVES tokens, a number a head.

    ``sink`` is added to the score of every document's first token.
    """

    def __init__(self, window: int | None = None, sink: float = 0.0) -> None:
        super().__init__()
        self.window, self.sink = window, sink

    def scores(self, x_BTC: Tensor, context: SequenceContext, at_n: Tensor) -> tuple[Tensor, None]:
        behind_nT = at_n[:, None] - torch.arange(x_BTC.shape[1])
        rates_H11 = math.log(2.0) / HALF_LIVES[:, None, None]
        first_B11T = (context.positions_BT == 0)[:, None, None]
        return (-rates_H11 * behind_nT).float() + self.sink * first_B11T, None


def reach_of(source: DecayingAttention, lengths: list[list[int]], padding: int = 0) -> Tensor:
    """What rows of documents of those lengths tell, the last row padded on its right."""
    rows, length = len(lengths), sum(lengths[0])
    segments, positions = torch.zeros(2, rows, length, dtype=torch.int64)
    for row, documents in enumerate(lengths):
        parts = [torch.full((n,), i) for i, n in enumerate(documents)]
        segments[row] = torch.cat(parts)
        positions[row] = torch.cat([torch.arange(n) for n in documents])
    keep = torch.ones(rows, length, dtype=torch.bool)
    if padding:
        keep[-1, -padding:] = False
    context = SequenceContext({}, length, torch.device("cpu"), positions, segment_ids_BT=segments)
    mixer = MIXERS["gdn"](tiny_spec(), 0, conv_size=None)
    gauge = Reach(source, mixer)  # type: ignore[arg-type]
    gauge.keep_BT = keep
    gauge._add(torch.zeros(rows, length, 1), context)
    return gauge.half_lives()


@pytest.mark.parametrize("sink", [0.0, 12.0])
@pytest.mark.parametrize(
    "lengths", [[[600]], [[512, 88], [200, 400]]], ids=["one document", "packed"]
)
def test_a_decay_is_found_again(lengths: list[list[int]], sink: float) -> None:
    """Rows of 600 tokens tell 400 from longer; attention to all alike has the longest there is."""
    found = reach_of(DecayingAttention(sink=sink), lengths, padding=50)
    near = (found[:3] / HALF_LIVES[:3]).log().abs()
    assert (near <= math.log(RATIO)).all(), found
    assert found[3] == pytest.approx(LONGEST)


def test_a_window_hides_what_lies_behind_it() -> None:
    """Within 64 tokens half-lives of 2 and 30 are found, not cut short by the window."""
    found = reach_of(DecayingAttention(window=64), [[600]])
    assert ((found[:2] / HALF_LIVES[:2]).log().abs() <= math.log(RATIO)).all(), found


@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2", "retnet"])
def test_calibration_sets_the_decays(family: str, kind: str) -> None:
    """Of one batch: the number nearest to the median of the weights, counted one by one."""
    teacher = tiny_model(tiny_spec(family)).requires_grad_(False)
    student = build_student(teacher, [kind, "full", "window"], share=True)
    before = student.model.layers[0].mixer.rate_bias.clone()
    ids = tokens(2, 40)
    batch = Batch(ids, torch.zeros_like(ids), ids, torch.ones(2, 40, dtype=torch.bool))
    calibrate(teacher, student, [batch], range(3))
    mixer = student.model.layers[0].mixer
    assert not torch.equal(mixer.rate_bias, before)
    assert torch.isfinite(mixer.rate_bias).all()
    again = build_student(teacher, [kind] * 3, share=True).model.layers[0].mixer
    gauge = Reach(teacher.model.layers[0].mixer, again)
    gauge.keep_BT = batch.keep_BT
    with gauge.listen(), torch.no_grad():
        teacher(ids)
    again.set_half_lives(gauge.half_lives())
    torch.testing.assert_close(mixer.rate_bias, again.rate_bias)
    assert not teacher.model.layers[0].mixer._forward_pre_hooks


def test_rows_of_first_tokens_alone_change_nothing() -> None:
    teacher = tiny_model(tiny_spec()).requires_grad_(False)
    student = build_student(teacher, ["gdn"] * 3, share=True)
    before = student.model.layers[0].mixer.rate_bias.clone()
    ids = tokens(2, 6)
    every = torch.arange(6).expand(2, 6)
    calibrate(
        teacher, student, [Batch(ids, every, ids, torch.ones(2, 6, dtype=torch.bool))], range(3)
    )
    assert torch.equal(student.model.layers[0].mixer.rate_bias, before)
