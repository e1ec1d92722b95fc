"""A selection as a person sees it: layers by rank, bars, the chosen ones, what it took."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ltconvert.distill.selection.per_loop import VisitScores
from ltconvert.distill.selection.ranking import Stability
from ltconvert.distill.selection.result import Selection

BAR_CELLS = 20
_TITLES = {
    "damage": "KL when linear",
    "gain": "KL gained when full",
    "mean_rank": "mean rank",
    "kl": "KL after training",
    "gate": "gate",
    "trained_share": "trained",
    "log_prob_drop": "log-prob. lost",
    "accuracy_drop": "accuracy lost",
    "round": "round",
}


def render_selection(selection: Selection) -> RenderableType:
    """The ranked table, then how stable the choice was, what it cost, how to use it."""
    return Group(_table(selection), *(Text(line) for line in summary_lines(selection)))


def render_per_loop(scores: VisitScores) -> RenderableType:
    """Layers by loops, in nats a token; the best visits stand out."""
    table = Table(title="KL gained by one visit made full, nats a token")
    table.add_column("layer", justify="right")
    for loop in range(scores.loops):
        table.add_column(f"loop {loop + 1}", justify="right")
    table.add_column("sum", justify="right")
    best = {(v["layer"], v["loop"]) for v in (scores.visits[s] for s in scores.best)}
    for layer in range(scores.num_layers):
        gains = [scores.gain(layer, loop) for loop in range(scores.loops)]
        cells = [
            Text("-" if gain is None else f"{gain:.4f}" + (" *" if (layer, loop) in best else ""))
            for loop, gain in enumerate(gains)
        ]
        table.add_row(str(layer), *cells, f"{sum(gain or 0.0 for gain in gains):.4f}")
    early = ", stopped early" if scores.stopped_early else ""
    cost = scores.cost
    lines = [
        f"* the best {len(best)} of {len(scores.visits)} visits, {scores.batches} batches{early}",
        f"Cost: {cost.tokens:,} tokens, {cost.forwards:,.1f} forward passes of a batch, "
        f"{cost.seconds:,.1f} s",
        f"KL of the student with no full layer: {scores.student_kl:.4f} nats a token",
        "A student keeps a layer full in all its loops: this explains a choice, it makes none",
    ]
    return Group(table, *(Text(line) for line in lines))


def summary_lines(selection: Selection) -> list[str]:
    """What stands below the table, as plain lines."""
    count = f"{selection.keep} of {selection.num_layers}"
    lines = [f"Chosen: {count} layers: {_numbers(selection.chosen)}"]
    if selection.loops > 1:
        lines[0] += f" (each in all {selection.loops} loops)"
    if len(selection.history) > 1:
        lines.append(_stability(selection))
    cost = selection.cost
    if cost.tokens or cost.trained_tokens:
        parts = []
        if cost.tokens:
            parts = [f"{cost.tokens:,} tokens", f"{cost.forwards:,.1f} forward passes of a batch"]
        if cost.trained_tokens:
            parts.append(f"{cost.trained_tokens:,} tokens of training")
        lines.append(f"Cost: {', '.join(parts)}, {cost.seconds:,.1f} s")
    if "student_kl" in selection.facts:
        kl = selection.facts["student_kl"]
        where = " on answers" if selection.method == "recall-greedy" else ""
        lines.append(f"KL of the student with no full layer{where}: {kl:.4f} nats a token")
    if "gated_kl" in selection.facts:
        kl = selection.facts["gated_kl"]
        lines.append(f"KL with gates as drawn in the last step: {kl:.4f} nats a token")
    if "teacher_accuracy" in selection.facts:
        lines.append(f"Teacher's exact answers: {selection.facts['teacher_accuracy']:.0%}")
    return [*lines, f"To use it without selecting again: {selection.setting}"]


def _stability(selection: Selection) -> str:
    history = selection.history
    unit = "layers" if selection.method == "kl" else "batches"
    if selection.method.endswith("-greedy"):
        early = "; rounds ended early where the pick had settled" if selection.stopped_early else ""
        return f"Stability: {len(history)} picks{early}"
    early = ", stopped early" if selection.stopped_early else ""
    unchanged = Stability(len(history), history).unchanged
    return f"Stability: {len(history)} {unit}, unchanged in the last {unchanged}{early}"


def _table(selection: Selection) -> Table:
    table = Table(title=_title(selection))
    for name in ("rank", "layer"):
        table.add_column(name, justify="right")
    table.add_column("kept")
    for name in selection.scores:
        table.add_column(_TITLES.get(name, name), justify="right")
    bars = _bars(selection)
    if bars:
        table.add_column("")
    chosen = set(selection.chosen)
    for position, layer in enumerate(selection.ranking):
        kept = layer in chosen
        cells = [_number(column[layer]) for column in selection.scores.values()]
        row = [str(position + 1), str(layer), "full" if kept else "", *cells]
        table.add_row(*row, *([bars[layer]] if bars else []), style="bold" if kept else "dim")
    return table


def _title(selection: Selection) -> str:
    direction = f", {selection.direction}" if selection.direction else ""
    return f"Layers by {selection.method}{direction}"


def _bars(selection: Selection) -> list[str]:
    """A bar a layer, longest for the most valuable; none where nothing was measured."""
    if selection.main is None:
        return []
    values = selection.scores[selection.main]
    sign = 1.0 if selection.higher_is_better else -1.0
    worth = [sign * value for value in values]
    known = [value for value in worth if math.isfinite(value)]
    if not known:
        return []
    # Values where more is better start at zero, ranks and KLs at the worst layer.
    low = min(0.0, *known) if selection.higher_is_better else min(known)
    span = (max(known) - low) or 1.0
    cells = [(value - low) / span if math.isfinite(value) else 0.0 for value in worth]
    return ["█" * round(BAR_CELLS * cell) for cell in cells]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value == round(value, 1) else f"{value:.4g}"


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers)) if layers else "none"
