"""All stages in order: finished ones are skipped, a partial one goes on, a changed one is refused.

A run folder::

    run.json               whose run this is: teacher, recipe, precision
    recipe.resolved.yaml   every setting, defaults written out
    metrics.jsonl          one line a logged step
    stages/<stage>/        stage.json; checkpoint/ while it trains; student/ or selection.json
    student/               the result, with provenance.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.convert.transfer import build_student, restore_full, student_options
from ltconvert.distill import align, logits, longctx, select, summary
from ltconvert.distill.align import is_converted
from ltconvert.distill.data import Batch, heldout_batches
from ltconvert.distill.dependencies import (
    chain,
    check_owner,
    check_same_run,
    fingerprint,
    recorded_precision,
)
from ltconvert.distill.evaluation.scores import heldout_scores
from ltconvert.distill.precision import pick_precision
from ltconvert.distill.records import (
    StageRecord,
    clear_disk_errors,
    is_main_process,
    join_processes,
    read_record,
    versions,
    wait_for_everyone,
)
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.ranking import count_full_layers
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.shelf import Shelf
from ltconvert.distill.stage import SELECTION_FILE, StageInputs, StageResult
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

STAGES: dict[str, Callable[[Any, StageInputs, Path], StageResult]] = {
    "align": align.run,
    "select": select.run,
    "logits": logits.run,
    "longctx": longctx.run,
}
START = "start"
SCORED_TOKENS = 4096  # tokens of a forward pass while scoring


@dataclass
class PipelineResult:
    """What a run leaves.

    Attributes:
        student: the student after the last stage of the recipe, in eval mode, in fp32.
        student_dir: where the run's result is saved.
        rows: one a stage: ``stage``, ``kl``, ``student_ppl``, ``teacher_ppl``, ``agreement``,
            ``tokens`` (trained on), ``minutes``.
        selection: physical layers that stayed full.
    """

    student: LT2ForCausalLM
    student_dir: Path
    rows: list[dict[str, Any]]
    selection: list[int]
    precision: str


@dataclass
class Pipeline:
    """One run of a recipe on a teacher in a folder; see ``run``."""

    recipe: Recipe
    teacher: Teacher
    shelf: Shelf
    log: RunLog
    device: torch.device
    precision: str
    records: dict[str, StageRecord] = field(default_factory=dict)
    _heldout: list[Batch] | None = None

    @property
    def planned(self) -> list[str]:
        """Stages that this recipe runs, in order."""
        converts = self.recipe.student.mixer != "full"
        wanted = [name for name in STAGES if getattr(self.recipe, name).enabled]
        return [name for name in wanted if converts or name not in ("align", "select")]

    def check(self) -> None:
        """Read all records; refuse before any work when one belongs to another run.

        Raises:
            UserError: names what differs.
        """
        check_owner(self.shelf.run_dir, self.recipe, self.teacher, self.precision)
        parts = chain(self.recipe, self.teacher, self.precision, self.planned)
        for stage, depends_on in parts.items():
            record = read_record(self.shelf.folder(stage)) or StageRecord(stage, "new", depends_on)
            check_same_run(self.shelf.run_dir, stage, record.depends_on, depends_on)
            self.records[stage] = record
        wait_for_everyone()  # nobody writes a record that another has yet to read
        layers, num_layers = self.recipe.student.full_layers, self.teacher.spec.num_layers
        settled = isinstance(layers, list) or self.recipe.student.mixer == "full"
        if settled or self.recipe.select.enabled:
            return
        if 0 < count_full_layers(layers, num_layers) < num_layers:
            raise UserError(
                f"student.full_layers = {layers} leaves the choice to the stage select, which is "
                "disabled: list the layers (student.full_layers=[0,4]) or set select.enabled=true"
            )

    def run(self) -> PipelineResult:
        """All stages that are not finished; then the student is saved and the table is shown."""
        student = None if self.records[START].finished else self._start()
        for stage in self.planned:
            if self.records[stage].finished:
                self.log.say(f"{stage}: finished before, skipped")
                student = None
            else:
                student = self._run_stage(stage, student or self._student_before(stage))
        last = [START, *self.planned][-1]
        student = student or self._student_after(last)
        self._keep_final(last, student)
        rows = [summary.row(record) for record in self.records.values()]
        summary.show(self.log, rows)
        kept = [i for i in range(len(student.model.layers)) if not is_converted(student, i)]
        return PipelineResult(student, self.shelf.final, rows, kept, self.precision)

    def _start(self) -> LT2ForCausalLM:
        """Score the student as it comes from the teacher's weights."""
        began = time.perf_counter()
        student = self._initial_student()
        self._finish(self.records[START], student, {"tokens": 0, "seconds": 0.0}, began)
        return student

    def _initial_student(self) -> LT2ForCausalLM:
        """All layers converted but those that the recipe lists; tensors shared with the teacher."""
        settings, teacher = self.recipe.student, self.teacher
        listed = settings.full_layers if isinstance(settings.full_layers, list) else []
        mixers = ["full" if i in listed else settings.mixer for i in range(teacher.spec.num_layers)]
        options = student_options(teacher.spec, settings.model_dump())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            student = build_student(teacher.model, mixers, options, share=True)
        return student.eval().requires_grad_(False)

    def _run_stage(self, stage: str, student: LT2ForCausalLM) -> LT2ForCausalLM:
        """One stage from ``student`` to the next one, saved and scored."""
        record, folder = self.records[stage], self.shelf.folder(stage)
        record.status, record.versions = "running", versions()
        if is_main_process():
            record.write(folder)
        began = time.perf_counter()
        inputs = StageInputs(
            teacher=self.teacher,
            recipe=self.recipe,
            student=student,
            selection=self._selection(),
            tokenizer=self.teacher.tokenizer,
            run_dir=self.shelf.run_dir,
            log=self.log,
            precision=self.precision,
            device=self.device,
            seed=self.recipe.seed + 1 + list(STAGES).index(stage),
        )
        result = STAGES[stage](getattr(self.recipe, stage), inputs, folder)
        del inputs, student
        if stage == "select":
            student = self._hybrid(result.student)
        else:
            student = result.student.float().eval().requires_grad_(False)
            if is_main_process():
                self.shelf.save(student, stage, self._provenance(stage))
            wait_for_everyone()
        self._finish(record, student, result.facts, began)
        self.shelf.clear_checkpoints(stage)
        if stage == "longctx":
            self.shelf.drop(["logits"])
        return student

    def _finish(
        self, record: StageRecord, student: LT2ForCausalLM, facts: dict[str, Any], began: float
    ) -> None:
        """Score the student on held-out text and mark the stage as finished."""
        teacher = self.teacher.model
        record.scores = heldout_scores(teacher, student, self._rows(), precision=self.precision)
        record.scored_with = summary.scoring(self.recipe)
        record.facts = facts | {"wall_seconds": time.perf_counter() - began}
        record.status, record.versions = "finished", versions()
        if is_main_process():
            record.write(self.shelf.folder(record.stage))
        wait_for_everyone()
        before = [r for r in self.records.values() if r.finished and r is not record]
        self.log.say(summary.after_stage(record, before[-1] if before else None))

    def _rows(self) -> list[Batch]:
        """The fixed held-out rows, read once."""
        if self._heldout is None:
            length = self.recipe.eval.heldout_seq_len_tokens
            self._heldout = heldout_batches(
                self.recipe.data,
                self.teacher.tokenizer,
                self.recipe.eval.heldout_tokens,
                length,
                max(1, SCORED_TOKENS // length),
            )
        return self._heldout

    def _student_before(self, stage: str) -> LT2ForCausalLM:
        """The student that a stage starts from, from what is on disk."""
        earlier = [START, *self.planned[: self.planned.index(stage)]]
        return self._student_after(earlier[-1])

    def _student_after(self, stage: str) -> LT2ForCausalLM:
        """What a finished stage left."""
        if stage == START:
            return self._initial_student()
        if stage == "select":
            return self._hybrid(self._student_before(stage))
        return self.shelf.load(stage, fingerprint(self.records[stage].depends_on))

    def _hybrid(self, student: LT2ForCausalLM) -> LT2ForCausalLM:
        """The teacher's attention back in the chosen layers."""
        restore_full(student, self.teacher.model, self._selection() or [])
        return student.eval().requires_grad_(False)

    def _selection(self) -> list[int] | None:
        path = self.shelf.folder("select") / SELECTION_FILE
        if "select" in self.planned:
            return Selection.load(path).chosen if path.exists() else None
        layers = self.recipe.student.full_layers
        return layers if isinstance(layers, list) else None

    def _keep_final(self, last: str, student: LT2ForCausalLM) -> None:
        """Save the result unless it is there, or that of a later stage of the same run is."""
        names = [START, *STAGES]
        later = [read_record(self.shelf.folder(name)) for name in names[names.index(last) + 1 :]]
        hashes = {fingerprint(record.depends_on) for record in later if record and record.finished}
        wanted = hashes | {fingerprint(self.records[last].depends_on)}
        if is_main_process() and self.shelf.final_hash() not in wanted:
            self.shelf.save_final(student, self._provenance(last))
        wait_for_everyone()
        self.shelf.drop(self.planned)

    def _provenance(self, stage: str) -> dict[str, Any]:
        teacher, recipe = self.teacher, self.recipe.model_dump(mode="json")
        facts = {name: getattr(teacher, name) for name in ("name", "source", "revision", "digest")}
        return {
            "teacher": facts,
            "recipe": recipe,
            "recipe_hash": fingerprint(recipe),
            "stage": stage,
            "stage_hash": fingerprint(self.records[stage].depends_on),
            "selection": self._selection(),
            "stages": {name: r.history() for name, r in self.records.items() if r.finished},
            "precision": self.precision,
            "versions": versions(),
        }


def run(
    recipe: Recipe,
    teacher: Teacher,
    run_dir: Path | str,
    log: RunLog,
    *,
    device: torch.device | str | None = None,
    precision: str = "auto",
) -> PipelineResult:
    """Convert a teacher by a recipe; the same call after a crash goes on where it stopped.

    Args:
        teacher: on ``device``; its weights are left as they are.
        run_dir: made if need be.
        device: the teacher's by default.
        precision: ``fp32``, ``bf16``, or ``auto``: what the run began with, else the faster one.

    Raises:
        UserError: the folder holds a run of another teacher, recipe or setting; the disk refuses;
            the teacher has no tokenizer; or a stage finds a mistake.
    """
    run_dir = Path(run_dir)
    device = torch.device(device) if device is not None else teacher.model.device
    if teacher.tokenizer is None:
        raise UserError(f"teacher {teacher.name} has no tokenizer; text cannot be tokenised")
    join_processes(device)
    with clear_disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        if precision == "auto":
            precision = recorded_precision(run_dir) or pick_precision(device)[0]
        shelf = Shelf(run_dir, teacher.tokenizer, device)
        pipeline = Pipeline(recipe, teacher, shelf, log, device, precision)
        pipeline.check()
        if is_main_process():
            resolved = run_dir / "recipe.resolved.yaml"
            resolved.write_text(recipes.dump(recipe), encoding="utf-8")
        return pipeline.run()
