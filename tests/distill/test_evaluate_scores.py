"""Held-out scores against full logits in fp64, and the statistics under them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from evaluation_case import BATCHES, make_batch
from helpers import FAMILIES, tiny_model, tiny_spec
from torch.nn import functional as F

from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import bucket_edges, document_positions, heldout_scores
from ltconvert.distill.evaluation.statistics import proportion, ratio, recovery
from ltconvert.errors import UserError


def document_logits(model: Any, batch: Batch, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each document run alone, in fp64: ``(log probabilities, labels)``."""
    found = []
    kept = batch.keep_BT[row]
    for segment in batch.segment_ids_BT[row][kept].unique():
        chosen = (batch.segment_ids_BT[row] == segment) & kept
        ids = batch.input_ids_BT[row][chosen][None]
        logits = model(input_ids=ids).logits[0, :-1].double()
        found.append((F.log_softmax(logits, -1), ids[0, 1:]))
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
@torch.no_grad()
def test_scores_equal_those_of_documents_run_alone(family: str) -> None:
    assert family in FAMILIES
    spec = tiny_spec(family)
    teacher, student = tiny_model(spec), tiny_model(spec, ["gdn", "full", "gdn"], seed=1)
    scores = heldout_scores(teacher, student, BATCHES)
    rows = []
    for batch in BATCHES:
        for row in range(len(batch.input_ids_BT)):
            kl, nll, agree, n = 0.0, [0.0, 0.0], 0, 0
            pairs = zip(
                document_logits(teacher, batch, row),
                document_logits(student, batch, row),
                strict=True,
            )
            for (t, labels), (s, _) in pairs:
                kl += float((t.exp() * (t - s)).sum())
                nll[0] -= float(t.gather(1, labels[:, None]).sum())
                nll[1] -= float(s.gather(1, labels[:, None]).sum())
                agree += int((t.argmax(-1) == s.argmax(-1)).sum())
                n += len(labels)
            rows.append((kl, *nll, agree, n))
    total = sum(row[4] for row in rows)
    assert scores["tokens"] == total == 18 + 19 + 11 and scores["rows"] == 3
    assert scores["kl"] == pytest.approx(sum(r[0] for r in rows) / total, rel=1e-4)
    assert scores["teacher_ppl"] == pytest.approx(
        math.exp(sum(r[1] for r in rows) / total), rel=1e-4
    )
    assert scores["student_ppl"] == pytest.approx(
        math.exp(sum(r[2] for r in rows) / total), rel=1e-4
    )
    assert scores["agreement"] == pytest.approx(sum(r[3] for r in rows) / total)
    mean = sum(r[0] for r in rows) / total
    spread = sum((r[0] - mean * r[4]) ** 2 for r in rows) * 3 / 2
    assert scores["kl_stderr"] == pytest.approx(math.sqrt(spread) / total, rel=1e-3)


def test_a_teacher_is_its_own_perfect_student() -> None:
    teacher = tiny_model(tiny_spec())
    scores = heldout_scores(teacher, teacher, BATCHES)
    assert scores["kl"] == pytest.approx(0.0, abs=1e-6) and scores["agreement"] == 1.0
    assert scores["student_ppl"] == scores["teacher_ppl"]


def test_a_teacher_alone_has_a_perplexity_and_nothing_else() -> None:
    teacher = tiny_model(tiny_spec())
    alone = heldout_scores(teacher, None, BATCHES)
    assert set(alone) == {"teacher_ppl", "teacher_ppl_stderr", "tokens", "rows"}
    assert alone["teacher_ppl"] == heldout_scores(teacher, teacher, BATCHES)["teacher_ppl"]


@pytest.mark.parametrize(("alone", "who"), [(True, "the model"), (False, "the teacher")])
def test_a_damaged_teacher_is_one_line(alone: bool, who: str) -> None:
    teacher = tiny_model(tiny_spec())
    teacher.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match=f"^{who} makes what is no number of held-out text"):
        heldout_scores(teacher, None if alone else tiny_model(tiny_spec()), BATCHES)


def test_buckets_hold_all_tokens_and_the_same_kl() -> None:
    spec = tiny_spec()
    teacher, student = tiny_model(spec), tiny_model(spec, ["gdn"] * 3, seed=1)
    scores = heldout_scores(teacher, student, BATCHES)
    buckets = scores["kl_by_position"]
    assert [(b["first"], b["end"]) for b in buckets] == [(0, 16), (16, 32)]
    assert [b["tokens"] for b in buckets] == [48 - 3, 3]  # one document of 20: positions 16 to 18
    mean = sum(b["kl"] * b["tokens"] for b in buckets) / 48
    assert mean == pytest.approx(scores["kl"], rel=1e-6)


def test_positions_start_again_with_every_document() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert document_positions(segments).tolist() == expected
    assert [bucket_edges(i) for i in range(3)] == [(0, 16), (16, 32), (32, 64)]


def test_no_tokens_is_the_users_mistake() -> None:
    empty = make_batch([[1]], 4, 0)
    with pytest.raises(UserError, match=r"no held-out token to score.*heldout_share"):
        heldout_scores(tiny_model(tiny_spec()), None, [empty])


def test_ratio_of_equal_rows_is_the_usual_standard_error() -> None:
    sums, counts = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.full((4,), 2.0)
    mean, stderr = ratio(sums, counts)
    values = sums / 2
    assert mean == pytest.approx(float(values.mean()))
    assert stderr == pytest.approx(float(values.std() / 2))
    assert ratio(sums[:1], counts[:1]) == (0.5, None)
    assert math.isnan(ratio(sums[:0], counts[:0])[0])


def test_proportion_has_bessels_correction() -> None:
    hits = [True, False, True, True]
    share, stderr = proportion(hits)
    expected = torch.tensor(hits).double().std() / 2
    assert share == 0.75 and stderr == pytest.approx(float(expected))
    assert proportion([True]) == (1.0, None)


def test_recovery_and_its_error() -> None:
    share, stderr = recovery(0.5, 0.75, 0.25, 0.02, 0.01)
    assert share == pytest.approx(0.5)
    # d share / d student = 1 / 0.5, d share / d teacher = -0.25 / 0.5^2
    assert stderr == pytest.approx(math.hypot(0.02 / 0.5, 0.01 * 0.25 / 0.25))
    assert recovery(0.5, 0.25, 0.25) == (None, None)
    assert recovery(0.5, 0.75, 0.25, None, 0.01) == (pytest.approx(0.5), None)
