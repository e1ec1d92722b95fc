"""Sections about the conversion itself: stages, training, layers, settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ltconvert.distill.reporting import plots
from ltconvert.distill.reporting.run_folder import RunFolder
from ltconvert.distill.reporting.tables import Plot, Section, Table, count, number, percent, runs
from ltconvert.distill.summary import rises


def stages(run: RunFolder) -> Section:
    """Held-out scores after every stage, and what each took."""
    section = Section("Stages")
    scored = [stage for stage in run.stages if "kl" in (stage.get("scores") or {})]
    if scored:
        headers = ("after", "KL (nats a token)", "perplexity", "teacher's", "top-1 agreement")
        rows = [_stage_row(stage) for stage in scored]
        table = Table((*headers, "trained tokens", "minutes"), rows)
        table.caption = (
            f"On {count(scored[-1]['scores'].get('tokens'))} tokens of held-out text; "
            "± is one standard error over rows of text."
        )
        section.tables.append(table)
        section.text += _rises(scored)
        alt = "KL to the teacher after every stage"
        section.plots.append(Plot("kl_by_stage", plots.kl_by_stage(scored), alt))
    section.tables += [
        _pools(stage["facts"]["pools"])
        for stage in run.stages
        if (stage.get("facts") or {}).get("pools")
    ]
    section.text += [f"Stage {name} has begun and is not finished." for name in run.unfinished]
    return section


def _pools(steps: list[dict[str, Any]]) -> Table:
    """A Dreamer after each step of the stage `shrink`."""
    headers = (
        "asked for",
        "entries",
        "experts",
        "used at a depth",
        "parameters",
        "last training KL",
    )
    rows = [
        [
            percent(step["share"]),
            *(_with_share(step, name) for name in ("entries", "experts")),
            *(count(step.get(name)) for name in ("top_experts", "parameters")),
            number(step.get("kl"), digits=4),
        ]
        for step in steps
    ]
    return Table(headers, rows, "Pools after each step of the stage shrink, shares of the layers.")


def _with_share(step: dict[str, Any], name: str) -> str:
    """So many of a pool, and of what the teacher had; older runs have not noted the share."""
    share = step.get(f"{name}_share")
    return count(step.get(name)) + ("" if share is None else f" ({percent(share)})")


def _stage_row(stage: dict[str, Any]) -> list[str]:
    scores, facts = stage["scores"], stage.get("facts") or {}
    seconds = max(float(facts.get(name) or 0.0) for name in ("wall_seconds", "seconds"))
    return [
        stage["stage"],
        number(scores["kl"], scores.get("kl_stderr"), 4),
        number(scores.get("student_ppl"), scores.get("student_ppl_stderr"), 2),
        number(scores.get("teacher_ppl"), scores.get("teacher_ppl_stderr"), 2),
        percent(scores.get("agreement"), scores.get("agreement_stderr")),
        count(facts.get("tokens", 0)),
        f"{seconds / 60:.1f}",
    ]


def _rises(scored: list[dict[str, Any]]) -> list[str]:
    """A sentence for every stage that took the student further from its teacher."""
    return [
        f"After {stage['stage']} the KL is above that after {before['stage']} "
        f"({stage['scores']['kl']:z.4f} against {before['scores']['kl']:z.4f})."
        for before, stage in itertools.pairwise(scored)
        if rises(before["scores"]["kl"], stage["scores"]["kl"])
    ]


def training(run: RunFolder) -> Section:
    """Loss curves."""
    section = Section("Training")
    metrics = {
        stage: lines
        for stage, lines in run.metrics.items()
        if any(isinstance(line.get("loss"), int | float) for line in lines)
    }
    if metrics:
        rows = [_training_row(stage, lines) for stage, lines in metrics.items()]
        headers = ("stage", "steps", "trained tokens", "first loss", "last loss")
        section.tables.append(Table(headers, rows))
        alt = "training loss by tokens, one panel a stage"
        section.plots.append(Plot("loss_curves", plots.loss_curves(metrics), alt))
    return section


def _training_row(stage: str, lines: list[dict[str, Any]]) -> list[str]:
    losses = [line["loss"] for line in lines if isinstance(line.get("loss"), int | float)]
    tokens = count(lines[-1].get("tokens"))
    return [stage, count(lines[-1]["step"]), tokens, f"{losses[0]:.4g}", f"{losses[-1]:.4g}"]


def layers(run: RunFolder) -> Section:
    """Which mixer every layer has, and why."""
    section = Section("Layers")
    if run.pools is not None:
        section.text.append(one_layer(run.pools, run.mixers))
        return section
    mixers = run.mixers
    if mixers is not None:
        kinds = {kind: [i for i, k in enumerate(mixers) if k == kind] for kind in set(mixers)}
        for kind, which in sorted(kinds.items()):
            share = f"{len(which)} of {len(mixers)} layers"
            section.text.append(f"{kind}: {share}, {runs(which)}")
        if dropped := (run.provenance or {}).get("dropped_layers"):
            section.text.append(f"Layers of the teacher that were left out: {runs(dropped)}")
        if run.loops > 1:
            first, end = run.core
            who = (
                "All layers" if (first, end) == (0, len(mixers)) else f"Layers {first} to {end - 1}"
            )
            section.text.append(f"{who} run {run.loops} times; each loop has its own cache.")
        alt = "mixer of every layer, one row a loop"
        section.plots.append(Plot("layer_map", plots.layer_map(mixers, run.loops, run.core), alt))
    return section


def one_layer(pools: Mapping[str, Any], mixers: Sequence[str] | None) -> str:
    """What a Dreamer has in place of layers."""
    others = sorted(set(mixers or ()) - {"full"})
    own = f" with {others[0]} mixers" if others else ""
    nulls = pools.get("null_entries") or pools.get("null_experts")
    fewer = " Fewer where it chooses a null instead." if nulls else ""
    skipped = [
        f"depth{'s' * (len(at) > 1)} {runs(at)} without {name}"
        for name in ("attention", "experts")
        if (at := pools.get(f"skipped_{name}"))
    ]
    without = f" Skipped: {', '.join(skipped)}." if skipped else ""
    return (
        f"One layer{own} for all depths. A token uses {pools['top_entries']} of "
        f"{pools['entries']} attention projections and {pools['top_experts']} of "
        f"{pools['experts']} experts at each; an MLP of the teacher is {pools['slices']} of them."
        f"{fewer}{without}"
    )


def selection(run: RunFolder) -> Section:
    """How the full layers were chosen."""
    section = Section("Selection")
    chosen = run.selection
    if chosen is None:
        return section
    cost = chosen.get("cost") or {}
    how = chosen["method"] + (
        f", direction {chosen['direction']}" if chosen.get("direction") else ""
    )
    settled = (
        "settled before its data ran out" if chosen.get("stopped_early") else "used all its data"
    )
    section.text.append(f"Method {how}; the choice {settled}.")
    section.text.append(
        f"Cost: {cost.get('forwards', 0):.1f} forward passes over "
        f"{count(cost.get('tokens'))} tokens, {count(cost.get('trained_tokens'))} trained tokens, "
        f"{cost.get('seconds', 0):.0f} s."
    )
    section.text.append(f"Use it again: {chosen['set']}")
    columns = list(chosen["scores"])
    rows = [
        [str(place), str(layer), "full" if layer in chosen["chosen"] else ""]
        + [number(chosen["scores"][name][layer], digits=4) for name in columns]
        for place, layer in enumerate(chosen["ranking"], start=1)
    ]
    headers = ("rank", "layer", "kept", *(name.replace("_", " ") for name in columns))
    section.tables.append(Table(headers, rows))
    main = chosen.get("main")
    if main:
        picture = plots.selection_scores(
            chosen["scores"][main], chosen["chosen"], main.replace("_", " ")
        )
        alt = f"{main.replace('_', ' ')} of every layer"
        section.plots.append(Plot("selection", picture, alt))
    return section


def settings(run: RunFolder) -> Section:
    """Versions and every setting of the run."""
    section = Section("Settings")
    versions = (run.evaluation or {}).get("versions")
    if versions is None and run.stages:
        versions = run.stages[-1].get("versions")
    if versions:
        section.text.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    if run.owner:
        section.text.append(f"precision {run.owner.get('precision')}")
    if run.recipe_text:
        section.code.append(run.recipe_text.rstrip())
    return section
