"""What a looped model knows at every number of loops: held-out loss and recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ltconvert.benchmarks.looped_model import at_loops
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.recall import recall_scores
from ltconvert.distill.evaluation.scores import heldout_scores


def score(
    model: LT2ForCausalLM,
    tokenizer: Any,
    rows: Sequence[Batch],
    recall_lengths: Sequence[int],
    recall_examples: int,
    *,
    precision: str,
) -> dict[str, Any]:
    """``{loops: {"loss", "ppl", "ppl_stderr", "tokens", "recall"}}``, loops as in JSON a string.

    Args:
        rows: of held-out text, see ``evaluation.scores.heldout_rows``.
        recall_lengths, recall_examples: see ``evaluation.recall.recall_scores``.
    """
    scores = {}
    for loops in range(1, model.config.num_loops + 1):
        shorter = at_loops(model, loops)
        found = heldout_scores(shorter, None, rows, precision=precision)
        recall = recall_scores(
            shorter, tokenizer, recall_lengths, recall_examples, precision=precision
        )
        scores[str(loops)] = {
            "loss": math.log(found["teacher_ppl"]),
            "ppl": found["teacher_ppl"],
            "ppl_stderr": found["teacher_ppl_stderr"],
            "tokens": found["tokens"],
            "recall": recall,
        }
    return scores


def table(scores: dict[str, Any]) -> list[str]:
    """One row a number of loops; recall as the share of exact answers and nats an answer token."""
    cells = [
        (kind, length)
        for kind, lengths in next(iter(scores.values()))["recall"].items()
        for length in lengths
    ]
    names = ["loops", "held-out loss", "perplexity", *(f"{k} {n}" for k, n in cells)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for loops, found in scores.items():
        recall = [found["recall"][kind][length] for kind, length in cells]
        shown = [f"{x['accuracy']:.2f} ({x['nll']:.2f})" for x in recall]
        row = [loops, f"{found['loss']:.4f}", f"{found['ppl']:.2f}", *shown]
        lines.append(f"| {' | '.join(row)} |")
    return lines
