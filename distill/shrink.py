"""Stage `shrink`: the pools of a Dreamer get smaller step by step, and what is left learns again.

Before each step the use of all entries is measured on training rows; what is used least leaves or
is merged (``dreamer.shrink``). Each step then trains as the stage `logits` does, on rows and a
learning rate of its own, in a folder of its own: a killed run goes through finished steps at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ltconvert.convert.students.dreamer.shrink import (
    Cut,
    choose,
    likeness,
    pool_sizes,
    shrink,
)
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill import logits
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.routing_record import pool_usage
from ltconvert.distill.processes import is_main_process, wait_for_everyone
from ltconvert.distill.records import write_json
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.recipes.schema import ShrinkSettings

CUT_FILE = "cut.json"
_SEEDS_A_STEP = 100  # more than there are stages


def run(settings: ShrinkSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Cut and train for each share of ``student.pool_schedule``; resumes by itself."""
    shares = inputs.recipe.student.pool_schedule
    step_settings = settings.of_one_step(len(shares))
    facts: dict[str, Any] = {"tokens": 0, "steps": 0, "seconds": 0.0, "pools": []}
    student = inputs.student
    for number, share in enumerate(shares):
        folder = stage_dir / f"step-{number}"
        own = replace(inputs, student=student, seed=inputs.seed + _SEEDS_A_STEP * number)
        objective = logits.prepare(own, settings)
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
        usage = pool_usage(student, _rows(inputs, settings), precision=inputs.precision)
        sizes = pool_sizes(layer.config, student.config.num_layers, share)
        how = inputs.recipe.student.pool_cut
        cuts = {
            name: asdict(choose(of_pool.effect_DE, likeness(pool).cpu(), keep, how))
            for (name, of_pool), pool, keep in zip(
                usage.items(), (layer.attention, layer.experts), sizes, strict=True
            )
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


def _cut(noted: dict[str, Any]) -> Cut:
    return Cut(*(tuple(map(tuple, noted[name])) for name in ("groups", "shares")))


def _rows(inputs: StageInputs, settings: ShrinkSettings) -> Iterator[Batch]:
    """The first training rows, of all processes."""
    batch = settings.rows_at_once * settings.seq_len_tokens
    return islice(inputs.stream(settings, own=False), -(-settings.usage_tokens // batch))


def _sizes(student: LT2ForCausalLM) -> dict[str, int]:
    config = student.model.dreamer.config
    parameters = sum(parameter.numel() for parameter in student.parameters())
    return {"entries": config.entries, "experts": config.experts, "parameters": parameters}
