"""Method ``kl-fast``: forward passes only; how much KL a single layer is worth, from both ends.

``remove``: the teacher with one layer made linear: its KL is the damage that the layer prevents.
``restore``: the linear student with one layer made full: by how much its KL falls.
``both``: the mean of the two ranks. The two disagree by nature (the first judges a layer among
intact neighbours, the second among linear ones) and their scales cannot be compared, ranks can.

A batch costs each direction ``N - (N - 1) / (2 T)`` forwards for N layers in T loops, since a pass
sets out at the changed layer, on top of the one whole pass of the teacher that both share and, for
``restore``, one of the student.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ltconvert.distill.data import Batch
from ltconvert.distill.progress import Bar
from ltconvert.distill.selection.compare import kl_sums
from ltconvert.distill.selection.probe import Probe, read_batch
from ltconvert.distill.selection.ranking import mean_ranks, order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.tally import Tally
from ltconvert.distill.selection.walk import Walk, walk, with_mixer

LAYERS_AT_ONCE = 8  # final hidden states kept until they are compared together


@dataclass
class Sums:
    """KL added up over ``tokens``: the changed models' by layer, the all-linear student's."""

    removed: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    student: float = 0.0
    tokens: int = 0

    def add(self, other: Sums) -> None:
        """Take in one more batch."""
        for name in ("removed", "restored"):
            mine, more = getattr(self, name), getattr(other, name)
            setattr(
                self, name, [a + b for a, b in zip(mine or [0.0] * len(more), more, strict=True)]
            )
        self.student += other.student
        self.tokens += other.tokens

    def columns(self) -> dict[str, list[float]]:
        """Per-token damage and gain by layer, and their mean rank where both are there."""
        columns: dict[str, list[float]] = {}
        if self.removed:
            columns["damage"] = [kl / self.tokens for kl in self.removed]
        if self.restored:
            columns["gain"] = [(self.student - kl) / self.tokens for kl in self.restored]
        if len(columns) == 2:
            columns["mean_rank"] = mean_ranks(list(columns.values()))
        return columns


def rank(probe: Probe) -> Scores:
    """Score all layers batch by batch until the choice has settled or the batches are used up."""
    tally = Tally(probe, Sums, probe.batches)
    sums, cost = tally.sums, tally.cost
    directions = 2 if probe.settings.direction == "both" else 1
    with probe.bar(len(tally.to_do) * directions * probe.num_layers) as bar:
        for batch in tally:
            score_batch(probe, batch, sums, cost, bar)
            tally.add(ranked(sums)[0][: probe.keep])
    ranking, main, higher_is_better = ranked(sums)
    return Scores(
        columns=sums.columns(),
        ranking=ranking,
        main=main,
        higher_is_better=higher_is_better,
        history=tally.history,
        stopped_early=tally.stopped_early,
        facts={"student_kl": sums.student / sums.tokens} if sums.restored else {},
        cost=cost,
    )


def ranked(sums: Sums) -> tuple[list[int], str, bool]:
    """Layers by value, the column that says so, and whether it grows with value."""
    columns = sums.columns()
    if "mean_rank" not in columns:
        ((name, column),) = columns.items()
        return order(column), name, True
    return order([-value for value in columns["mean_rank"]]), "mean_rank", False


def score_batch(probe: Probe, batch: Batch, sums: Sums, cost: Cost, bar: Bar) -> None:
    """Add one batch to the sums and to the cost."""
    teacher, student, direction = probe.teacher, probe.student, probe.settings.direction
    inputs = read_batch(batch, probe.device)
    more = Sums(tokens=int(inputs.at_BT.sum()))
    with probe.quiet_forward():
        target = walk(teacher, inputs)
        cost.add_visits(target.visits, target.visits, inputs.tokens)
        if direction != "restore":
            linear = {i: layer.mixer for i, layer in enumerate(student.model.layers)}
            more.removed = list(kl_of_changed(target, linear, target, cost, bar).values())
        if direction != "remove":
            base = walk(student, inputs)
            cost.add_visits(base.visits, base.visits, inputs.tokens)
            full = {i: layer.mixer for i, layer in enumerate(teacher.model.layers)}
            (more.student,) = kl_sums(student, [base.hidden_NC], teacher, target.hidden_NC)
            more.restored = list(kl_of_changed(base, full, target, cost, bar).values())
    cost.tokens += inputs.tokens
    sums.add(more)


def kl_of_changed(
    base: Walk, mixers: dict[int, nn.Module], target: Walk, cost: Cost, bar: Bar
) -> dict[int, float]:
    """KL to ``target`` of ``base`` with one layer changed, for each layer of ``mixers``."""
    found: dict[int, float] = {}
    layers = list(mixers)
    for start in range(0, len(layers), LAYERS_AT_ONCE):
        group = layers[start : start + LAYERS_AT_ONCE]
        hidden = []
        for layer in group:
            hidden_NC, visits = with_mixer(base, layer, mixers[layer])
            hidden.append(hidden_NC)
            cost.add_visits(visits, base.visits, base.inputs.tokens)
            bar.advance()
        kls = kl_sums(base.model, hidden, target.model, target.hidden_NC)
        found |= dict(zip(group, kls, strict=True))
    return found
