"""The cases of a selection study: one aligned student, and from there a run a case."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from os import link
from pathlib import Path
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.distill import pipeline
from ltconvert.distill.evaluation.recall import recall_scores
from ltconvert.distill.lineage import START, Lineage
from ltconvert.distill.planning.rows import ENOUGH_TOKENS
from ltconvert.distill.records import StageRecord, write_json
from ltconvert.distill.run_identity import RUN_FILE
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.ranking import count_full_layers, order
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.shelf import Shelf
from ltconvert.distill.stage import SELECTION_FILE, STUDENT_FOLDER
from ltconvert.recipes.schema import Recipe

EVERY_SHARE = ("uniform", "kl-gates")  # their order is another one for another number of layers


@dataclass(frozen=True)
class Study:
    """What all cases share; ``base`` is the run folder that they set out from."""

    recipe: Recipe
    teacher: Teacher
    out: Path
    precision: str

    @property
    def base(self) -> Path:
        """The run that ends after `align`."""
        return self.out / "aligned"

    @property
    def device(self) -> torch.device:
        """Where the teacher is."""
        return self.teacher.model.device

    def run(self, recipe: Recipe, folder: Path) -> Lineage:
        """The pipeline in a folder; what it left, to be read."""
        log = RunLog(folder, json=True)  # stdout is for the table
        at = {"device": self.device, "precision": self.precision}
        pipeline.run(recipe, self.teacher, folder, log, **at)
        log.close()
        shelf = Shelf(folder, self.teacher.tokenizer, self.device)
        lineage = Lineage(recipe, self.teacher, shelf, self.precision)
        lineage.check()
        return lineage

    def recall(self, model: LT2ForCausalLM) -> dict[str, Any]:
        """Of one number hidden in text, by length in tokens."""
        settings, rows = self.recipe.eval, ENOUGH_TOKENS[self.device.type]
        lengths, examples = settings.recall_lengths_tokens, settings.recall_examples
        at = {"seed": self.recipe.seed, "precision": self.precision, "batch_tokens": rows}
        tokenizer = self.teacher.tokenizer
        return recall_scores(model, tokenizer, lengths, examples, kinds=["needle"], **at)["needle"]


def measure(study: Study, method: str, share: float, largest: float) -> None:
    """One case, unless it is on disk: the pipeline from the aligned student on, then recall."""
    folder = _folder(study, method, share)
    result = folder.with_name(f"{folder.name}.json")
    if not result.exists():
        _set_out(study.base, folder)
        if share < largest and method not in EVERY_SHARE:
            _take_first(Selection.load(_choice(_folder(study, method, largest))), share, folder)
        name, _, direction = method.partition(":")
        select = {"method": name} | ({"direction": direction} if direction else {})
        changes = {"student": {"full_layers": share}, "select": select}
        lineage = study.run(recipes.adjust(study.recipe, options=changes), folder)
        selection = Selection.load(_choice(folder))
        after = {
            stage: scores_of(lineage.records[stage])
            | {"recall": study.recall(lineage.student_after(stage))}
            for stage in ("select", "logits")
        }
        found = {"method": method, "share": share, "layers": selection.chosen, "after": after}
        found |= {"order": selection.ranking, "cost": vars(selection.cost)}
        write_json(result, found | {"chosen_for": share if method in EVERY_SHARE else largest})
    for heavy in (folder / STUDENT_FOLDER, folder / "stages" / "align" / STUDENT_FOLDER):
        shutil.rmtree(heavy, ignore_errors=True)


def first_of(selection: Selection, count: int) -> list[int]:
    """The best ``count`` layers of an order that was found for more of them.

    A greedy pick depends on those before it, not on those after. A layer's own score depends on no
    other layer; ``kl`` gives up layers that cannot be among the larger set, so those of the smaller
    one were trained to the end. How much text is read until a set has settled is up to the larger.
    """
    chosen = selection.ranking[:count]
    if selection.method.endswith("-greedy"):
        assert selection.history[count - 1] == sorted(chosen), "a later pick changed earlier ones"
        return sorted(chosen)
    sign = 1.0 if selection.higher_is_better else -1.0
    worth = order([sign * score for score in selection.scores[str(selection.main)]])
    whole = selection.scores.get("trained_share", [1.0] * selection.num_layers)
    assert chosen == [x for x in worth if whole[x] == 1.0][:count], "not in the order of the scores"
    return sorted(chosen)


def _take_first(larger: Selection, share: float, folder: Path) -> None:
    """Lay down the smaller choice where the stage `select` finds it as its own."""
    count = count_full_layers(share, larger.num_layers)
    settings = larger.settings | {"full_layers": share}
    chosen = first_of(larger, count)
    replace(larger, keep=count, chosen=chosen, settings=settings).save(_choice(folder))


def _set_out(base: Path, folder: Path) -> None:
    """A run folder that has the start and `align` behind it; ``run.json`` comes last."""
    if (folder / RUN_FILE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    for stage in (START, "align"):
        into = folder / "stages" / stage
        shutil.copytree(base / "stages" / stage, into, copy_function=link)
    shutil.copy(base / RUN_FILE, folder / RUN_FILE)


def _folder(study: Study, method: str, share: float) -> Path:
    return study.out / "cases" / f"{method.replace(':', '-')}-{share:g}"


def _choice(folder: Path) -> Path:
    return folder / "stages" / "select" / SELECTION_FILE


def scores_of(record: StageRecord) -> dict[str, Any]:
    """What the pipeline measured on held-out text after a stage, without its fine print."""
    names = ("kl", "kl_stderr", "student_ppl", "teacher_ppl", "agreement", "tokens")
    return {name: record.scores[name] for name in names}
