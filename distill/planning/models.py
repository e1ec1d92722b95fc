"""The models of a run as they stand in memory: teacher, linear student, hybrid student."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ltconvert.convert.dropping import count_dropped, shortened_spec
from ltconvert.convert.inspect import LayerFacts, ModelFacts, model_facts
from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.dreamer.shrink import configs_after
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import origin_spec, student_options
from ltconvert.distill.selection.ranking import count_full_layers, listed_layers
from ltconvert.distill.selection.simple import uniform_layers
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.student import StudentSettings


@dataclass(frozen=True)
class PoolFacts:
    """A Dreamer whose pools hold a part of the teacher's layers: ``share`` was asked for."""

    share: float
    entries: int
    experts: int
    top_experts: int
    facts: ModelFacts


@dataclass(frozen=True)
class Models:
    """Sizes of everything that a recipe makes of a teacher.

    Attributes:
        spec: the architecture whose layers are converted: the teacher's, that of the looped model
            that a recipe first makes of a dense one, or of the teacher without some layers.
        keep: layers that stay full.
        origin: the model of ``spec``, all layers full.
        ties: whether that is another one than the teacher.
        linear: the student before selection: every layer converted that is not listed.
        hybrid: the student after it. Which layers are kept is not known yet; evenly spaced ones
            stand for them, which matters only where layers differ (windows).
        config: that of ``hybrid``.
        pools: a Dreamer after each step of the stage `shrink`.
    """

    spec: TeacherSpec
    keep: int
    teacher: ModelFacts
    origin: ModelFacts
    ties: bool
    linear: ModelFacts
    hybrid: ModelFacts
    config: LT2Config
    pools: tuple[PoolFacts, ...] = ()

    def trained_in(self, stage: str) -> ModelFacts:
        """The student of a stage that trains all of it, at its largest."""
        if stage == "loop":
            return self.origin
        if not self.pools or stage not in ("shrink", "longctx"):
            return self.hybrid
        return self.pools[0 if stage == "shrink" else -1].facts

    @property
    def converted(self) -> tuple[LayerFacts, ...]:
        """Layers whose mixer is aligned; none of a Dreamer, which takes mixers over as they are."""
        if self.config.dreamer is not None:
            return ()
        return tuple(layer for layer in self.linear.layers if MIXERS[layer.mixer].converted)

    @property
    def mixer_parameters(self) -> int:
        """Values in the converted mixers of the student before selection."""
        return sum(layer.mixer_parameters for layer in self.converted)

    @property
    def aligned_parameters(self) -> int:
        """Those of them that the stage `align` trains."""
        return sum(layer.aligned_parameters for layer in self.converted)


def models_of(
    recipe: Recipe, spec: TeacherSpec, inherited: Mapping[str, Any] | None = None
) -> Models:
    """Sizes from the recipe and the architecture alone.

    Args:
        inherited: what the student takes over beside the architecture, see ``distill.inherited``.

    Raises:
        UserError: ``student.full_layers`` does not fit the teacher.
        ValueError: neither do loops, prelude or coda.
    """
    student = recipe.student
    inherited = inherited or {}
    teacher = model_facts(LT2Config.from_spec(spec, **inherited))
    spec = shortened(origin_spec(spec, student.model_dump()), student.drop_layers)
    origin = model_facts(LT2Config.from_spec(spec, **inherited))
    full = student.full(spec.num_layers)
    keep = count_full_layers(full, spec.num_layers)
    listed = listed_layers(full if isinstance(full, list) else [], spec.num_layers)
    kept = listed or uniform_layers(keep, spec.num_layers)
    options = student_options(spec, student.model_dump())

    def config(full: list[int]) -> LT2Config:
        mixers = student.mixers(full, spec.num_layers)
        return LT2Config.from_spec(spec, **{"mixers": mixers} | options | dict(inherited))

    return Models(
        spec=spec,
        keep=keep if student.converts else spec.num_layers,
        teacher=teacher,
        origin=origin,
        ties=student.loop_start is not None,
        linear=model_facts(config(listed)),
        hybrid=model_facts(config(kept)),
        config=config(kept),
        pools=_pools(config(kept), student) if "shrink" in recipe.stages else (),
    )


def _pools(config: LT2Config, student: StudentSettings) -> tuple[PoolFacts, ...]:
    """What is left of a Dreamer at each share."""
    found, start = [], config.dreamer_config()
    assert start is not None
    steps = student.steps
    after = configs_after(start, config.num_layers, steps, student.pool_cut)
    for (share, top), left in zip(steps, after, strict=True):
        smaller = copy.deepcopy(config)
        smaller.dreamer = asdict(left)
        found.append(PoolFacts(share, left.entries, left.experts, top, model_facts(smaller)))
    return tuple(found)


def shortened(spec: TeacherSpec, wanted: int | float | list[int]) -> TeacherSpec:
    """Without the layers that are left out; evenly spaced ones stand for those not yet chosen."""
    count = count_dropped(wanted, spec.num_layers)
    if not count:
        return spec
    layers = wanted if isinstance(wanted, list) else uniform_layers(count, spec.num_layers)
    return shortened_spec(spec, layers)
