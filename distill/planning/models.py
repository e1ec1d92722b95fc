"""The models of a run as they stand in memory: teacher, linear student, hybrid student."""

from __future__ import annotations

from dataclasses import dataclass

from ltconvert.convert.inspect import LayerFacts, ModelFacts, model_facts
from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import origin_spec, student_options
from ltconvert.distill.selection.ranking import count_full_layers, listed_layers
from ltconvert.distill.selection.simple import uniform_layers
from ltconvert.recipes.schema import Recipe


@dataclass(frozen=True)
class Models:
    """Sizes of everything that a recipe makes of a teacher.

    Attributes:
        spec: the architecture whose layers are converted: the teacher's, or that of the looped
            model that a recipe first makes of a dense one.
        keep: layers that stay full.
        origin: the model of ``spec``, all layers full.
        ties: whether that is another one than the teacher.
        linear: the student before selection: every layer converted that is not listed.
        hybrid: the student after it. Which layers are kept is not known yet; evenly spaced ones
            stand for them, which matters only where layers differ (windows).
    """

    spec: TeacherSpec
    keep: int
    teacher: ModelFacts
    origin: ModelFacts
    ties: bool
    linear: ModelFacts
    hybrid: ModelFacts

    @property
    def converted(self) -> tuple[LayerFacts, ...]:
        """Layers whose mixer is aligned."""
        return tuple(layer for layer in self.linear.layers if MIXERS[layer.mixer].converted)

    @property
    def mixer_parameters(self) -> int:
        """Values in the converted mixers of the student before selection."""
        return sum(layer.mixer_parameters for layer in self.converted)

    @property
    def aligned_parameters(self) -> int:
        """Those of them that the stage `align` trains."""
        return sum(layer.aligned_parameters for layer in self.converted)


def models_of(recipe: Recipe, spec: TeacherSpec) -> Models:
    """Sizes from the recipe and the architecture alone.

    Raises:
        UserError: ``student.full_layers`` does not fit the teacher.
        ValueError: neither do loops, prelude or coda.
    """
    student = recipe.student
    teacher = model_facts(LT2Config.from_spec(spec))
    spec = origin_spec(spec, student.model_dump())
    origin = model_facts(LT2Config.from_spec(spec))
    full = student.full(spec.num_layers)
    keep = count_full_layers(full, spec.num_layers)
    listed = listed_layers(full if isinstance(full, list) else [], spec.num_layers)
    kept = listed or uniform_layers(keep, spec.num_layers)
    options = student_options(spec, student.model_dump())

    def facts(full: list[int]) -> ModelFacts:
        mixers = student.mixers(full, spec.num_layers)
        return model_facts(LT2Config.from_spec(spec, mixers, **options))

    return Models(
        spec=spec,
        keep=keep if student.converts else spec.num_layers,
        teacher=teacher,
        origin=origin,
        ties=student.loop_start is not None,
        linear=facts(listed),
        hybrid=facts(kept),
    )
