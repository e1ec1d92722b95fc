"""The report's section on mixture-of-depths attention: what depth and first tokens are given."""

from __future__ import annotations

from typing import Any

from ltconvert.distill.reporting.run_folder import RunFolder
from ltconvert.distill.reporting.tables import Section, Table, count, percent


def depth(run: RunFolder) -> Section:
    """Weight on slots of depth by layer and position, and on first tokens before and after."""
    section = Section("Depth attention")
    found = run.part("depth")
    if not found:
        return section
    student, teacher = found["student"], found.get("teacher")
    section.text.append(
        "Shares of attention weight, means over heads and queries: what a token gives to slots "
        "that attention and MLPs of earlier layers left at it, and to its document's first token."
    )
    before = {(v["layer"], v["loop"]): v["sink"] for v in (teacher or {}).get("visits", [])}
    rows = [_visit_row(visit, before, run.loops) for visit in student["visits"]]
    headers = ("layer", *_HEADERS, "first token, teacher")
    caption = f"{count(student['queries'])} queries of held-out text."
    section.tables.append(Table(headers, rows, caption))
    positions = [[f"{b['first']}-{b['end'] - 1}", *_shares(b)] for b in student["by_position"]]
    section.tables.append(Table(("tokens before", *_HEADERS), positions, "All layers together."))
    return section


_HEADERS = ("depth: attention", "depth: MLPs", "first token")


def _shares(found: dict[str, float]) -> list[str]:
    return [percent(found[name]) for name in ("attention", "ffn", "sink")]


def _visit_row(
    visit: dict[str, Any], before: dict[tuple[int, int], float], loops: int
) -> list[str]:
    name = f"{visit['layer']}" + (f", loop {visit['loop'] + 1}" if loops > 1 else "")
    sink = before.get((visit["layer"], visit["loop"]))
    return [name, *_shares(visit), percent(sink)]
