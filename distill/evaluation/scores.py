"""KL to the teacher, perplexity and top-1 agreement on held-out text.

Shape letters: B rows, T tokens, C hidden width, N scored tokens, R rows of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch, heldout_batches
from ltconvert.distill.evaluation.statistics import ratio
from ltconvert.distill.precision import autocast
from ltconvert.errors import UserError
from ltconvert.kernels.linear_kl import linear_scores
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.evaluation import EvalSettings

QUANTITIES = ("kl", "student_nll", "teacher_nll", "agreement")
NUM_BUCKETS = 32
BATCH_TOKENS = 4096  # tokens of a forward pass


def heldout_rows(data: DataSettings, tokenizer: Any, settings: EvalSettings) -> list[Batch]:
    """The fixed rows that a run is scored on, at every stage and at its end."""
    length = settings.heldout_seq_len_tokens
    rows = max(1, BATCH_TOKENS // length)
    return heldout_batches(data, tokenizer, settings.heldout_tokens, length, rows)


@torch.inference_mode()
def heldout_scores(
    teacher: LT2ForCausalLM,
    student: LT2ForCausalLM | None,
    batches: Iterable[Batch],
    *,
    precision: str = "fp32",
) -> dict[str, Any]:
    """How far a student is from its teacher on fixed text. Logits never stand in memory as a whole.

    Scored are the tokens that have a label: not padding, not the last token of a document.

    Args:
        teacher, student: on one device; without a student only the teacher is scored.
        batches: see ``heldout_rows``.
        precision: ``fp32`` or ``bf16``.

    Returns:
        ``kl`` = KL(teacher || student) in nats a token, ``student_ppl``, ``teacher_ppl``,
        ``agreement`` (share of tokens whose most likely successor is the same), each with
        ``<name>_stderr`` over rows (None with one row), ``tokens``, ``rows``, and
        ``kl_by_position``: KL over how many tokens of the document came before, in buckets.
        Without a student: ``teacher_ppl``, ``teacher_ppl_stderr``, ``tokens``, ``rows``.

    Raises:
        UserError: there is no token to score, or the teacher makes what is no number of them.
    """
    rows = [_score_batch(teacher, student, batch, precision) for batch in batches]
    counts_R = torch.cat([counts for counts, *_ in rows]) if rows else torch.zeros(0)
    if float(counts_R.sum()) == 0:
        raise UserError(
            "no held-out token to score: the held-out documents are empty; "
            "raise data.heldout_share or give more text"
        )
    sums_QR = torch.cat([sums for _, sums, _ in rows], dim=1)
    scores = _summary(sums_QR, counts_R, with_student=student is not None)
    if math.isnan(scores["teacher_ppl"]):
        who = "the model" if student is None else "the teacher"
        raise UserError(
            f"{who} makes what is no number of held-out text: its weights are damaged, or do not "
            "fit its config"
        )
    if student is not None:
        scores["kl_by_position"] = _by_position(torch.cat([sums for *_, sums in rows], dim=1))
    return scores


def describe(scores: dict[str, Any]) -> str:
    """One line for a log."""
    parts = [
        f"{who} perplexity {scores[f'{who}_ppl']:.2f}"
        for who in ("teacher", "student")
        if f"{who}_ppl" in scores
    ]
    if "kl" in scores:
        parts += [f"KL {scores['kl']:.4f} nats a token", f"agreement {scores['agreement']:.1%}"]
    return f"held-out text, {scores['tokens']:,} tokens: {', '.join(parts)}"


def last_hidden(model: LT2ForCausalLM, batch: Batch) -> Tensor:
    """The normed stream [B, T, C] that the head reads."""
    return model.model(
        batch.input_ids_BT, attention_mask=batch.mask_BT, segment_ids=batch.segment_ids_BT
    ).last_hidden_state


def _score_batch(
    teacher: LT2ForCausalLM, student: LT2ForCausalLM | None, batch: Batch, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``(counts_B, sums_QB, kl sums and counts by position [2, B, buckets])``, fp64, on the CPU."""
    device = teacher.device
    batch = batch.to(device)
    scored_BT = batch.labels_BT >= 0
    with autocast(device, precision):
        teacher_BTC = last_hidden(teacher, batch)
        student_BTC = teacher_BTC if student is None else last_hidden(student, batch)
        pupil = teacher if student is None else student
        scores = linear_scores(
            student_BTC[scored_BT],
            pupil.head_weight,
            teacher_BTC[scored_BT],
            teacher.head_weight,
            batch.labels_BT[scored_BT],
            student_softcap=pupil.config.final_softcap,
            teacher_softcap=teacher.config.final_softcap,
            vocab_size=min(pupil.config.vocab_size, teacher.config.vocab_size),
        )
    values_QN = torch.stack(
        [scores.kl_N, scores.student_nll_N, scores.teacher_nll_N, scores.agree_N.float()]
    ).double()
    sums_QB = torch.stack([_spread(v_N, scored_BT).sum(-1) for v_N in values_QN])
    buckets = _bucket(document_positions(batch.segment_ids_BT), scored_BT, values_QN[0])
    return scored_BT.sum(-1).double().cpu(), sums_QB.cpu(), buckets.cpu()


def _spread(values_N: Tensor, scored_BT: Tensor) -> Tensor:
    spread_BT = torch.zeros(scored_BT.shape, dtype=values_N.dtype, device=values_N.device)
    spread_BT[scored_BT] = values_N
    return spread_BT


def document_positions(segment_ids_BT: Tensor) -> Tensor:
    """Tokens of the same document before each token in its row, [B, T]."""
    index_T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device)
    starts_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    first_BT = torch.where(starts_BT, index_T, torch.zeros_like(index_T)).cummax(dim=-1).values
    return index_T - first_BT


def bucket_edges(bucket: int) -> tuple[int, int]:
    """First position of a bucket and the one after its last: [0, 16), [16, 32), [32, 64), ..."""
    return (0, 16) if bucket == 0 else (16 << (bucket - 1), 16 << bucket)


def bucket_of(positions: Tensor) -> Tensor:
    """The bucket of each position."""
    return torch.floor(torch.log2(positions.clamp(min=1).double() / 8)).clamp(min=0).long()


def _bucket(positions_BT: Tensor, scored_BT: Tensor, kl_N: Tensor) -> Tensor:
    """KL sums and counts by row and position bucket, [2, B, NUM_BUCKETS]."""
    bucket_BT = bucket_of(positions_BT)
    rows_B1 = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
    cell_N = (rows_B1 * NUM_BUCKETS + bucket_BT)[scored_BT]
    sums = kl_N.new_zeros(2, len(positions_BT) * NUM_BUCKETS)
    sums[0].index_add_(0, cell_N, kl_N)
    sums[1].index_add_(0, cell_N, torch.ones_like(kl_N))
    return sums.unflatten(1, (-1, NUM_BUCKETS))


def _by_position(sums_2RK: Tensor) -> list[dict[str, Any]]:
    """Mean KL of each bucket with tokens, with its standard error over rows."""
    found = []
    for bucket in range(NUM_BUCKETS):
        sums_R, counts_R = sums_2RK[0, :, bucket], sums_2RK[1, :, bucket]
        if float(counts_R.sum()) == 0:
            continue
        kl, stderr = ratio(sums_R, counts_R)
        first, end = bucket_edges(bucket)
        tokens = int(counts_R.sum())
        found.append({"first": first, "end": end, "kl": kl, "kl_stderr": stderr, "tokens": tokens})
    return found


def _summary(sums_QR: Tensor, counts_R: Tensor, *, with_student: bool) -> dict[str, Any]:
    means = {name: ratio(sums_QR[i], counts_R) for i, name in enumerate(QUANTITIES)}
    scores: dict[str, Any] = {}
    for name in ("kl", "agreement") if with_student else ():
        scores[name], scores[f"{name}_stderr"] = means[name]
    for who in ("student", "teacher") if with_student else ("teacher",):
        nll, stderr = means[f"{who}_nll"]
        ppl = math.exp(min(nll, 700.0))  # a broken model must not end in an OverflowError
        scores[f"{who}_ppl"] = ppl
        scores[f"{who}_ppl_stderr"] = None if stderr is None else ppl * stderr
    return scores | {"tokens": int(counts_R.sum()), "rows": int((counts_R > 0).sum())}
