"""Method ``recall``: how much worse the teacher retrieves when one of its layers is made linear.

Examples are synthetic: four numbers hidden in filler text, one is asked for at the end. A layer's
score is the drop of the answer's log-probability; the drop of exact answers is shown beside it, but
moves in steps that are too coarse to rank by. Needs no text and no all-linear forward, and looks
at what linear layers lose first.

Shape letters: B rows, T tokens, C hidden width, A answer tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data.batch import IGNORED, Batch
from ltconvert.distill.evaluation.recall import Kind, RecallExamples, retrieval_examples
from ltconvert.distill.progress import Bar
from ltconvert.distill.selection.cost import batch_shape
from ltconvert.distill.selection.probe import Probe
from ltconvert.distill.selection.ranking import order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.tally import Tally
from ltconvert.distill.selection.walk import Inputs, walk, with_mixer
from ltconvert.errors import UserError
from ltconvert.recipes.stages import SelectSettings

KIND: Kind = "multikey"


@dataclass
class Sums:
    """Over the examples so far: log-probabilities of answers (nats a token) and exact answers."""

    base_log_prob: float = 0.0
    base_exact: int = 0
    log_prob: list[float] = field(default_factory=list)
    exact: list[int] = field(default_factory=list)
    examples: int = 0

    def columns(self) -> dict[str, list[float]]:
        """Mean drop of both by layer."""
        return {
            "log_prob_drop": [(self.base_log_prob - x) / self.examples for x in self.log_prob],
            "accuracy_drop": [(self.base_exact - x) / self.examples for x in self.exact],
        }


def rank(probe: Probe) -> Scores:
    """Score all layers batch by batch until the choice has settled or the examples are used up."""
    tally = Tally(probe, Sums, example_batches(probe))
    sums = tally.sums
    with probe.bar(len(tally.to_do) * probe.num_layers) as bar:
        for batch in tally:
            score_batch(probe, batch, sums, tally.cost, bar)
            tally.add(order(sums.columns()["log_prob_drop"])[: probe.keep])
    columns = sums.columns()
    return Scores(
        columns=columns,
        ranking=order(columns["log_prob_drop"]),
        main="log_prob_drop",
        history=tally.history,
        stopped_early=tally.stopped_early,
        facts={
            "teacher_accuracy": sums.base_exact / sums.examples,
            "teacher_log_prob": sums.base_log_prob / sums.examples,
        },
        cost=tally.cost,
    )


def example_batches(probe: Probe) -> list[RecallExamples]:
    """All examples, cut into batches; the same in every call.

    Raises:
        UserError: a row is too short for statements and question.
    """
    return draw(probe.settings, probe.inputs.tokenizer, probe.inputs.seed)


def draw(settings: SelectSettings, tokenizer: Any, seed: int) -> list[RecallExamples]:
    """The same, from what it takes."""
    length, count = settings.seq_len_tokens, settings.recall_examples
    try:
        examples = retrieval_examples(tokenizer, length, count, seed, KIND)
    except UserError as error:
        reason = str(error).split(";")[0]
        raise UserError(f"{reason}; raise select.seq_len_tokens") from None
    rows, _ = batch_shape(settings)
    return [examples.rows(first, first + rows) for first in range(0, count, rows)]


def as_batch(examples: RecallExamples) -> Batch:
    """The examples as text whose answers alone are scored, for methods that read text."""
    ids_BT = examples.input_ids_BT
    labels_BT = F.pad(ids_BT[:, 1:], (0, 1), value=IGNORED)
    labels_BT = labels_BT.where(answers_at(examples), IGNORED)
    return Batch(ids_BT, torch.zeros_like(ids_BT, dtype=torch.int32), labels_BT, ids_BT >= 0)


def answers_at(examples: RecallExamples) -> Tensor:
    """The tokens that predict an answer's, [B, T]: each is the one before."""
    index_T = torch.arange(examples.input_ids_BT.shape[1], device=examples.input_ids_BT.device)
    start_B = examples.answer_start_B
    return (index_T >= start_B[:, None] - 1) & (index_T < len(index_T) - 1)


def score_batch(probe: Probe, examples: RecallExamples, sums: Sums, cost: Cost, bar: Bar) -> None:
    """Add one batch: the teacher as it is, and with each layer linear."""
    teacher = probe.teacher
    examples = examples.to(probe.device)
    inputs = Inputs(examples.input_ids_BT, None, None, answers_at(examples))
    log_prob, exact = [0.0] * probe.num_layers, [0] * probe.num_layers
    with probe.quiet_forward():
        base = walk(teacher, inputs)
        base_log_prob, base_exact = answers(teacher, base.hidden_NC, inputs)
        visits = base.visits
        for layer, block in enumerate(probe.student.model.layers):
            hidden_AC, more = with_mixer(base, layer, block.mixer)
            log_prob[layer], exact[layer] = answers(teacher, hidden_AC, inputs)
            visits += more
            bar.advance()
    sums.base_log_prob += base_log_prob
    sums.base_exact += base_exact
    sums.log_prob = _plus(sums.log_prob, log_prob)
    sums.exact = _plus(sums.exact, exact)
    sums.examples += len(examples)
    cost.tokens += inputs.tokens
    cost.add_visits(visits, base.visits, inputs.tokens)


def answers(model: LT2ForCausalLM, hidden_AC: Tensor, inputs: Inputs) -> tuple[float, int]:
    """Sum over rows of the answer tokens' mean log-probability, and the rows wholly right."""
    logits_AV = model.logits(hidden_AC).float()
    target_A = inputs.input_ids_BT[:, 1:][inputs.at_BT[:, :-1]]
    row_A = inputs.at_BT.nonzero()[:, 0]
    rows = inputs.at_BT.shape[0]
    log_prob_A = -F.cross_entropy(logits_AV, target_A, reduction="none").double()
    total_B = torch.bincount(row_A, weights=log_prob_A, minlength=rows)
    wrong_A = logits_AV.argmax(-1) != target_A
    wrong_B = torch.bincount(row_A, weights=wrong_A.double(), minlength=rows)
    return float((total_B / inputs.at_BT.sum(-1)).sum()), int((wrong_B == 0).sum())


def _plus(so_far: list, more: list) -> list:
    return [a + b for a, b in zip(so_far, more, strict=True)] if so_far else more
