"""What a run will take, before it starts: tokens, memory, disk, time, what selecting costs.

Estimates. Parameters and cache sizes are exact; memory counts what stays in memory (weights,
gradients, optimiser, activations kept for the backward pass) and allows for the rest; time is
arithmetic over a measured speed, and an upper bound where a stage may stop early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ltconvert.convert.inspect import ModelFacts
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.data import check_local
from ltconvert.distill.planning.disk import peak_disk, stage_disk
from ltconvert.distill.planning.fit import refuse_disk, refuse_memory
from ltconvert.distill.planning.footprint import Footprint, footprint
from ltconvert.distill.planning.machine import Machine, free_disk, measure
from ltconvert.distill.planning.memory import Parts, stage_memory
from ltconvert.distill.planning.models import Models, PoolFacts, models_of
from ltconvert.distill.planning.rows import choose_rows, with_rows
from ltconvert.distill.planning.student import (
    check_decoding,
    kind_of,
    makeup,
    notes,
    raised_shares,
)
from ltconvert.distill.planning.work import Work, selection_cost, stage_work
from ltconvert.distill.selection.result import Cost
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe


@dataclass(frozen=True)
class StagePlan:
    """One row.

    Attributes:
        memory: peak by part, bytes; see ``planning.memory``.
        disk_bytes: what the stage writes at its fullest.
    """

    stage: str
    tokens: int
    steps: int
    trained_parameters: int
    memory: Parts
    disk_bytes: int
    flops: float
    hours: float

    @property
    def peak_bytes(self) -> int:
        """Memory at the stage's peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PoolPlan:
    """A Dreamer with a part of the teacher's layers in its pools; costs as in ``Footprint``.

    ``share`` is what the recipe asks for; entries and experts are what is left.
    """

    share: float
    entries: int
    experts: int
    top_experts: int
    footprint: Footprint


@dataclass(frozen=True)
class Plan:
    """The whole run.

    Attributes:
        kind: `LT2`, `MoDA` or `Dreamer`.
        makeup: mixers and layers of the student in words.
        keep: layers that stay full.
        micro_batch_rows: rows a forward pass of every training stage, chosen where the recipe
            leaves them open.
        selection: cost of selecting if nothing settles early; None when the stage does not run.
        pools: a Dreamer before and after each step of the stage `shrink`, where it runs.
        notes: what is allowed and yet hardly meant, a line each.
        disk_bytes: the run folder at its fullest.
    """

    recipe: str
    device: str
    precision: str
    machine: Machine
    kind: str
    makeup: str
    keep: int
    micro_batch_rows: dict[str, int]
    teacher: ModelFacts
    student: ModelFacts
    rows: tuple[StagePlan, ...]
    selection: Cost | None
    pools: tuple[PoolPlan, ...]
    notes: tuple[str, ...]
    disk_bytes: int
    free_disk_bytes: int | None

    @property
    def hours(self) -> float:
        """All stages."""
        return sum(row.hours for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        plain = asdict(self)
        for row, own in zip(plain["rows"], self.rows, strict=True):
            row["peak_bytes"] = own.peak_bytes
        for name in ("teacher", "student"):
            plain[name] = getattr(self, name).to_dict()
        return plain | {"hours": self.hours}


def plan(
    recipe: Recipe,
    spec: TeacherSpec,
    device: torch.device | str,
    precision: str,
    *,
    inherited: Mapping[str, Any] | None = None,
    run_dir: Path | None = None,
    tokens_per_second: float | None = None,
    machine: Machine | None = None,
    check: bool = True,
) -> Plan:
    """Plan a recipe on a teacher.

    Args:
        precision: ``fp32`` or ``bf16``.
        inherited: what the student takes over from a teacher that is a student, see
            ``distill.inherited``.
        run_dir: where the run will be written; its disk is looked at.
        tokens_per_second: of the stage `logits` on this device, where known; otherwise the speed
            of a matrix product is measured.
        machine: facts of the device instead of a look at it.
        check: refuse what cannot fit, and text or ways of decoding that are not there.

    Raises:
        UserError: the run cannot fit, the recipe does not fit the teacher, or there is no text.
    """
    device = torch.device(device)
    models = models_of(recipe, spec, inherited)
    said = (*notes(recipe, spec.num_loops), *raised_shares(recipe, models))
    if check:
        check_local(recipe.data)
        check_decoding(recipe, models)
    machine = machine or measure(device, precision)
    rows = choose_rows(recipe, models, precision, device.type, machine.free_bytes)
    recipe = with_rows(recipe, rows)
    stages = recipe.stages
    scale = _speed(recipe, models, machine, device.type, tokens_per_second)
    made = Plan(
        recipe=recipe.name,
        device=str(device),
        precision=precision,
        machine=machine,
        kind=kind_of(recipe, models),
        makeup=makeup(recipe, models),
        keep=models.keep,
        micro_batch_rows=rows,
        teacher=models.teacher,
        student=models.hybrid,
        rows=tuple(
            _row(stage, recipe, models, precision, machine, device.type, scale) for stage in stages
        ),
        selection=selection_cost(recipe, models) if "select" in stages else None,
        pools=_pools(recipe, models),
        notes=said,
        disk_bytes=peak_disk(stages, recipe, models),
        free_disk_bytes=None if run_dir is None else free_disk(run_dir),
    )
    if check:
        for row in made.rows:
            refuse_memory(row.stage, recipe, models, precision, made.device, machine.free_bytes)
        refuse_disk(made.disk_bytes, made.free_disk_bytes)
    return made


def _row(
    stage: str,
    recipe: Recipe,
    models: Models,
    precision: str,
    machine: Machine,
    device_type: str,
    scale: float,
) -> StagePlan:
    work = stage_work(stage, recipe, models)
    trained = {
        "loop": models.origin.parameters,
        "align": models.aligned_parameters,
        "select": 0,
    }.get(stage, models.trained_in(stage).parameters)
    if stage == "select" and recipe.select.method == "kl" and work.steps:
        trained = models.linear.parameters
    if stage == "select" and recipe.select.method == "kl-gates" and work.steps:
        trained = models.spec.num_layers
    return StagePlan(
        stage=stage,
        tokens=work.tokens,
        steps=work.steps,
        trained_parameters=trained,
        memory=stage_memory(stage, recipe, models, precision, device_type),
        disk_bytes=stage_disk(stage, recipe, models),
        flops=work.flops,
        hours=scale * work.seconds(machine, device_type) / 3600,
    )


def _pools(recipe: Recipe, models: Models) -> tuple[PoolPlan, ...]:
    """In rows of the stage `shrink`."""
    if not models.pools or "shrink" not in recipe.stages:
        return ()
    layers, student = models.spec.num_layers, recipe.student
    whole = PoolFacts(1.0, layers, layers * student.slices, student.top_experts, models.hybrid)
    tokens = recipe.shrink.seq_len_tokens
    return tuple(
        PoolPlan(
            x.share, x.entries, x.experts, x.top_experts, footprint(x.facts, models.spec, tokens)
        )
        for x in (whole, *models.pools)
    )


def _speed(
    recipe: Recipe,
    models: Models,
    machine: Machine,
    device_type: str,
    tokens_per_second: float | None,
) -> float:
    """Factor on all times, 1 unless the speed of the stage `logits` is given."""
    if tokens_per_second is None:
        return 1.0
    if tokens_per_second <= 0:
        raise UserError(f"tokens per second is {tokens_per_second}; expected a number above 0")
    logits: Work = stage_work("logits", recipe, models)
    return logits.tokens / tokens_per_second / logits.seconds(machine, device_type)
