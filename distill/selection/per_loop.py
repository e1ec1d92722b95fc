"""A study of looped teachers: in which loop is full attention worth most?

Each visit (a layer in one loop) of the linear student is made full alone, and scored by how much
the KL to the teacher falls. A student's mixers are per physical layer, so nothing is built from
this; it shows what a physical layer's score is made of. A batch costs ``(V + 1) / 2`` forwards for
V visits, since a pass sets out at the changed visit, and one whole pass of each model.

Shape letters: N scored tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ltconvert.convert.students.loop import Step
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import swapped
from ltconvert.distill.data import Batch
from ltconvert.distill.progress import Bar
from ltconvert.distill.records import write_json
from ltconvert.distill.selection.compare import kl_sums
from ltconvert.distill.selection.kl_fast import LAYERS_AT_ONCE
from ltconvert.distill.selection.probe import Probe, read_batch
from ltconvert.distill.selection.ranking import order
from ltconvert.distill.selection.result import Cost
from ltconvert.distill.selection.tally import Tally
from ltconvert.distill.selection.walk import Inputs, fitting, walk

PER_LOOP_FOLDER = "per_loop"  # in a run folder
PER_LOOP_FILE = "per_loop.json"


@dataclass
class Sums:
    """KL added up over ``tokens``: with one visit full, by slot, and of the student as it is."""

    restored: list[float] = field(default_factory=list)
    student: float = 0.0
    tokens: int = 0

    def gains(self) -> list[float]:
        """By how much each visit lowers the KL, nats a token."""
        return [(self.student - kl) / self.tokens for kl in self.restored]


@dataclass
class VisitScores:
    """The content of ``per_loop.json``.

    Attributes:
        visits: one a slot, in execution order: ``layer``, ``loop`` and ``gain`` in nats a token.
        ranking: slots, the most valuable first.
        keep: visits in the set that had to settle: full layers times loops.
        student_kl: of the linear student, nats a token.
    """

    num_layers: int
    loops: int
    keep: int
    visits: list[dict[str, Any]]
    ranking: list[int]
    student_kl: float
    batches: int
    stopped_early: bool
    cost: Cost

    @property
    def best(self) -> list[int]:
        """The slots of the most valuable visits."""
        return self.ranking[: self.keep]

    def gain(self, layer: int, loop: int) -> float | None:
        """Of one visit; None where there is none (prelude and coda)."""
        found = (v["gain"] for v in self.visits if (v["layer"], v["loop"]) == (layer, loop))
        return next(found, None)

    def save(self, path: Path) -> None:
        """Write the file whole, then rename it into place."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))


def rank_visits(probe: Probe) -> VisitScores:
    """Score all visits batch by batch until the best have settled or the batches are used up."""
    schedule, loops = probe.student.model.schedule, probe.student.config.num_loops
    keep = max(1, probe.keep * loops)
    tally = Tally(probe, Sums, probe.batches)
    sums = tally.sums
    passes = len(tally.to_do) * (len(schedule) + 1)  # one of a batch is the student as it is
    with probe.inputs.log.bar("select per loop", passes, "passes") as bar:
        for batch in tally:
            score_batch(probe, batch, sums, tally.cost, bar)
            tally.add(order(sums.gains())[:keep])
    return VisitScores(
        num_layers=probe.num_layers,
        loops=loops,
        keep=keep,
        visits=[_visit(step, gain) for step, gain in zip(schedule, sums.gains(), strict=True)],
        ranking=order(sums.gains()),
        student_kl=sums.student / sums.tokens,
        batches=len(tally.history),
        stopped_early=tally.stopped_early,
        cost=tally.cost,
    )


def _visit(step: Step, gain: float) -> dict[str, Any]:
    return {"layer": step.layer, "loop": step.loop, "gain": gain}


def score_batch(probe: Probe, batch: Batch, sums: Sums, cost: Cost, bar: Bar) -> None:
    """Add one batch to the sums and to the cost."""
    inputs = read_batch(batch, probe.device)
    full = [layer.mixer for layer in probe.teacher.model.layers]
    slots, kls, waiting = len(probe.student.model.schedule), list[float](), list[Tensor]()
    with probe.quiet_forward():
        target = walk(probe.teacher, inputs)
        cost.add_visits(target.visits, target.visits, inputs.tokens)
        for hidden_NC in each_visit(probe.student, full, inputs):
            waiting.append(hidden_NC)
            if len(waiting) == LAYERS_AT_ONCE or len(kls) + len(waiting) > slots:
                kls += kl_sums(probe.student, waiting, probe.teacher, target.hidden_NC)
                waiting.clear()
            bar.advance()
    *restored, base = kls
    for visits in (slots, *range(slots, 0, -1)):
        cost.add_visits(visits, slots, inputs.tokens)
    cost.tokens += inputs.tokens
    sums.restored = [a + b for a, b in zip(sums.restored or [0.0] * slots, restored, strict=True)]
    sums.student += base
    sums.tokens += int(inputs.at_BT.sum())


def each_visit(
    model: LT2ForCausalLM, mixers: Sequence[nn.Module], inputs: Inputs
) -> Iterator[Tensor]:
    """What the head reads [N, C] with another mixer in one visit, by slot; as it is at the end.

    One pass of the model goes on while each changed one sets out from it: no states are kept.
    """
    inner = model.model
    h_BTC = inner.embed(inputs.input_ids_BT)
    context = inner.context(h_BTC, attention_mask=inputs.keep_BT, segment_ids=inputs.segment_ids_BT)
    state = inner.start(h_BTC)
    for step in inner.schedule:
        with swapped(model, step.layer, fitting(mixers[step.layer], model)):
            changed = inner.visit(step, state, context)
        changed = inner.run(changed, context, first_slot=step.slot + 1)
        yield changed.h_BTC[inputs.at_BT]
        state = inner.visit(step, state, context)
    yield inner.finish(state).h_BTC[inputs.at_BT]
