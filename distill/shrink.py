"""Stage `shrink`: the pools of a Dreamer get smaller step by step, and what is left learns again.

Before each step all entries are judged on training rows; those that are worth least leave or are
merged (``dreamer.shrink``). Each step then trains as the stage `logits` does, on rows and a
learning rate of its own, in a folder of its own: a killed run goes through finished steps at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.dreamer.shrink import (
    Cut,
    choose,
    likeness,
    pool_sizes,
    set_top_experts,
    shrink,
)
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill import logits
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.routing_record import POOLS, pool_usage
from ltconvert.distill.pool_damage import pool_damage
from ltconvert.distill.processes import is_main_process, wait_for_everyone
from ltconvert.distill.records import write_json
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.recipes.stages import ShrinkSettings

CUT_FILE = "cut.json"
_SEEDS_A_STEP = 100  # more than there are stages


def run(settings: ShrinkSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Cut and train for each step of the student's schedules; resumes by itself."""
    steps = inputs.recipe.student.steps
    step_settings = settings.of_one_step(len(steps))
    facts: dict[str, Any] = {"tokens": 0, "steps": 0, "seconds": 0.0, "pools": []}
    student = inputs.student
    for number, (share, top) in enumerate(steps):
        folder = stage_dir / f"step-{number}"
        own = replace(inputs, student=student, seed=inputs.seed + _SEEDS_A_STEP * number)
        objective = logits.prepare(own, settings)
        set_top_experts(objective.module, top)
        cut_to(objective.module, share, own, settings, folder)
        trained = own.train(objective, step_settings, folder, f"shrink to {share:g}")
        student = logits.finished(objective)
        for name in ("tokens", "steps", "seconds"):
            facts[name] += getattr(trained, name)
        facts["pools"].append({"share": share, **_sizes(student), **trained.metrics})
    return StageResult(student, facts=facts)


def cut_to(
    student: LT2ForCausalLM,
    share: float,
    inputs: StageInputs,
    settings: ShrinkSettings,
    folder: Path,
) -> None:
    """Shrink both pools to a share of the teacher's, or as ``folder`` says that it was done.

    The first process measures and notes the choice: counts on a GPU may differ in the last bit.
    """
    layer = student.model.dreamer
    assert layer is not None, "not a Dreamer"
    path = folder / CUT_FILE
    if is_main_process() and not path.exists():
        cuts = {
            name: asdict(cut) for name, cut in _choose(student, share, inputs, settings).items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, cuts)
    wait_for_everyone()
    noted = json.loads(path.read_text(encoding="utf-8"))
    attention, experts = (_cut(noted[name]) for name in ("attention", "experts"))
    shrink(student, attention, experts)
    inputs.log.say(
        f"shrink to {share:g}: {len(attention.groups)} entries of attention and "
        f"{len(experts.groups)} experts are left"
    )


def _choose(
    student: LT2ForCausalLM, share: float, inputs: StageInputs, settings: ShrinkSettings
) -> dict[str, Cut]:
    """What leaves each pool."""
    layer, recipe = student.model.dreamer, inputs.recipe.student
    used = pool_usage(
        student, _rows(inputs, settings, settings.usage_tokens), precision=inputs.precision
    )
    sizes = pool_sizes(layer.config, student.config.num_layers, share)
    parts = (
        (layer.attention, layer.attention_router, sizes[0]),
        (layer.experts, layer.expert_router, sizes[1]),
    )
    return {
        name: choose(
            used[name].effect_DE,
            likeness(pool).cpu(),
            keep,
            recipe.pool_cut,
            _damage(student, name, router, keep, inputs, settings),
        )
        for name, (pool, router, keep) in zip(POOLS, parts, strict=True)
    }


def _damage(
    student: LT2ForCausalLM,
    name: str,
    router: Router,
    keep: int,
    inputs: StageInputs,
    settings: ShrinkSettings,
) -> Tensor | None:
    """What a pool's entries are worth; None where nothing leaves, or use decides."""
    entries = len(router.balance)
    if inputs.recipe.student.pool_rank == "use" or keep == entries:
        return None
    rows = list(_rows(inputs, settings, settings.damage_tokens))
    with inputs.log.bar(f"damage of {name}", entries * len(rows), "passes") as bar:
        return pool_damage(student, router, rows, precision=inputs.precision, done=bar.advance)


def _cut(noted: dict[str, Any]) -> Cut:
    return Cut(*(tuple(map(tuple, noted[name])) for name in ("groups", "shares")))


def _rows(inputs: StageInputs, settings: ShrinkSettings, tokens: int) -> Iterator[Batch]:
    """The first training rows, of all processes, no longer than they need to be."""
    length = min(settings.seq_len_tokens, tokens)
    rows = max(1, min(settings.rows_at_once, tokens // length))
    own = settings.model_copy(update={"seq_len_tokens": length, "micro_batch_rows": rows})
    return islice(inputs.stream(own, own=False), -(-tokens // (rows * length)))


def _sizes(student: LT2ForCausalLM) -> dict[str, int]:
    config = student.model.dreamer.config
    parameters = sum(parameter.numel() for parameter in student.parameters())
    return {
        "entries": config.entries,
        "experts": config.experts,
        "top_experts": config.top_experts,
        "parameters": parameters,
    }
