"""Sections about what was measured at the end: text, recall, generation, decode, benchmarks."""

from __future__ import annotations

from typing import Any

from ltconvert.distill.evaluation.statistics import recovery
from ltconvert.distill.reporting import plots
from ltconvert.distill.reporting.run_folder import RunFolder
from ltconvert.distill.reporting.tables import Plot, Section, Table, count, number, percent, size


def heldout(run: RunFolder) -> Section:
    """KL, perplexity, agreement; KL by position."""
    section = Section("Held-out text")
    scores = run.part("heldout")
    if not scores:
        return section
    rows = [
        [f"{who} perplexity", number(scores[f"{who}_ppl"], scores.get(f"{who}_ppl_stderr"), 2)]
        for who in ("teacher", "student")
        if f"{who}_ppl" in scores
    ]
    if "kl" in scores:
        rows.append(["KL (nats a token)", number(scores["kl"], scores.get("kl_stderr"), 4)])
        agreement = percent(scores["agreement"], scores.get("agreement_stderr"))
        rows.append(["top-1 agreement", agreement])
    caption = f"{count(scores['tokens'])} tokens in {scores['rows']} rows."
    section.tables.append(Table(("", "value"), rows, caption))
    buckets = scores.get("kl_by_position")
    if buckets:
        positions = [
            [f"{b['first']}-{b['end'] - 1}", number(b["kl"], b["kl_stderr"], 4), count(b["tokens"])]
            for b in buckets
        ]
        headers = ("tokens before", "KL (nats a token)", "tokens")
        section.tables.append(Table(headers, positions))
        alt = "KL to the teacher by position in the document"
        section.plots.append(Plot("kl_by_position", plots.kl_by_position(buckets), alt))
    return section


def recall(run: RunFolder) -> Section:
    """Exact recall of a hidden number by length, and by depth."""
    section = Section("Recall")
    scores = run.part("recall")
    if not scores or not any(next(iter(scores.values())).values()):  # or at no length
        return section
    models = list(scores)
    section.text.append(
        "A number hidden in filler text must be repeated; exact greedy answers. needle: one "
        "number, multikey: four numbers with names, one is asked for. Depth 0 is the start of the "
        "text."
    )
    rows = []
    for kind, by_length in scores[models[-1]].items():
        for length in by_length:
            rows.append(_recall_row(scores, kind, length))
    extra = ("recovery",) if len(models) == 2 else ()
    caption = f"{_examples(scores)} examples a row; ± is one standard error."
    section.tables.append(Table(("kind", "tokens", *models, *extra), rows, caption))
    for kind in scores[models[-1]]:
        section.tables.append(_depth_table(scores, kind))
        alt = f"{kind} recall by depth and length"
        section.plots.append(Plot(f"recall_{kind}", plots.recall_map(scores, kind), alt))
    return section


def _recall_row(scores: dict[str, Any], kind: str, length: str) -> list[str]:
    cells = {who: found[kind][length] for who, found in scores.items()}
    row = [kind, length] + [number(c["accuracy"], c["stderr"], 2) for c in cells.values()]
    if len(cells) == 2:
        teacher, student = cells["teacher"], cells["student"]
        errors = student["stderr"], teacher["stderr"]
        row.append(percent(*recovery(student["accuracy"], teacher["accuracy"], 0.0, *errors)))
    return row


def _examples(scores: dict[str, Any]) -> int:
    by_kind = next(iter(scores.values()))
    by_length = next(iter(by_kind.values()))
    return next(iter(by_length.values()))["examples"]


def _depth_table(scores: dict[str, Any], kind: str) -> Table:
    """Rows: length and model; columns: depths."""
    first = next(iter(scores.values()))[kind]
    depths = list(next(iter(first.values()))["by_depth"])
    rows = [
        [length, who, *(number(cell["by_depth"][d]["accuracy"], digits=2) for d in depths)]
        for length in first
        for who, cell in ((who, found[kind][length]) for who, found in scores.items())
    ]
    return Table(("tokens", "model", *(f"depth {d}" for d in depths)), rows, f"{kind}, by depth")


def generation(run: RunFolder) -> Section:
    """Greedy continuations against the teacher's, with examples."""
    section = Section("Generation")
    scores = run.part("generation")
    if not scores:
        return section
    if not scores["prompts"]:
        section.text.append("No held-out document is long enough for a prompt.")
        return section
    prefix = number(scores["common_prefix"], scores["common_prefix_stderr"], 1)
    rows = [
        ["tokens before the first difference", prefix],
        ["equal tokens", percent(scores["equal_share"], scores["equal_share_stderr"])],
        [
            "teacher's tokens that the student would choose too",
            percent(scores["followed_share"], scores["followed_share_stderr"]),
        ],
    ]
    caption = f"{scores['prompts']} held-out prompts, greedy, up to {scores['tokens']} tokens."
    section.tables.append(Table(("", "mean"), rows, caption))
    for example in scores["examples"]:
        section.code.append("\n\n".join(f"[{name}]\n{text}" for name, text in example.items()))
    return section


def decode(run: RunFolder) -> Section:
    """Time of a decoded token and bytes of the cache, by context."""
    section = Section("Decode")
    speed = {who: points for who, points in (run.part("decode") or {}).items() if points}
    if not speed:
        return section
    by_context = [{point["context"]: point for point in points} for points in speed.values()]
    rows = []
    for context in sorted(set().union(*by_context)):  # the models' limits may differ
        cells = [points.get(context, {}) for points in by_context]
        rows.append([count(context)])
        rows[-1] += [number(cell.get("ms_per_token"), digits=1) for cell in cells]
        rows[-1] += [size(cell["cache_bytes"]) if cell else "-" for cell in cells]
    headers = ["context"]
    headers += [f"{who}, ms a token" for who in speed] + [f"{who}, cache" for who in speed]
    caption = "Batch 1, median step of this machine; other work on it shows."
    section.tables.append(Table(headers, rows, caption))
    alt = "time of a token and cache size by context"
    section.plots.append(Plot("decode", plots.decode(speed), alt))
    return section


def loops(run: RunFolder) -> Section:
    """Decoding that leaves loops early or shares their keys, against the ordinary way."""
    section = Section("Decoding with less of the loops")
    found = run.part("loops")
    if not found:
        return section
    rows = [_loops_row(who, row) for who, rows in found.items() for row in rows]
    what = ("KL (nats a token)", "agreement", "perplexity", "loops", "cache")
    headers = ("model", "keys", "exit at", *what)
    first = next(iter(found.values()))[0]
    caption = (
        "Each model against its own ordinary decoding, of which perplexity and cache are in "
        f"brackets: {count(first['tokens'])} tokens of held-out text in {first['rows']} rows, one "
        "at a time. keys: each loop's own, or the last one's for all. loops: computed a token."
    )
    section.tables.append(Table(headers, rows, caption))
    return section


def _loops_row(who: str, row: dict[str, Any]) -> list[str]:
    threshold = row["exit_threshold"]
    return [
        who,
        row["loop_cache"],
        "-" if threshold is None else f"{threshold:g}",
        number(row["kl"], row["kl_stderr"], 4),
        percent(row["agreement"], row["agreement_stderr"]),
        f"{number(row['ppl'], digits=2)} ({number(row['plain_ppl'], digits=2)})",
        f"{row['loops']:.2f}",
        f"{size(row['cache_bytes'])} ({size(row['plain_cache_bytes'])})",
    ]


def tasks(run: RunFolder) -> Section:
    """lm-eval tasks side by side."""
    section = Section("Tasks")
    found = run.part("tasks")
    if not found or not found.get("rows"):
        return section
    rows = [_task_row(row) for row in found["rows"]]
    headers = ("task", "metric", "documents", "random", "teacher", "student", "recovery")
    if "student" not in found:
        for row in rows:
            row[4], row[5] = row[5], "-"
    caption = (
        "Through lm-eval. Recovery is (student - random) / (teacher - random), given where the "
        "teacher is above guessing; its error takes the two scores as independent."
    )
    section.tables.append(Table(headers, rows, caption))
    return section


def _task_row(row: dict[str, Any]) -> list[str]:
    return [
        row["task"] + (" (group)" if row["group"] else ""),
        row["metric"],
        count(row["samples"]),
        number(row["random"]),
        number(row["teacher"], row["teacher_stderr"]),
        number(row["student"], row["student_stderr"]),
        percent(row["recovery"], row["recovery_stderr"]),
    ]
