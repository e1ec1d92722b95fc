"""The table of a run: what is left of the teacher after every stage, and what it took."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ltconvert.distill.records import StageRecord
from ltconvert.distill.runlog import RunLog
from ltconvert.recipes.schema import Recipe


def scoring(recipe: Recipe) -> dict[str, int]:
    """The settings that held-out scores depend on."""
    names = ("heldout_tokens", "heldout_seq_len_tokens")
    return {name: getattr(recipe.eval, name) for name in names}


def row(record: StageRecord) -> dict[str, Any]:
    """One stage: KL to the teacher (nats a token), perplexities, tokens trained on, minutes."""
    scores = {
        name: record.scores.get(name) for name in ("kl", "student_ppl", "teacher_ppl", "agreement")
    }
    # Training time counts what killed processes did, wall time holds loading and scoring too.
    seconds = max(record.facts.get(name, 0.0) for name in ("wall_seconds", "seconds"))
    return (
        {"stage": record.stage}
        | scores
        | {"tokens": record.facts.get("tokens", 0), "minutes": seconds / 60}
    )


def after_stage(record: StageRecord, before: StageRecord | None) -> str:
    """One line for a stage that has just finished; it says so when the student got worse."""
    scores = record.scores
    text = (
        f"{record.stage}: KL to the teacher {scores['kl']:z.4f} nats a token, "
        f"perplexity {scores['student_ppl']:.2f} (teacher {scores['teacher_ppl']:.2f}) "
        f"on {scores['tokens']:,} held-out tokens"
    )
    if before is not None and rises(before.scores["kl"], scores["kl"]):
        text += f"; that is above the {before.scores['kl']:z.4f} after {before.stage}"
    return text


def rises(before: float, after: float) -> bool:
    """Whether a KL has grown by something that the four digits shown of it can show."""
    return round(after, 4) > round(before, 4)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a rich table."""
    shown = Table(title="What is left of the teacher, on held-out text")
    shown.add_column("after")
    for name in ("KL (nats a token)", "perplexity", "teacher's", "trained tokens", "minutes"):
        shown.add_column(name, justify="right")
    for values in rows:
        shown.add_row(
            values["stage"],
            f"{values['kl']:z.4f}",
            f"{values['student_ppl']:.2f}",
            f"{values['teacher_ppl']:.2f}",
            f"{values['tokens']:,}",
            f"{values['minutes']:.1f}",
        )
    return shown


def show(log: RunLog, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table where the log prints."""
    page = io.StringIO()
    Console(file=page, width=100).print(table(rows))
    log.say(page.getvalue().rstrip())
