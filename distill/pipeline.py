"""All stages in order: finished ones are skipped, a partial one goes on, a changed one is refused.

A run folder::

    run.json               whose run this is: teacher, recipe, precision
    recipe.resolved.yaml   every setting, defaults written out
    metrics.jsonl          one line a logged step
    stages/<stage>/        stage.json, while it trains checkpoint/, then student/ or selection.json
    student/               the result, with provenance.json

What stays when all is done: ``student/`` and the aligned student (selection can be repeated from
it). Checkpoints go when their stage has finished, a later stage's student when the next one has.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.convert.checkpoint import load_student, read_provenance, save_student
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.convert.transfer import build_student, restore_full, student_options
from ltconvert.distill import align, logits, longctx, select, summary
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
    read_record,
    versions,
    wait_for_everyone,
)
from ltconvert.distill.resume import CHECKPOINT
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.ranking import count_full_layers
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.stage import SELECTION_FILE, STUDENT_FOLDER, StageInputs, StageResult
from ltconvert.errors import UserError
from ltconvert.recipes.schema import Recipe

STAGES: dict[str, Callable[[Any, StageInputs, Path], StageResult]] = {
    "align": align.run,
    "select": select.run,
    "logits": logits.run,
    "longctx": longctx.run,
}
START = "start"
EVAL_ROWS_TOKENS = 4096  # tokens of a forward pass while scoring


@dataclass
class PipelineResult:
    """What a run leaves.

    Attributes:
        student: the final student, in eval mode on the run's device.
        student_dir: where it is saved.
        rows: one a stage: ``stage``, ``kl``, ``student_ppl``, ``teacher_ppl``, ``tokens``, ``minutes``.
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
    run_dir: Path
    log: RunLog
    device: torch.device
    precision: str
    records: dict[str, StageRecord] = field(default_factory=dict)
    _heldout: list[Batch] | None = None

    @property
    def num_layers(self) -> int:
        """Physical layers of the teacher."""
        return self.teacher.spec.num_layers

    @property
    def planned(self) -> list[str]:
        """Stages that this recipe runs, in order."""
        converts = self.recipe.student.mixer != "full"
        wanted = [name for name in STAGES if getattr(self.recipe, name).enabled]
        return [name for name in wanted if converts or name not in ("align", "select")]

    def folder(self, stage: str) -> Path:
        """Where a stage keeps its files."""
        return self.run_dir / "stages" / stage

    def check(self) -> None:
        """Read all records; refuse before any work when one belongs to another run.

        Raises:
            UserError: names what differs.
        """
        check_owner(self.run_dir, self.recipe, self.teacher, self.precision)
        for stage, depends_on in chain(self.recipe, self.teacher, self.precision, self.planned).items():
            record = read_record(self.folder(stage)) or StageRecord(stage, "new", depends_on)
            check_same_run(self.run_dir, stage, record.depends_on, depends_on)
            self.records[stage] = record
        self._check_selection()

    def _check_selection(self) -> None:
        layers = self.recipe.student.full_layers
        open_choice = 0 < count_full_layers(layers, self.num_layers) < self.num_layers
        if open_choice and not isinstance(layers, list) and not self.recipe.select.enabled:
            raise UserError(
                f"student.full_layers = {layers} leaves the choice to the stage select, which is disabled: "
                "list the layers (student.full_layers=[0,4]) or set select.enabled=true"
            )

    def run(self) -> PipelineResult:
        """All stages that are not finished; then the student is saved and the table is shown."""
        student = self._start()
        for stage in self.planned:
            if self.records[stage].finished:
                self.log.say(f"{stage}: finished before, skipped")
                student = None
            else:
                student = self._run_stage(stage, student or self._student_before(stage))
        last = [START, *self.planned][-1]
        student = self._save_final(last, student)
        rows = self.rows()
        summary.show(self.log, rows)
        return PipelineResult(
            student, self.run_dir / STUDENT_FOLDER, rows, self._kept_layers(student), self.precision
        )

    def _start(self) -> LT2ForCausalLM | None:
        """Score the student as it comes from the teacher's weights."""
        record = self.records[START]
        if record.finished:
            return None
        began = time.perf_counter()
        student = self._initial_student()
        self._finish(record, student, {"tokens": 0, "seconds": 0.0}, began)
        return student

    def _initial_student(self) -> LT2ForCausalLM:
        """Every layer converted but those that the recipe lists; tensors shared with the teacher."""
        settings = self.recipe.student
        listed = settings.full_layers if isinstance(settings.full_layers, list) else []
        mixers = ["full" if i in listed else settings.mixer for i in range(self.num_layers)]
        options = student_options(self.teacher.spec, settings.model_dump())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            student = build_student(self.teacher.model, mixers, options, share=True)
        return student.to(self.device).eval().requires_grad_(False)

    def _run_stage(self, stage: str, student: LT2ForCausalLM) -> LT2ForCausalLM:
        record, folder = self.records[stage], self.folder(stage)
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
            run_dir=self.run_dir,
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
            self._save(student, folder / STUDENT_FOLDER, stage)
        self._finish(record, student, result.facts, began)
        self._clean(stage)
        return student

    def _finish(
        self, record: StageRecord, student: LT2ForCausalLM, facts: dict[str, Any], began: float
    ) -> None:
        """Score the student on held-out text and mark the stage as finished."""
        teacher = self.teacher.model
        record.scores = heldout_scores(teacher, student, self.heldout(), precision=self.precision)
        record.scored_with = summary.scoring(self.recipe)
        record.facts = facts | {"wall_seconds": time.perf_counter() - began}
        record.status, record.versions = "finished", versions()
        if is_main_process():
            record.write(self.folder(record.stage))
        wait_for_everyone()
        before = [r for r in self.records.values() if r.finished and r is not record]
        self.log.say(summary.after_stage(record, before[-1] if before else None))

    def heldout(self) -> list[Batch]:
        """The fixed held-out rows, read once."""
        if self._heldout is None:
            length = self.recipe.eval.heldout_seq_len_tokens
            self._heldout = heldout_batches(
                self.recipe.data,
                self.teacher.tokenizer,
                self.recipe.eval.heldout_tokens,
                length,
                max(1, EVAL_ROWS_TOKENS // length),
            )
        return self._heldout

    def _student_before(self, stage: str) -> LT2ForCausalLM:
        """The student that a stage starts from, from what is on disk."""
        earlier = self.planned[: self.planned.index(stage)]
        return self._student_after(earlier[-1] if earlier else START)

    def _student_after(self, stage: str) -> LT2ForCausalLM:
        """What a finished stage left."""
        if stage == START:
            return self._initial_student()
        if stage == "select":
            return self._hybrid(self._student_before("select"))
        folder = self._student_folder(stage)
        return load_student(folder, dtype=torch.float32, device=self.device).requires_grad_(False)

    def _student_folder(self, stage: str) -> Path:
        own, final = self.folder(stage) / STUDENT_FOLDER, self.run_dir / STUDENT_FOLDER
        if own.exists():
            return own
        if read_provenance(final).get("stage_hash") == fingerprint(self.records[stage].depends_on):
            return final
        raise UserError(
            f"stage {stage} has finished, but its student is not in {own}; "
            f"delete {self.folder(stage)} and those of later stages to run it again"
        )

    def _hybrid(self, student: LT2ForCausalLM) -> LT2ForCausalLM:
        """The teacher's attention back in the chosen layers."""
        restore_full(student, self.teacher.model, self._selection() or [])
        return student.eval().requires_grad_(False)

    def _selection(self) -> list[int] | None:
        path = self.folder("select") / SELECTION_FILE
        if "select" in self.planned:
            return Selection.load(path).chosen if path.exists() else None
        layers = self.recipe.student.full_layers
        return layers if isinstance(layers, list) else None

    @staticmethod
    def _kept_layers(student: LT2ForCausalLM) -> list[int]:
        return [i for i, kind in enumerate(student.config.mixers) if kind == "full"]

    def _save(self, student: LT2ForCausalLM, folder: Path, stage: str) -> None:
        if is_main_process():
            save_student(student, self.teacher.tokenizer, folder, self._provenance(stage))
        wait_for_everyone()

    def _save_final(self, last: str, student: LT2ForCausalLM | None) -> LT2ForCausalLM:
        """Save the last stage's student as the run's result, unless it is there already."""
        final = self.run_dir / STUDENT_FOLDER
        wanted = fingerprint(self.records[last].depends_on)
        if read_provenance(final).get("stage_hash") != wanted:
            student = student or self._student_after(last)
            self._save(student, final, last)
        if is_main_process():
            for stage in self.planned:
                if stage != "align":
                    shutil.rmtree(self.folder(stage) / STUDENT_FOLDER, ignore_errors=True)
        return student or load_student(final, dtype=torch.float32, device=self.device)

    def _clean(self, stage: str) -> None:
        """Delete what nobody needs once a stage has finished."""
        if not is_main_process():
            return
        for checkpoint in self.folder(stage).glob(f"**/{CHECKPOINT}*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
        if stage == "longctx":
            shutil.rmtree(self.folder("logits") / STUDENT_FOLDER, ignore_errors=True)

    def _provenance(self, stage: str) -> dict[str, Any]:
        teacher = self.teacher
        return {
            "teacher": {
                "name": teacher.name,
                "source": teacher.source,
                "revision": teacher.revision,
                "digest": teacher.digest,
            },
            "recipe": self.recipe.model_dump(mode="json"),
            "recipe_hash": fingerprint(self.recipe.model_dump(mode="json")),
            "stage": stage,
            "stage_hash": fingerprint(self.records[stage].depends_on),
            "selection": self._selection(),
            "stages": {name: r.history() for name, r in self.records.items() if r.finished},
            "precision": self.precision,
            "versions": versions(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """The table's rows, stages that have finished."""
        return [summary.row(record) for record in self.records.values() if record.finished]


def run(
    recipe: Recipe,
    teacher: Teacher,
    run_dir: Path | str,
    log: RunLog,
    *,
    device: torch.device | str | None = None,
    precision: str = "auto",
) -> PipelineResult:
    """Convert a teacher by a recipe; the same call after a crash goes on where the last one stopped.

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
        raise UserError(f"teacher {teacher.name} comes without a tokenizer; text cannot be tokenised")
    with clear_disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        if precision == "auto":
            precision = recorded_precision(run_dir) or pick_precision(device)[0]
        pipeline = Pipeline(recipe, teacher, run_dir, log, device, precision)
        pipeline.check()
        if is_main_process():
            (run_dir / "recipe.resolved.yaml").write_text(recipes.dump(recipe), encoding="utf-8")
        return pipeline.run()
