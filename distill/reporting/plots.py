"""Plots of the report as PNG bytes, drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEACHER, STUDENT = "#555555", "#1f6fb2"
COLOURS = {
    "full": "#e8903a",
    "window": "#7fb069",
    "gdn": "#1f6fb2",
    "gdn_window": "#2a9d8f",
    "deltanet": "#6a8caf",
    "kda": "#4b4e9e",
    "mamba2": "#9467bd",
    "retnet": "#c45b8a",
    "dsa": "#8e5ea2",
    "nsa": "#c45850",
    "moda": "#d4a017",
}
OTHER_COLOUR = "#b0b0b0"


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of its own: nothing of pyplot's global state, so it works in any thread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, list(axes)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same run gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def loss_curves(metrics: dict[str, list[dict[str, Any]]]) -> bytes:
    """Loss by trained tokens, a panel a stage."""
    figure, axes = _figure(4.0 * len(metrics), 3.0, len(metrics))
    for axis, (stage, lines) in zip(axes, metrics.items(), strict=True):
        points = [
            (float(line.get("tokens", line["step"])), float(line["loss"]))
            for line in lines
            if isinstance(line.get("loss"), int | float) and math.isfinite(line["loss"])
        ]
        axis.plot(*_columns(points), color=STUDENT, linewidth=1.2)
        axis.set(title=stage, xlabel="trained tokens", ylabel="loss")
        if points and min(y for _, y in points) > 0:
            axis.set_yscale("log")
        axis.xaxis.set_major_formatter(_short_numbers())
        _plain_log_ticks(axis)
    return _png(figure)


def kl_by_stage(stages: Sequence[dict[str, Any]]) -> bytes:
    """KL to the teacher on held-out text after every stage."""
    figure, (axis,) = _figure(5.5, 3.0)
    names = [stage["stage"] for stage in stages]
    kl = [stage["scores"]["kl"] for stage in stages]
    errors = [stage["scores"].get("kl_stderr") or 0.0 for stage in stages]
    bars = axis.bar(names, kl, yerr=errors, color=STUDENT, width=0.6, capsize=3)
    axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axis.set(ylabel="KL (nats a token)")
    axis.margins(y=0.15)
    axis.grid(axis="x", visible=False)
    return _png(figure)


def kl_by_position(buckets: Sequence[dict[str, Any]]) -> bytes:
    """KL by the number of tokens of the document before."""
    figure, (axis,) = _figure(5.5, 3.0)
    # The first bucket starts at 0, which a logarithmic axis lacks.
    middle = [math.sqrt(max(b["first"], b["end"] / 2) * b["end"]) for b in buckets]
    errors = [b["kl_stderr"] or 0.0 for b in buckets]
    axis.errorbar(middle, [b["kl"] for b in buckets], errors, color=STUDENT, marker="o", capsize=3)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(_short_numbers())
    axis.set_ylim(bottom=0)
    axis.set(xlabel="tokens of the document before", ylabel="KL (nats a token)")
    return _png(figure)


def layer_map(mixers: Sequence[str], loops: int, core: tuple[int, int] | None = None) -> bytes:
    """The mixer of every layer, a row a loop; layers before and after the core are in one row."""
    from matplotlib.patches import Patch, Rectangle

    figure, (axis,) = _figure(max(5.0, 0.28 * len(mixers) + 1.5), 1.4 + 0.3 * loops)
    first, end = core or (0, len(mixers))
    for loop in range(loops):
        for layer, kind in enumerate(mixers):
            if (layer < first and loop) or (layer >= end and loop < loops - 1):
                continue
            colour = COLOURS.get(kind, OTHER_COLOUR)
            axis.add_patch(Rectangle((layer + 0.05, loop + 0.08), 0.9, 0.84, color=colour))
    axis.set(xlim=(0, len(mixers)), ylim=(loops, 0), xlabel="layer", ylabel="loop")
    step = max(1, len(mixers) // 16)
    ticks = range(0, len(mixers), step)
    axis.set_xticks([layer + 0.5 for layer in ticks], [str(layer) for layer in ticks])
    axis.set_yticks([loop + 0.5 for loop in range(loops)], [str(loop) for loop in range(loops)])
    axis.grid(visible=False)
    kinds = list(dict.fromkeys(mixers))
    handles = [Patch(color=COLOURS.get(kind, OTHER_COLOUR), label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False)
    return _png(figure)


def selection_scores(scores: Sequence[float | None], chosen: Sequence[int], label: str) -> bytes:
    """The score of every layer, chosen ones in the colour of full attention."""
    figure, (axis,) = _figure(max(5.0, 0.28 * len(scores) + 1.5), 2.6)
    heights = [0.0 if score is None else score for score in scores]
    colours = [COLOURS["full"] if i in chosen else COLOURS["gdn"] for i in range(len(scores))]
    axis.bar(range(len(scores)), heights, color=colours)
    axis.set(xlabel="layer", ylabel=label)
    axis.grid(axis="x", visible=False)
    return _png(figure)


def recall_map(recall: dict[str, dict[str, Any]], kind: str) -> bytes:
    """Recall by depth and length, a panel a model."""
    shown = [(who, scores[kind]) for who, scores in recall.items() if kind in scores]
    figure, axes = _figure(1.2 + 2.6 * len(shown), 2.8, len(shown))
    for axis, (who, by_length) in zip(axes, shown, strict=True):
        lengths = list(by_length)
        depths = list(by_length[lengths[0]]["by_depth"])
        cells = [
            [by_length[n]["by_depth"].get(depth, {}).get("accuracy", math.nan) for n in lengths]
            for depth in depths
        ]
        image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), depths)
        axis.set(title=who, xlabel="length in tokens", ylabel="depth")
        axis.grid(visible=False)
    figure.colorbar(image, ax=axes, label="exact")
    return _png(figure)


def decode(speed: dict[str, list[dict[str, Any]]]) -> bytes:
    """Milliseconds a token and bytes of the cache, by context."""
    figure, (left, right) = _figure(8.0, 3.0, 2)
    for who, points in speed.items():
        colour = TEACHER if who == "teacher" else STUDENT
        contexts = [point["context"] for point in points]
        times = [point["ms_per_token"] for point in points]
        sizes = [point["cache_bytes"] / 2**20 for point in points]
        left.plot(contexts, times, marker="o", color=colour, label=who)
        right.plot(contexts, sizes, marker="o", color=colour, label=who)
    left.set(xlabel="context in tokens", ylabel="ms a token")
    right.set(xlabel="context in tokens", ylabel="cache in MiB")
    for axis in (left, right):
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(_short_numbers())
        axis.legend(frameon=False)
    return _png(figure)


def bench(rows: Sequence[dict[str, Any]]) -> bytes:
    """Tokens a second by context, a panel a batch; what a plain loop reaches is dashed, and what
    the memory allows is dotted."""
    batches = sorted({row["batch"] for row in rows})
    figure, axes = _figure(1.0 + 3.5 * len(batches), 3.2, len(batches))
    styles = {"fast": "-", "plain": "--", "roofline": ":"}
    for axis, batch in zip(axes, batches, strict=True):
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["batch"] == batch):
            floor = row["context"], row["roofline_tokens_per_second"]
            if row["path"] == "fast":
                lines.setdefault((row["model"], "roofline"), []).append(floor)
            if "error" not in row:
                point = row["context"], row["tokens_per_second"]
                lines.setdefault((row["model"], row["path"]), []).append(point)
        for (who, path), points in lines.items():
            colour = TEACHER if who == "teacher" else STUDENT
            marker = "" if path == "roofline" else "o"
            label = f"{who}, {path}"
            axis.plot(*_columns(points), styles[path], marker=marker, color=colour, label=label)
        axis.set(title=f"batch {batch}", xlabel="context in tokens", ylabel="tokens a second")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(_short_numbers())
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return _png(figure)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short_numbers() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def _plain_log_ticks(axis: Axes) -> None:
    """1.8 instead of 1.8 x 10^0 on a logarithmic axis that spans little."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    if axis.get_yscale() != "log":
        return
    low, high = axis.get_ylim()
    if high / low < 30:
        axis.yaxis.set_minor_formatter(ScalarFormatter())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.tick_params(axis="y", which="minor", labelsize=8)
    else:
        axis.yaxis.set_minor_formatter(NullFormatter())
