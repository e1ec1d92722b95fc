"""A plan as a person sees it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ltconvert.convert.inspect import ModelFacts
from ltconvert.distill.plan import Plan, StagePlan
from ltconvert.distill.planning.fit import gib
from ltconvert.distill.progress import short_number, short_time
from ltconvert.distill.reporting.tables import size

_PARTS = ("teacher", "student", "gradients", "optimiser", "activations", "logits")


def render_plan(plan: Plan) -> RenderableType:
    """The table a stage, then the models, the caches, the cost of selecting, and what is free."""
    tables = [_table(plan), *([_pools(plan)] if plan.pools else [])]
    return Group(*tables, *(Text(line) for line in summary_lines(plan)))


def summary_lines(plan: Plan) -> list[str]:
    """What stands below the table, as plain lines."""
    lines = [
        f"Teacher: {_model(plan.teacher)}",
        f"Student: {plan.kind}, {plan.makeup}; {_model(plan.student)}",
    ]
    cost = plan.selection
    if cost is not None and cost.trained_tokens and not cost.forwards:
        lines.append(f"Selecting: {short_number(cost.trained_tokens)} tokens of training")
    elif cost is not None and cost.forwards:
        text = f"Selecting: at most {cost.forwards:,.0f} forward passes of a batch"
        if cost.trained_tokens:
            text += f" and {short_number(cost.trained_tokens)} tokens of training"
        lines.append(f"{text}, less when the choice settles early")
    counts = plan.micro_batch_rows
    chosen = [f"{row.stage} {counts[row.stage]}" for row in plan.rows if row.stage in counts]
    if chosen:
        lines.append(f"Rows a forward pass: {', '.join(chosen)}")
    peak = max((row.peak_bytes for row in plan.rows), default=0)
    lines.append(
        f"Memory: {gib(peak)} of {gib(plan.machine.free_bytes)} free on {plan.device} "
        f"({plan.machine.name}), {plan.precision}"
    )
    free = f" of {gib(plan.free_disk_bytes)} free" if plan.free_disk_bytes is not None else ""
    lines.append(f"Disk: {gib(plan.disk_bytes)}{free}")
    lines.append(f"Time: about {short_time(plan.hours * 3600)}, evaluation not counted")
    return lines + [f"Note: {note}" for note in plan.notes]


def _model(model: ModelFacts) -> str:
    loops = f" in {model.loops} loops" if model.loops > 1 else ""
    cache = f"{model.cache_bytes_per_token / 1024:,.1f} KiB of cache a token"
    if model.constant_bytes:
        cache += f" and {size(model.constant_bytes)} whatever the context"
    if model.own_parameters:
        loops += f" ({short_number(model.own_parameters)} of them single loops' own)"
    return f"{short_number(model.parameters)} parameters{loops}, {cache}"


def _pools(plan: Plan) -> Table:
    """What each step of the stage `shrink` leaves of a Dreamer."""
    table = Table(title="Pools, as the stage shrink leaves them")
    table.add_column("asked for")
    columns = (
        "entries",
        "experts",
        "used at a depth",
        "parameters",
        "a token meets",
        "operations",
        "cache a token of a row",
    )
    for name in columns:
        table.add_column(name, justify="right")
    whole = plan.pools[0]
    for pool in plan.pools:
        cost = pool.footprint
        table.add_row(
            f"{pool.share:.0%}",
            f"{pool.entries} ({pool.entries / whole.entries:.0%})",
            f"{pool.experts} ({pool.experts / whole.experts:.0%})",
            str(pool.top_experts),
            *(short_number(x) for x in (cost.parameters, cost.active_parameters, cost.flops)),
            f"{cost.memory_bytes / 1024:,.1f} KiB",
        )
    return table


def _table(plan: Plan) -> Table:
    table = Table(title=f"Plan of {plan.recipe}: {plan.kind} student")
    table.add_column("stage")
    for name in ("tokens", "steps", "trained", *_PARTS, "peak", "disk", "time"):
        table.add_column(name, justify="right")
    for row in plan.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: StagePlan) -> list[str]:
    return [
        row.stage,
        short_number(row.tokens),
        f"{row.steps:,}" if row.steps else "-",
        short_number(row.trained_parameters) if row.trained_parameters else "-",
        *(gib(row.memory[part]) if row.memory[part] else "-" for part in _PARTS),
        gib(row.peak_bytes),
        gib(row.disk_bytes),
        short_time(row.hours * 3600),
    ]
