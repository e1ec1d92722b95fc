"""What each stage of a run starts from, and what it depends on, by the run's folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.convert.dropping import count_dropped, drop_layers
from ltconvert.convert.students.dreamer.build import dreamer_options
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.shrink import configs_after
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.teachers.weights import digest
from ltconvert.convert.transfer import (
    build_student,
    origin_model,
    origin_spec,
    restore_full,
    student_options,
)
from ltconvert.distill.damage import least_damage
from ltconvert.distill.data import (
    Batch,
    PackedStream,
    as_recorded,
    check_every_document,
    data_identity,
)
from ltconvert.distill.input_squares import input_squares
from ltconvert.distill.planning.models import shortened
from ltconvert.distill.processes import all_values, is_main_process, wait_for_everyone
from ltconvert.distill.records import (
    RECIPE_FILE,
    STAGE_FILE,
    StageRecord,
    read_record,
    versions,
    write_whole,
)
from ltconvert.distill.run_identity import (
    chain,
    check_owner,
    check_same_run,
    claim,
    fingerprint,
    owner_of,
    teacher_identity,
)
from ltconvert.distill.selection.ranking import count_full_layers
from ltconvert.distill.selection.recall import draw
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.shelf import Shelf
from ltconvert.distill.stage import SELECTION_FILE
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

START = "start"
LOOP = "loop"


@dataclass
class Lineage:
    """The students of a recipe on a teacher, from the first one to the last.

    What is converted is the *origin*: the teacher, or the looped model that a recipe first makes of
    a dense one. Its layers are the student's, so `align` and `select` compare with it, visit by
    visit; the stages that learn logits have the teacher itself.

    Attributes:
        records: of the start and of each stage of the recipe, in order; filled by ``check``.
    """

    recipe: Recipe
    teacher: Teacher
    shelf: Shelf
    precision: str
    records: dict[str, StageRecord] = field(default_factory=dict)
    _origin: Teacher | None = None

    def check(self) -> None:
        """Read all records; refuse before any work when one belongs to another run.

        Nothing is written: a run that is refused leaves no folder behind.

        Raises:
            UserError: names what differs.
        """
        self._check_sizes()
        check_owner(self.shelf.run_dir, self._owner())
        start = read_record(self.shelf.folder(START))
        then = start.depends_on if start else {}
        teacher = teacher_identity(self.teacher, then.get("teacher"))
        data = as_recorded(data_identity(self.recipe.data), then.get("data"))
        parts = chain(self.recipe, teacher, self.precision, self.recipe.stages, data)
        for stage, depends_on in parts.items():
            record = self._begun(stage) or StageRecord(stage, "new", depends_on)
            check_same_run(self.shelf.run_dir, stage, record.depends_on, depends_on)
            self.records[stage] = record
        wait_for_everyone()  # nobody writes a record that another has yet to read
        self._check_choice()

    def _begun(self, stage: str) -> StageRecord | None:
        """The record of a stage that has finished, or has left something to go on from."""
        folder = self.shelf.folder(stage)
        record = read_record(folder)
        if record is None or record.finished:
            return record
        return record if any(path.name != STAGE_FILE for path in folder.iterdir()) else None

    def _check_sizes(self) -> None:
        """What later stages make of the teacher has to fit it from the start."""
        spec, student = self._origin_spec(), self.recipe.student
        shortened(spec, student.drop_layers)
        pools = dreamer_options(spec, student.model_dump())
        if pools is not None:
            start = DreamerConfig(**pools)
            configs_after(start, spec.num_layers, student.steps, student.pool_cut)

    def claim(self) -> None:
        """Make the run folder this run's own, once nothing refuses the run."""
        if is_main_process():
            claim(self.shelf.run_dir, self._owner())
            write_whole(self.shelf.run_dir / RECIPE_FILE, recipes.dump(self.recipe))
        wait_for_everyone()

    def _owner(self) -> dict[str, Any]:
        return owner_of(self.recipe, self.teacher, self.precision)

    def check_text(self) -> None:
        """Refuse text that holds no row of the longest that the stages train on or documents that
        training would stop at, and rows that are too short to choose layers by what they retrieve.

        Raises:
            UserError: naming what it lacks.
        """
        lengths = [getattr(self.recipe, stage).seq_len_tokens for stage in self.recipe.stages]
        next(self._training_rows(max(lengths, default=1)))
        if not self.records[START].finished:  # else it was looked at, and is the same since
            check_every_document(self.recipe.data, self.teacher.tokenizer)
        select = self.recipe.select
        layers = self.recipe.student.full(self._origin_spec().num_layers)
        open_choice = "select" in self.recipe.stages and not isinstance(layers, list)
        if open_choice and select.method in ("recall", "recall-greedy"):
            draw(select, self.teacher.tokenizer, self.recipe.seed)

    def _check_choice(self) -> None:
        student, num_layers = self.recipe.student, self._origin_spec().num_layers
        layers = student.full(num_layers)
        settled = isinstance(layers, list) or not student.converts
        if settled or self.recipe.select.enabled:
            return
        if 0 < count_full_layers(layers, num_layers) < num_layers:
            raise UserError(
                f"student.full_layers = {layers} leaves the choice to the stage select, which is "
                "disabled: list the layers (student.full_layers=[0,4]) or set select.enabled=true"
            )

    def _origin_spec(self) -> TeacherSpec:
        return origin_spec(self.teacher.spec, self.recipe.student.model_dump())

    @property
    def ties(self) -> bool:
        """Whether a dense teacher is looped first."""
        return self.recipe.student.loop_start is not None

    def initial_student(self) -> LT2ForCausalLM:
        """The converted student, or what comes in its place: a looped form, or a shorter one."""
        if self.recipe.student.drop_layers:
            return drop_layers(self.teacher.model, self.dropped()).eval()
        return self._tied() if self.ties else self._converted()

    def dropped(self) -> list[int]:
        """The teacher's layers that the student leaves out; chosen once, as the start notes."""
        settings, start = self.recipe.student, self.records[START]
        wanted = settings.drop_layers
        if isinstance(wanted, list):
            return sorted(wanted)
        if wanted and "dropped" not in start.facts:
            count = count_dropped(wanted, self.teacher.spec.num_layers)
            rows = self._calibration_rows(settings.drop_calibration_tokens)
            found = least_damage(self.teacher.model, rows, count)
            start.facts["dropped"] = all_values(found)[0]  # GPUs that differ may choose others
        return list(start.facts.get("dropped", []))

    def _tied(self) -> LT2ForCausalLM:
        settings, squares = self.recipe.student, None
        if settings.loop_calibration_tokens and settings.loop_rank:
            first, outside = settings.prelude_layers or 0, settings.coda_layers or 0
            layers = range(first, self.teacher.spec.num_layers - outside)
            rows = self._calibration_rows(settings.loop_calibration_tokens)
            squares = input_squares(self.teacher.model, rows, layers)
        return origin_model(self.teacher.model, settings.model_dump(), squares).eval()

    def _calibration_rows(self, tokens: int) -> Iterator[Batch]:
        """The first training rows, the same in every process, as long as the start notes."""
        length = min(self.recipe.loop.seq_len_tokens, tokens)
        length = self.records[START].facts.setdefault("calibration_row_tokens", length)
        return islice(self._training_rows(length), tokens // length)

    def _training_rows(self, length: int) -> PackedStream:
        """Rows of so many tokens, the same in every process."""
        return PackedStream(
            self.recipe.data,
            self.teacher.tokenizer,
            split="train",
            seq_len_tokens=length,
            rows=1,
            seed=self.recipe.seed,
            rank=0,
            world=1,
        )

    def _converted(self) -> LT2ForCausalLM:
        """All layers converted but those that the recipe lists; tensors shared with the origin."""
        settings, origin = self.recipe.student, self.origin()
        num_layers = origin.spec.num_layers
        full = settings.full(num_layers)
        mixers = settings.mixers(full if isinstance(full, list) else [], num_layers)
        if settings.kind == "dreamer":
            mixers = origin.model.config.mixers
        options = student_options(origin.spec, settings.model_dump())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            student = build_student(origin.model, mixers, options, share=True)
        return student.eval().requires_grad_(False)

    def origin(self) -> Teacher:
        """The model whose layers are converted, as a teacher."""
        if not self.ties:
            return self.teacher
        if self._origin is None:
            model = self.student_after(LOOP) if LOOP in self.recipe.stages else self._tied()
            spec, names = model.config.spec(), digest(model.state_dict())
            self._origin = replace(self.teacher, spec=spec, model=model, digest=names)
        return self._origin

    def teacher_of(self, stage: str) -> Teacher:
        """The model that a stage learns from or compares with.

        The origin is let go before the stages that train all of a student made of its tensors.
        """
        if stage in ("align", "select"):
            return self.origin()
        self._origin = None
        return self.teacher

    def student_before(self, stage: str) -> LT2ForCausalLM:
        """The student that a stage starts from, from what is on disk."""
        earlier = [START, *self.recipe.stages[: self.recipe.stages.index(stage)]]
        return self._converted() if self.converts(stage) else self.student_after(earlier[-1])

    def converts(self, stage: str) -> bool:
        """Whether it is before this stage that the layers of a looped origin are converted."""
        stages = [name for name in self.recipe.stages if name != LOOP]
        return self.ties and stages[:1] == [stage]

    def student_after(self, stage: str) -> LT2ForCausalLM:
        """What a finished stage left."""
        if stage == START:
            return self.initial_student()
        if stage == "select":
            return self.hybrid(self.student_before(stage))
        return self.shelf.load(stage, fingerprint(self.records[stage].depends_on))

    def hybrid(self, student: LT2ForCausalLM) -> LT2ForCausalLM:
        """The origin's attention back in the chosen layers."""
        chosen, kind = self.selection() or [], self.recipe.student.full_mixer
        restore_full(student, self.origin().model, chosen, kind)
        return student.eval().requires_grad_(False)

    def selection(self) -> list[int] | None:
        """The physical layers that stay full; None before they are chosen."""
        path = self.shelf.folder("select") / SELECTION_FILE
        if "select" in self.recipe.stages:
            return Selection.load(path).chosen if path.exists() else None
        layers = self.recipe.student.full(self._origin_spec().num_layers)
        return layers if isinstance(layers, list) else None

    def provenance(self, stage: str) -> dict[str, Any]:
        """What is saved with the student that a stage left."""
        teacher, recipe = self.teacher, self.recipe.model_dump(mode="json")
        facts = {name: getattr(teacher, name) for name in ("name", "source", "revision", "digest")}
        return {
            "teacher": facts,
            "recipe": recipe,
            "recipe_hash": fingerprint(recipe),
            "stage": stage,
            "stage_hash": fingerprint(self.records[stage].depends_on),
            "selection": self.selection(),
            "dropped_layers": self.dropped(),
            "stages": {name: r.history() for name, r in self.records.items() if r.finished},
            "precision": self.precision,
            "versions": versions(),
        }
