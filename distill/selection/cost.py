"""What a method costs at most, before it starts: tokens read, forward passes, tokens trained on."""

from __future__ import annotations

from collections.abc import Sequence

from ltconvert.convert.students.loop import Step
from ltconvert.distill.selection.result import Cost
from ltconvert.recipes.stages import SelectSettings

BATCH_TOKENS = 4096  # most tokens of a scored batch


def batch_shape(settings: SelectSettings) -> tuple[int, int]:
    """Rows a batch, and batches. At least twice those that stability needs, where tokens allow."""
    length = settings.seq_len_tokens
    by_recall = settings.method in ("recall", "recall-greedy")
    rows = settings.recall_examples if by_recall else max(1, settings.eval_tokens // length)
    wanted = 2 * (settings.stable_rounds + 1)
    a_batch = max(1, min(BATCH_TOKENS // length, rows // wanted))
    if by_recall:
        return a_batch, -(-rows // a_batch)
    return a_batch, rows // a_batch


def each_layer_forwards(schedule: Sequence[Step]) -> float:
    """Whole forwards that it takes to change every layer in turn, setting out at each.

    ``N - (N - 1) / (2 T)`` for N layers in T loops: the layer at place i skips i of N T visits.
    """
    first: dict[int, int] = {}
    for step in schedule:
        first.setdefault(step.layer, step.slot)
    return sum(1 - slot / len(schedule) for slot in first.values())


def most_cost(settings: SelectSettings, schedule: Sequence[Step], keep: int) -> Cost:
    """The cost if nothing settles early; a method that needs no scores costs nothing."""
    num_layers = len({step.layer for step in schedule})
    method = settings.method
    if method in ("uniform", "list") or keep in (0, num_layers):
        return Cost()
    if method == "kl-gates":
        return Cost(trained_tokens=settings.train_tokens)
    rows, batches = batch_shape(settings)
    tokens = rows * settings.seq_len_tokens
    each = each_layer_forwards(schedule)
    if method == "kl":
        # The look at one batch that puts the layers in order.
        trained = num_layers * settings.train_tokens
        return Cost(tokens, each + 2, (each + 2) * tokens, trained)
    forwards = {
        "recall": each + 1,
        "kl-greedy": keep * (each + 2),
        "recall-greedy": keep * (each + 2),
        "kl-fast": {"remove": each + 1, "restore": each + 2, "both": 2 * each + 2}[
            settings.direction
        ],
    }[method]
    rounds = keep if method.endswith("-greedy") else 1
    return Cost(rounds * batches * tokens, batches * forwards, batches * forwards * tokens)
