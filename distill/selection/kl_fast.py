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

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor, nn

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.progress import Bar
from ltconvert.distill.selection.probe import Probe, Stopwatch, kl_sum, read_batch
from ltconvert.distill.selection.ranking import Stability, mean_ranks, order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.walk import Walk, walk, with_mixer


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
    state = probe.progress.state
    sums, cost = Sums(**state.get("sums", {})), Cost(**state.get("cost", {}))
    stability = Stability(probe.settings.stable_rounds, state.get("history", []))
    watch = Stopwatch(cost.seconds)
    to_do = probe.batches[len(stability.history) :]
    directions = 2 if probe.settings.direction == "both" else 1
    with probe.bar(len(to_do) * directions * probe.num_layers) as bar:
        for batch in to_do:
            if stability.settled:
                break
            score_batch(probe, batch, sums, cost, bar)
            stability.add(ranked(sums)[0][: probe.keep])
            cost.seconds = watch.seconds
            probe.progress.save(
                {"sums": asdict(sums), "cost": asdict(cost), "history": stability.history}
            )
    ranking, main, higher_is_better = ranked(sums)
    return Scores(
        columns=sums.columns(),
        ranking=ranking,
        main=main,
        higher_is_better=higher_is_better,
        history=stability.history,
        stopped_early=stability.settled and len(stability.history) < len(probe.batches),
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
    inputs, labels_N = read_batch(batch, probe.device)
    more = Sums(tokens=labels_N.numel())
    slots, tokens = len(teacher.model.schedule), inputs.tokens
    with probe.quiet_forward():
        target = walk(teacher, inputs)
        cost.add_visits(target.visits, slots, tokens)
        if direction != "restore":
            mixers = [layer.mixer for layer in student.model.layers]
            more.removed, visits = _each_layer(
                target, mixers, teacher, target.hidden_NC, labels_N, bar
            )
            cost.add_visits(visits, slots, tokens)
        if direction != "remove":
            base = walk(student, inputs)
            mixers = [layer.mixer for layer in teacher.model.layers]
            more.student = kl_sum(student, base.hidden_NC, teacher, target.hidden_NC, labels_N)
            more.restored, visits = _each_layer(
                base, mixers, teacher, target.hidden_NC, labels_N, bar
            )
            cost.add_visits(base.visits + visits, base.visits, tokens)
    cost.tokens += tokens
    sums.add(more)


def _each_layer(
    base: Walk,
    mixers: Sequence[nn.Module],
    teacher: LT2ForCausalLM,
    target_NC: Tensor,
    labels_N: Tensor,
    bar: Bar,
) -> tuple[list[float], int]:
    """KL to the teacher with each layer of ``base`` replaced in turn, and the layer visits."""
    total, kls = 0, []
    for layer, mixer in enumerate(mixers):
        hidden_NC, visits = with_mixer(base, layer, mixer)
        kls.append(kl_sum(base.model, hidden_NC, teacher, target_NC, labels_N))
        total += visits
        bar.advance()
    return kls, total
