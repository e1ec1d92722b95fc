"""The report's section on routing: what a Dreamer student's depths use of its pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltconvert.distill.reporting import routing_plots
from ltconvert.distill.reporting.run_folder import RunFolder
from ltconvert.distill.reporting.tables import Plot, Section, Table, count, number, percent


def routing(run: RunFolder) -> Section:
    """Diversity, reuse and balance of every pool; where depth attention looks."""
    section = Section("Routing")
    found = (run.part("routing") or {}).get("student")
    if not found:
        return section
    pools: dict[str, dict[str, Any]] = found["pools"]
    first = next(iter(pools.values()))
    section.text.append(
        "One layer runs at every depth, and each token chooses what it uses of the pools. A depth "
        f"uses an entry that at least {percent(first['least_share'])} of its tokens choose."
    )
    section.tables.append(_summary(pools))
    section.tables.append(_by_depth(pools))
    if found.get("by_depths"):
        section.tables.append(_depths(found["by_depths"], len(first["distinct"])))
    for name, usage in pools.items():
        alt = f"share of tokens that choose each of {usage['entries']} entries, by depth"
        picture = routing_plots.load_map(usage["load"], f"entry of the pool `{name}`")
        section.plots.append(Plot(f"routing_{name}", picture, alt))
    if found.get("depth_map"):
        alt = "mean weight that each depth gives to earlier depths of the same token"
        picture = routing_plots.depth_map(found["depth_map"])
        section.plots.append(Plot("depth_attention", picture, alt))
    return section


def _summary(pools: dict[str, dict[str, Any]]) -> Table:
    usages = list(pools.values())
    least = usages[0]["reused_depths"]
    can_be = least <= len(usages[0]["distinct"])  # with fewer depths no entry is used at so many
    reused = [f"used at {least} depths or more"] if can_be else []
    headers = ("pool", "entries", "used at no depth", *reused, "most chosen over mean")
    rows = [
        [
            name,
            count(usage["entries"]),
            count(sum(depths == 0 for depths in usage["depths"])),
            *([percent(usage["reused_share"])] if can_be else []),
            number(usage["imbalance"], digits=2),
        ]
        for name, usage in pools.items()
    ]
    return Table(headers, rows, f"{count(usages[0]['tokens'])} tokens of held-out text.")


def _depths(rows: list[dict[str, float]], trained: int) -> Table:
    shown = [
        [count(row["depths"]), number(row["kl"], digits=4), number(row["ppl"], digits=2)]
        for row in rows
    ]
    caption = f"Fewer and more depths than the {trained} that it was trained for."
    return Table(("depths", "KL (nats a token)", "perplexity"), shown, caption)


def _nulls(usage: dict[str, Any], depths: int) -> Sequence[float | None]:
    """What nulls have of each depth's weights; evaluations from before there were any lack it."""
    return usage.get("null") or [None] * depths


def _by_depth(pools: dict[str, dict[str, Any]]) -> Table:
    headers = ["depth"]
    for name in pools:
        headers += [f"{name}: entries used", f"{name}: as diverse as", f"{name}: nothing"]
    depths = len(next(iter(pools.values()))["distinct"])
    rows = [
        [
            str(depth),
            *(
                cell
                for usage in pools.values()
                for cell in (
                    str(usage["distinct"][depth]),
                    number(usage["effective"][depth], digits=1),
                    percent(_nulls(usage, depths)[depth]),
                )
            ),
        ]
        for depth in range(depths)
    ]
    caption = (
        "As diverse as so many entries that are chosen equally often: the exponential of the "
        "entropy of a depth's choices. Nothing: the part of the weights that goes to nulls, which "
        "stand in for entries that left the pool; where it is all, the depth goes without."
    )
    return Table(headers, rows, caption)
