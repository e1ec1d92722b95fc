"""Stage `shrink`: the pools of a Dreamer get smaller step by step, and what is left learns again.

Before each step all entries are judged on training rows (``pool_worth``); those that are worth
least leave or are merged (``dreamer.shrink``). Each step then trains as the stage `logits` does, on
rows and a learning rate of its own, in a folder of its own: a killed run goes through finished
steps at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.shrink import (
    Cut,
    set_top_experts,
    shares_kept,
    shrink,
)
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill import logits
from ltconvert.distill.evaluation.routing_record import POOLS
from ltconvert.distill.pool_worth import Judge
from ltconvert.distill.processes import is_main_process, wait_for_everyone
from ltconvert.distill.records import write_json
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.recipes.stages import ShrinkSettings

CUT_FILE = "cut.json"
_SEEDS_A_STEP = 100  # more than there are stages


def run(settings: ShrinkSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Cut and train for each step of the student's schedules; resumes by itself.

    Seconds are those of judging and training, over all resumes.
    """
    steps = inputs.recipe.student.steps
    step_settings = settings.of_one_step(len(steps))
    facts: dict[str, Any] = {"tokens": 0, "steps": 0, "seconds": 0.0, "pools": []}
    student = inputs.student
    for number, (share, top) in enumerate(steps):
        folder, name = stage_dir / f"step-{number}", f"shrink {number + 1} of {len(steps)}"
        own = replace(inputs, student=student, seed=inputs.seed + _SEEDS_A_STEP * number)
        objective = logits.prepare(own, settings)
        set_top_experts(objective.module, top)
        facts["seconds"] += cut_to(objective.module, share, own, settings, folder)
        inputs.log.say(f"{name}: {_left(objective.module, share)}")
        trained = own.train(objective, step_settings, folder, name)
        student = logits.finished(objective)
        for fact in ("tokens", "steps", "seconds"):
            facts[fact] += getattr(trained, fact)
        facts["pools"].append({"share": share, **_sizes(student), **trained.metrics})
    return StageResult(student, facts=facts)


def cut_to(
    student: LT2ForCausalLM,
    share: float,
    inputs: StageInputs,
    settings: ShrinkSettings,
    folder: Path,
) -> float:
    """Shrink both pools to a share of the teacher's, or as ``folder`` says that it was done.

    The first process measures and notes the choice: counts on a GPU may differ in the last bit.

    Returns:
        Seconds that judging took, whenever that was.
    """
    path = folder / CUT_FILE
    if is_main_process():
        judge = Judge(student, inputs, settings, folder)
        if not path.exists():
            choice = judge.choose(share)
            folder.mkdir(parents=True, exist_ok=True)
            cuts = {name: asdict(cut) for name, cut in choice.cuts.items()}
            write_json(path, cuts | {"seconds": choice.seconds})
        judge.clear()  # also what a kill between the two has left
    wait_for_everyone()
    noted = json.loads(path.read_text(encoding="utf-8"))
    skip = inputs.recipe.student.pool_skip
    shrink(student, *(_cut(noted[name]) for name in POOLS), skip=skip)
    return float(noted.get("seconds", 0.0))  # runs from before it was noted have none


def _left(student: LT2ForCausalLM, share: float) -> str:
    """What the pools hold now; with small shares it is more than was asked for."""
    config, layers = student.model.dreamer.config, student.config.num_layers
    entries, experts = shares_kept(config, layers)
    return (
        f"{config.entries} of {layers} entries of attention ({entries:.0%}) and "
        f"{config.experts} of {layers * config.slices} experts ({experts:.0%}) are left; "
        f"{share:.0%} was asked for{_skipped(config)}"
    )


def _skipped(config: DreamerConfig) -> str:
    """`; depths 2, 3 go without attention`, or nothing where all of them have both."""
    parts = (("attention", config.skipped_attention), ("experts", config.skipped_experts))
    return "".join(
        f"; depth{'s' * (len(at) > 1)} {', '.join(map(str, at))} "
        f"{'go' if len(at) > 1 else 'goes'} without {name}"
        for name, at in parts
        if at
    )


def _cut(noted: dict[str, Any]) -> Cut:
    return Cut(*(tuple(map(tuple, noted[name])) for name in ("groups", "shares")))


def _sizes(student: LT2ForCausalLM) -> dict[str, Any]:
    config = student.model.dreamer.config
    parameters = sum(parameter.numel() for parameter in student.parameters())
    entries, experts = shares_kept(config, student.config.num_layers)
    return {
        "entries": config.entries,
        "entries_share": entries,
        "experts": config.experts,
        "experts_share": experts,
        "top_experts": config.top_experts,
        "parameters": parameters,
    }
