"""Methods ``kl-greedy`` and ``recall-greedy``: make the best layer of the linear student full,
score again, and so on; by the KL on text, or on the answers to synthetic retrieval.

Scores of single layers (``kl-fast``) do not know that two layers may do the same work; scoring
again after every pick does. A round costs a batch at most ``N - (N - 1) / (2 T)`` forwards (layers
already picked drop out) and one whole pass of each model; there are as many rounds as layers kept.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from ltconvert.convert.transfer import swapped
from ltconvert.distill.data import Batch
from ltconvert.distill.progress import Bar
from ltconvert.distill.selection.compare import kl_sums
from ltconvert.distill.selection.kl_fast import kl_of_changed
from ltconvert.distill.selection.probe import Probe, Stopwatch, read_batch
from ltconvert.distill.selection.ranking import Stability, order
from ltconvert.distill.selection.result import Cost, Scores
from ltconvert.distill.selection.walk import fitting, walk


@dataclass
class Round:
    """KL sums of one round, on the batches seen so far.

    Attributes:
        base: of the student with the layers picked before.
        with_layer: of that student with one more layer full; infinite for layers picked before.
        winners: the best layer after each batch.
    """

    base: float = 0.0
    with_layer: list[float] = field(default_factory=list)
    tokens: int = 0
    winners: list[list[int]] = field(default_factory=list)

    def gains(self) -> list[float]:
        """By how much each layer lowers the KL a token; minus infinity for layers picked before."""
        return [(self.base - kl) / self.tokens for kl in self.with_layer]


@dataclass
class Picks:
    """The layers picked, in order, with their gains; what the base KL was before each pick."""

    layers: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    base_kl: list[float] = field(default_factory=list)


def rank(probe: Probe) -> Scores:
    """Pick ``probe.keep`` layers one by one; a round ends early once its winner has settled."""
    state = probe.progress.state
    picks, cost = Picks(**state.get("picks", {})), Cost(**state.get("cost", {}))
    current = _round(state.get("round"))
    watch, early = Stopwatch(cost.seconds), bool(state.get("early", False))
    last = current
    while len(picks.layers) < probe.keep:
        stability = Stability(probe.settings.stable_rounds, current.winners)
        to_do = probe.batches[len(current.winners) :]
        with probe.bar(len(to_do) * (probe.num_layers - len(picks.layers))) as bar:
            for batch in to_do:
                if stability.settled:
                    break
                score_batch(probe, batch, picks.layers, current, cost, bar)
                stability.add(order(current.gains())[:1])
                cost.seconds = watch.seconds
                _save(probe, picks, current, cost, early)
        early = early or len(current.winners) < len(probe.batches)
        _pick(probe, picks, current)
        last, current = current, Round()
        if len(picks.layers) < probe.keep:
            _save(probe, picks, current, cost, early)
    return _scores(picks, last, cost, early)


def _round(saved: dict | None) -> Round:
    return Round(**saved) if saved else Round()


def _save(probe: Probe, picks: Picks, current: Round, cost: Cost, early: bool) -> None:
    probe.progress.save(
        {"picks": asdict(picks), "round": asdict(current), "cost": asdict(cost), "early": early}
    )


def _pick(probe: Probe, picks: Picks, current: Round) -> None:
    gains = current.gains()
    best = order(gains)[0]
    picks.layers.append(best)
    picks.gains.append(gains[best])
    picks.base_kl.append(current.base / current.tokens)
    probe.inputs.log.say(
        f"select: layer {best} is pick {len(picks.layers)} of {probe.keep}: "
        f"KL {picks.base_kl[-1]:.4f} -> {picks.base_kl[-1] - gains[best]:.4f}"
    )


def score_batch(
    probe: Probe, batch: Batch, picked: list[int], current: Round, cost: Cost, bar: Bar
) -> None:
    """Add one batch: the student with ``picked`` full, alone and with each other layer."""
    teacher, student = probe.teacher, probe.student
    inputs = read_batch(batch, probe.device)
    full = {i: layer.mixer for i, layer in enumerate(teacher.model.layers)}
    rest = {i: mixer for i, mixer in full.items() if i not in picked}
    with probe.quiet_forward(), ExitStack() as stack:
        for layer in picked:
            stack.enter_context(swapped(student, layer, fitting(full[layer], student)))
        target = walk(teacher, inputs)
        base = walk(student, inputs)
        (base_kl,) = kl_sums(student, [base.hidden_NC], teacher, target.hidden_NC)
        kls = kl_of_changed(base, rest, target, cost, bar)
    current.base += base_kl
    so_far = current.with_layer or [0.0] * probe.num_layers
    current.with_layer = [kl + kls.get(i, math.inf) for i, kl in enumerate(so_far)]
    current.tokens += int(inputs.at_BT.sum())
    for model in (target, base):
        cost.add_visits(model.visits, model.visits, inputs.tokens)
    cost.tokens += inputs.tokens


def _scores(picks: Picks, last: Round, cost: Cost, early: bool) -> Scores:
    gains = last.gains()
    for layer, gain in zip(picks.layers, picks.gains, strict=True):
        gains[layer] = gain
    rest = [layer for layer in order(last.gains()) if layer not in picks.layers]
    rounds = [math.nan] * len(gains)
    for index, layer in enumerate(picks.layers):
        rounds[layer] = float(index + 1)
    return Scores(
        columns={"gain": gains, "round": rounds},
        ranking=picks.layers + rest,
        main="gain",
        history=[sorted(picks.layers[: n + 1]) for n in range(len(picks.layers))],
        stopped_early=early,
        facts={
            "student_kl": picks.base_kl[0],
            "kl_after_picks": [b - g for b, g in zip(picks.base_kl, picks.gains, strict=True)],
        },
        cost=cost,
    )
