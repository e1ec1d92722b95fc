"""Synthetic recall: a number hidden in filler text must be repeated at the end.

Everything is made here from a seed, for any tokenizer and exact to the token, so that a length is
a length for every model. Because the answer is the continuation of the prompt, greedy decoding
repeats it if and only if every answer token is the most likely one given the tokens before it: one
forward pass over prompt and answer scores an example, no generation is needed.

Shape letters: B examples, T tokens, A answer tokens (padded to the longest), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.distill.evaluation.recall_examples import (
    DEPTHS,
    KINDS,
    Kind,
    RecallExamples,
    retrieval_examples,
)
from ltconvert.distill.evaluation.statistics import proportion
from ltconvert.distill.precision import autocast

__all__ = [
    "DEPTHS",
    "KINDS",
    "Kind",
    "RecallExamples",
    "answer_scores",
    "recall_scores",
    "retrieval_examples",
]


@torch.inference_mode()
def answer_scores(
    model: nn.Module, examples: RecallExamples, *, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """``(exact_B bool, nll_B)`` on the CPU.

    ``exact``: greedy decoding would give the whole answer. ``nll``: nats an answer token, the
    finer measure where no answer is exact yet.

    Args:
        model: anything with ``forward(input_ids, logits_to_keep=n).logits`` (transformers' form).
    """
    device = next(model.parameters()).device
    examples = examples.to(device)
    ids_BT, start_B = examples.input_ids_BT, examples.answer_start_B
    longest = ids_BT.shape[1] - int(start_B.min())
    with autocast(device, precision):
        logits = model(input_ids=ids_BT, logits_to_keep=longest + 1, use_cache=False).logits
    logits_BAV = logits[:, :-1].float()
    target_BA = ids_BT[:, -longest:]
    index_A = torch.arange(ids_BT.shape[1] - longest, ids_BT.shape[1], device=device)
    answer_BA = index_A >= start_B[:, None]
    hit_BA = (logits_BAV.argmax(-1) == target_BA) | ~answer_BA
    nll_BA = F.cross_entropy(logits_BAV.transpose(1, 2), target_BA, reduction="none")
    nll_B = (nll_BA * answer_BA).sum(-1) / answer_BA.sum(-1)
    return hit_BA.all(-1).cpu(), nll_B.cpu()


def recall_scores(
    model: nn.Module,
    tokenizer: Any,
    lengths: Sequence[int],
    examples: int,
    *,
    seed: int = 0,
    kinds: Sequence[Kind] = KINDS,
    depths: Sequence[float] = DEPTHS,
    precision: str = "fp32",
    batch_tokens: int = 16_384,
) -> dict[str, Any]:
    """Exact match of the hidden number by kind, length and depth.

    Args:
        examples: examples a kind and length, the depths in turn.
        batch_tokens: tokens a forward pass, at least one row.

    Returns:
        ``{kind: {length: {"accuracy", "stderr", "nll", "examples", "by_depth": {depth:
        {"accuracy", "stderr", "examples"}}}}}``; lengths and depths are strings, as in JSON.
    """
    found: dict[str, Any] = {}
    for kind in kinds:
        found[kind] = {}
        for length in lengths:
            batch = retrieval_examples(tokenizer, length, examples, seed, kind, depths)
            rows = max(1, batch_tokens // length)
            found[kind][str(length)] = _length_scores(model, batch, precision, rows)
    return found


def _length_scores(
    model: nn.Module, batch: RecallExamples, precision: str, rows: int
) -> dict[str, Any]:
    parts = [
        answer_scores(model, batch.rows(first, first + rows), precision=precision)
        for first in range(0, len(batch), rows)
    ]
    exact_B = torch.cat([exact for exact, _ in parts])
    nll_B = torch.cat([nll for _, nll in parts])
    by_depth = {}
    for depth in sorted(set(batch.depth_B.tolist())):
        by_depth[f"{depth:g}"] = _share(exact_B[batch.depth_B == depth])
    return _share(exact_B) | {"nll": float(nll_B.mean()), "by_depth": by_depth}


def _share(exact: Tensor) -> dict[str, Any]:
    accuracy, stderr = proportion(exact)
    return {"accuracy": accuracy, "stderr": stderr, "examples": len(exact)}
