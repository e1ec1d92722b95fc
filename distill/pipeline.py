"""All stages in order: finished ones are skipped, a partial one goes on, a changed one is refused.

A run folder::

    run.json               whose run this is: teacher, recipe, precision
    recipe.resolved.yaml   every setting, defaults written out
    metrics.jsonl          one line a logged step
    stages/<stage>/        stage.json; checkpoint/ while it trains; student/ or selection.json
    student/               the result, with provenance.json
    .lock                  while a call is at work here: which process
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.distill import align, compilation, logits, longctx, loop, select, shrink, summary
from ltconvert.distill.align import is_converted
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import heldout_rows, heldout_scores
from ltconvert.distill.inherited import inherited
from ltconvert.distill.interrupt import saying_what_is_kept
from ltconvert.distill.lineage import START, Lineage
from ltconvert.distill.processes import (
    is_main_process,
    join_processes,
    wait_for_everyone,
)
from ltconvert.distill.records import (
    StageRecord,
    read_record,
    versions,
)
from ltconvert.distill.reporting.tables import runs
from ltconvert.distill.run_identity import fingerprint, precision_of_run
from ltconvert.distill.run_lock import working_in
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.shelf import Shelf
from ltconvert.distill.stage import StageInputs, StageResult
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe
from ltconvert.recipes.stages import STAGES

# Counted in the order in which stages came to be: what a stage draws stays as it was.
_SEEDS = ("align", "select", "logits", "longctx", "loop", "shrink")

RUN_STAGE: dict[str, Callable[[Any, StageInputs, Path], StageResult]] = {
    "loop": loop.run,
    "align": align.run,
    "select": select.run,
    "logits": logits.run,
    "shrink": shrink.run,
    "longctx": longctx.run,
}


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

    lineage: Lineage
    log: RunLog
    device: torch.device
    before: str | None = None  # the stage that it ends at, without running it
    _heldout: list[Batch] | None = None

    @property
    def recipe(self) -> Recipe:
        """The settings of all stages."""
        return self.lineage.recipe

    @property
    def shelf(self) -> Shelf:
        """Where the students lie."""
        return self.lineage.shelf

    @property
    def records(self) -> dict[str, StageRecord]:
        """How far each stage is."""
        return self.lineage.records

    @property
    def stages(self) -> list[str]:
        """Those that are to run, in order."""
        stages = self.recipe.stages
        return stages if self.before is None else stages[: stages.index(self.before)]

    def run(self) -> PipelineResult:
        """All stages that are not finished; then the student is saved and the table is shown."""
        student = None
        if self.records[START].finished:
            self.lineage.claim()
        else:
            student = self._start()
        for stage in self.stages:
            if self.records[stage].finished:
                self.log.say(f"{stage}: finished before, skipped")
                self.shelf.clear_checkpoints(stage)
                student = None
            else:
                if self.lineage.converts(stage):
                    student = None  # it was the origin, unconverted
                student = self._run_stage(stage, student or self.lineage.student_before(stage))
        last = [START, *self.stages][-1]
        student = student or self.lineage.student_after(last)
        self._keep_final(last, student)
        rows = [summary.row(self.records[name]) for name in (START, *self.stages)]
        summary.show(self.log, rows)
        kept = [i for i in range(len(student.model.layers)) if not is_converted(student, i)]
        return PipelineResult(student, self.shelf.final, rows, kept, self.lineage.precision)

    def inputs(self, stage: str, student: LT2ForCausalLM) -> StageInputs:
        """What a stage reads, the student that it starts from among it."""
        return StageInputs(
            teacher=self.lineage.teacher_of(stage),
            recipe=self.recipe,
            student=student,
            tokenizer=self.lineage.teacher.tokenizer,
            log=self.log,
            precision=self.lineage.precision,
            device=self.device,
            seed=self.recipe.seed + 1 + _SEEDS.index(stage),
        )

    def _start(self) -> LT2ForCausalLM:
        """Score the student as it comes from the teacher's weights.

        Whatever would refuse the run comes first, then the folder is claimed.
        """
        began = time.perf_counter()
        self.lineage.check_text()
        self._rows()
        student = self.lineage.initial_student()
        self.lineage.claim()
        if dropped := self.lineage.dropped():
            self.log.say(f"start: layers of the teacher that are left out: {runs(dropped)}")
        self._finish(self.records[START], student, {"tokens": 0, "seconds": 0.0}, began)
        return student

    def _run_stage(self, stage: str, student: LT2ForCausalLM) -> LT2ForCausalLM:
        """One stage from ``student`` to the next one, saved and scored."""
        record, folder = self.records[stage], self.shelf.folder(stage)
        record.status, record.versions = "running", versions()
        if is_main_process():
            record.write(folder)
        began = time.perf_counter()
        inputs = self.inputs(stage, student)
        with saying_what_is_kept(stage, folder):
            result = RUN_STAGE[stage](getattr(self.recipe, stage), inputs, folder)
        del inputs, student
        if stage == "select":
            student = self.lineage.hybrid(result.student)
        else:
            student = result.student.float().eval().requires_grad_(False)
            if is_main_process():
                self.shelf.save(student, stage, self.lineage.provenance(stage))
            wait_for_everyone()
        self._finish(record, student, result.facts, began)
        self.shelf.clear_checkpoints(stage)
        if stage in ("shrink", "longctx"):
            self.shelf.drop([name for name in ("logits", "shrink") if name != stage])
        return student

    def _finish(
        self, record: StageRecord, student: LT2ForCausalLM, facts: dict[str, Any], began: float
    ) -> None:
        """Score the student on held-out text and mark the stage as finished."""
        teacher = self.lineage.teacher.model
        record.scores = heldout_scores(
            teacher, student, self._rows(), precision=self.lineage.precision
        )
        record.scored_with = summary.scoring(self.recipe)
        record.facts |= facts | {"wall_seconds": time.perf_counter() - began}
        record.status, record.versions = "finished", versions()
        if is_main_process():
            record.write(self.shelf.folder(record.stage))
        wait_for_everyone()
        before = [r for r in self.records.values() if r.finished and r is not record]
        self.log.say(summary.after_stage(record, before[-1] if before else None))

    def _rows(self) -> list[Batch]:
        """The fixed held-out rows, read once."""
        if self._heldout is None:
            tokenizer = self.lineage.teacher.tokenizer
            self._heldout = heldout_rows(self.recipe.data, tokenizer, self.recipe.eval)
        return self._heldout

    def _keep_final(self, last: str, student: LT2ForCausalLM) -> None:
        """Save the result unless it is there, or that of a later stage of the same run is."""
        names = [START, *STAGES]
        later = [read_record(self.shelf.folder(name)) for name in names[names.index(last) + 1 :]]
        hashes = {fingerprint(record.depends_on) for record in later if record and record.finished}
        wanted = hashes | {fingerprint(self.records[last].depends_on)}
        if is_main_process() and self.shelf.final_hash() not in wanted:
            self.shelf.save_final(student, self.lineage.provenance(last))
        wait_for_everyone()
        self.shelf.drop(self.stages)


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
        UserError: the folder holds a run of another teacher, recipe, text or setting, or another
            call is at work in it; the disk refuses; the teacher has no tokenizer, or is a student
            that this recipe does not take; or a stage finds a mistake.
    """
    run_dir = Path(run_dir)
    with working_in(run_dir):
        return _opened(recipe, teacher, run_dir, log, device, precision).run()


def inputs_of(
    stage: str,
    recipe: Recipe,
    teacher: Teacher,
    run_dir: Path | str,
    log: RunLog,
    *,
    device: torch.device | str | None = None,
    precision: str = "auto",
) -> StageInputs:
    """What a stage of a run would read: the stages before it run, or are found finished.

    Args:
        stage: one of the recipe's.

    Raises:
        UserError: as ``run``.
    """
    run_dir = Path(run_dir)
    with working_in(run_dir):
        pipeline = _opened(recipe, teacher, run_dir, log, device, precision)
        pipeline.before = stage
        pipeline.run()
        return pipeline.inputs(stage, pipeline.lineage.student_before(stage))


def _opened(
    recipe: Recipe,
    teacher: Teacher,
    run_dir: Path,
    log: RunLog,
    device: torch.device | str | None,
    precision: str,
) -> Pipeline:
    """The run in a folder, once it is known to be the same one."""
    device = torch.device(device) if device is not None else teacher.model.device
    if teacher.tokenizer is None:
        raise UserError(f"teacher {teacher.name} has no tokenizer; text cannot be tokenised")
    inherited(recipe, teacher.name, teacher.model.config)  # or refused
    join_processes(device)
    if compilation.choose(recipe.runtime.compile, device, compilation.LEAST_STEPS).compiled:
        compilation.importing()  # while the run is set up
    if precision == "auto":
        precision, _ = precision_of_run(device, run_dir)
    lineage = Lineage(recipe, teacher, Shelf(run_dir, teacher.tokenizer, device), precision)
    lineage.check()
    return Pipeline(lineage, log, device)
