"""Stage `select`: which physical layers keep full attention.

Reads the student whose layers have all been converted and aligned, ranks its physical layers (a
looped layer is judged with all its loops) and writes ``selection.json``, which the next stage
reads. The student itself is passed on as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltconvert.distill.data import Batch, PackedStream
from ltconvert.distill.logits import frozen_copy
from ltconvert.distill.processes import all_values, is_main_process, wait_for_everyone
from ltconvert.distill.run_lock import working_in
from ltconvert.distill.selection import kl_fast, kl_gates, kl_greedy, kl_trained, recall
from ltconvert.distill.selection.cost import batch_shape
from ltconvert.distill.selection.partial import Progress, in_words_of
from ltconvert.distill.selection.per_loop import (
    PER_LOOP_FILE,
    PER_LOOP_FOLDER,
    VisitScores,
    rank_visits,
)
from ltconvert.distill.selection.probe import Probe
from ltconvert.distill.selection.ranking import count_full_layers, listed_layers
from ltconvert.distill.selection.render import render_selection
from ltconvert.distill.selection.result import Scores, Selection
from ltconvert.distill.selection.simple import given, uniform_layers
from ltconvert.distill.stage import SELECTION_FILE, StageInputs, StageResult
from ltconvert.errors import UserError
from ltconvert.recipes.stages import SelectSettings

__all__ = ["METHODS", "SELECTION_FILE", "Selection", "render_selection", "run"]

METHODS: dict[str, Callable[[Probe], Scores]] = {
    "kl": kl_trained.rank,
    "kl-fast": kl_fast.rank,
    "kl-greedy": kl_greedy.rank,
    "kl-gates": kl_gates.rank,
    "recall": recall.rank,
    "recall-greedy": kl_greedy.rank,
}
PARTIAL_FILE = "selection.partial.json"


def run(settings: SelectSettings, inputs: StageInputs, stage_dir: Path) -> StageResult:
    """Choose the layers and write ``selection.json``; a killed call goes on where it stopped.

    Raises:
        UserError: ``student.full_layers`` does not fit the teacher or the method.
    """
    path = stage_dir / SELECTION_FILE
    wanted = identity(settings, inputs)
    selection = _finished(path, wanted)
    wait_for_everyone()  # all have looked before one writes
    if selection is None:
        # GPUs that differ may rank close layers differently.
        selection = all_values(choose(settings, inputs, stage_dir))[0]
        selection.settings = wanted
        if is_main_process():
            selection.save(path)
    if is_main_process():
        Progress(stage_dir / PARTIAL_FILE, {}).clear()  # also what a kill between the two has left
    wait_for_everyone()
    chosen = ", ".join(map(str, selection.chosen)) or "none"
    inputs.log.say(f"select: {selection.keep} of {selection.num_layers} layers stay full: {chosen}")
    facts = {
        "tokens": selection.cost.tokens + selection.cost.trained_tokens,
        "forwards": selection.cost.forwards,
        "seconds": selection.cost.seconds,
        "method": selection.method,
        "chosen": selection.chosen,
    }
    return StageResult(inputs.student, facts=facts)


def identity(settings: SelectSettings, inputs: StageInputs) -> dict[str, Any]:
    """All that the choice depends on and that can change under the same folder."""
    return {
        "select": settings.model_dump(mode="json", exclude={"enabled"}),
        "full_layers": inputs.recipe.student.full_layers,
        "data": inputs.text,
        "teacher": inputs.teacher.digest,
        "precision": inputs.precision,
        "seed": inputs.seed,
    }


def choose(settings: SelectSettings, inputs: StageInputs, stage_dir: Path) -> Selection:
    """Rank the layers by the recipe's method, or take the choice that needs no scores."""
    num_layers = inputs.teacher.spec.num_layers
    layers = inputs.recipe.student.full(num_layers)
    keep = count_full_layers(layers, num_layers)
    method, scores = settings.method, without_scores(settings, layers, keep, num_layers)
    if scores is None:
        scores = METHODS[method](make_probe(settings, inputs, stage_dir, keep))
    elif isinstance(layers, list):
        method = "list"
    return Selection(
        method=method,
        direction=settings.direction if method == "kl-fast" else None,
        num_layers=num_layers,
        loops=inputs.teacher.spec.num_loops,
        keep=keep,
        chosen=sorted(scores.ranking[:keep]),
        ranking=scores.ranking,
        main=scores.main,
        higher_is_better=scores.higher_is_better,
        scores=scores.columns,
        history=scores.history,
        stopped_early=scores.stopped_early,
        facts=scores.facts,
        cost=scores.cost,
    )


def without_scores(
    settings: SelectSettings, layers: int | float | list[int], keep: int, num_layers: int
) -> Scores | None:
    """The choice where there is nothing to measure: a list, none, all, or evenly spaced layers.

    Raises:
        UserError: the method is ``list`` and the recipe lists no layers.
    """
    if isinstance(layers, list):
        return given(listed_layers(layers, num_layers), num_layers)
    if settings.method == "list":
        raise UserError(
            f"select.method is list, but student.full_layers is {layers}; "
            "name the layers, for example --set student.full_layers=[0,4]"
        )
    if settings.method == "uniform" or keep in (0, num_layers):
        return given(uniform_layers(keep, num_layers), num_layers)
    return None


def per_loop(inputs: StageInputs, run_dir: Path) -> VisitScores:
    """Score every visit of a looped layer and write ``per_loop/per_loop.json``; resumes by itself.

    Args:
        inputs: as those of the stage, the student with all layers linear.

    Raises:
        UserError: the student does not loop, or another call is at work in the folder.
    """
    loops = inputs.student.config.num_loops
    if loops == 1:
        raise UserError("the student has one loop, so there is nothing to compare by loop")
    with working_in(run_dir):
        return _scored_visits(inputs, run_dir)


def _scored_visits(inputs: StageInputs, run_dir: Path) -> VisitScores:
    """Of a student with loops."""
    settings = inputs.recipe.select.model_copy(update={"method": "kl-fast"})
    num_layers = inputs.teacher.spec.num_layers
    keep = count_full_layers(inputs.recipe.student.full(num_layers), num_layers)
    folder = run_dir / PER_LOOP_FOLDER
    probe = make_probe(settings, inputs, folder, keep)
    scores = rank_visits(probe)
    if is_main_process():
        scores.save(folder / PER_LOOP_FILE)
    return scores


def make_probe(settings: SelectSettings, inputs: StageInputs, stage_dir: Path, keep: int) -> Probe:
    """What the method works with."""
    teacher, student = inputs.teacher.model, inputs.student
    if inputs.precision == "bf16":
        teacher, student = (frozen_copy(model, torch.bfloat16) for model in (teacher, student))
    probe = Probe(
        teacher=teacher,
        student=student,
        keep=keep,
        settings=settings,
        batches=read_batches(settings, inputs),
        progress=Progress(stage_dir / PARTIAL_FILE, identity(settings, inputs)),
        stage_dir=stage_dir,
        inputs=inputs,
    )
    wait_for_everyone()  # all have read the partial scores before one writes some
    return probe


def read_batches(settings: SelectSettings, inputs: StageInputs) -> list[Batch]:
    """``eval_tokens`` tokens of the training split, or retrieval examples.

    The same in every call and every process.
    """
    if settings.method in ("recall", "kl-gates"):
        return []
    if settings.method == "recall-greedy":
        examples = recall.draw(settings, inputs.tokenizer, inputs.seed)
        return [recall.as_batch(batch) for batch in examples]
    rows, batches = batch_shape(settings)
    stream = PackedStream(
        inputs.recipe.data,
        inputs.tokenizer,
        split="train",
        seq_len_tokens=settings.seq_len_tokens,
        rows=rows,
        seed=inputs.seed,
        rank=0,  # not this process's share: all have to rank and train the same layers
        world=1,
    )
    return [next(stream) for _ in range(batches)]


def _finished(path: Path, wanted: dict[str, Any]) -> Selection | None:
    """The selection on disk when it is the one that is wanted."""
    if not path.exists():
        return None
    selection = Selection.load(path)
    then = selection.settings
    return selection if then == in_words_of(then, wanted) else None
