"""Everything that is measured of a teacher, a student, or both side by side: ``evaluation.json``.

Parts, each written when it is done and not measured again as long as nothing it depends on changes:

- ``heldout``: KL to the teacher, perplexity and agreement on held-out text
- ``recall``: a hidden number by length and depth, see ``ltconvert.distill.evaluation.recall``
- ``generation``: greedy continuations against the teacher's
- ``decode``: time of a token and bytes of the cache by context
- ``loops``: where asked for, ways to decode a looped model that do with less
- ``depth``: of students with mixture-of-depths attention, what it gives to depth
- ``routing``: of Dreamer students, what depths use of the pools, and where depth attention looks
- ``tasks``: lm-eval
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher, digest
from ltconvert.distill.data import as_recorded
from ltconvert.distill.evaluation.lm_eval import quiet
from ltconvert.distill.evaluation.parts import PARTS, Evaluation, Part
from ltconvert.distill.evaluation.recall import KINDS, retrieval_examples
from ltconvert.distill.evaluation.scores import describe
from ltconvert.distill.evaluation.task_content import own_content
from ltconvert.distill.evaluation.task_files import check_tasks
from ltconvert.distill.processes import is_main_process
from ltconvert.distill.records import versions, write_json
from ltconvert.distill.run_lock import working_in
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.distill.runlog import RunLog
    from ltconvert.recipes.data import DataSettings
    from ltconvert.recipes.evaluation import EvalSettings
    from ltconvert.recipes.schema import Recipe

EVALUATION_FILE = "evaluation.json"


def evaluate(
    teacher: Teacher | None,
    student: LT2ForCausalLM | None,
    tokenizer: Any,
    settings: EvalSettings,
    *,
    data: DataSettings,
    folder: Path,
    log: RunLog,
    precision: str = "fp32",
    seed: int = 0,
    include_path: Path | None = None,
    student_source: str | None = None,
    parts: Sequence[str] = tuple(PARTS),
) -> dict[str, Any]:
    """Measure what is asked for and write ``<folder>/evaluation.json``; finished parts are kept.

    Args:
        teacher, student: on one device; either may be missing.
        data: where the held-out text is.
        include_path: a folder with the user's own lm-eval tasks.
        student_source: where the student lies, to be noted.
        parts: names out of ``PARTS``.

    Returns:
        The content of the file: ``models`` (name, digest, layer map, parameters), ``precision``,
        ``versions``, ``parts`` (the results; None where there is nothing to measure), ``seconds``
        and ``depends_on`` a part.

    Raises:
        UserError: no model, an unknown part, a mistake that a part finds, or another call at work
            in the folder.
    """
    models = {"teacher": teacher.model if teacher else None, "student": student}
    job = Evaluation(
        {who: model for who, model in models.items() if model is not None},
        tokenizer,
        settings,
        data,
        log,
        precision,
        seed,
        include_path,
    )
    if not job.models:
        raise UserError("nothing to evaluate: give a teacher, a student, or both")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise UserError(f"unknown part {unknown[0]!r} of an evaluation; parts: {', '.join(PARTS)}")
    _check(job, parts)
    facts = {who: model_facts(model) for who, model in job.models.items()}
    if teacher is not None:
        facts["teacher"] |= {
            "name": teacher.name,
            "source": teacher.source,
            "revision": teacher.revision,
            "remarks": list(teacher.remarks),
        }
    if student_source is not None:
        facts["student"]["source"] = student_source
    with working_in(folder):
        return _measure(job, facts, folder, parts)


def _check(job: Evaluation, parts: Sequence[str]) -> None:
    """Find mistakes in the settings of later parts before the first part runs."""
    if "recall" in parts:
        check_recall(job.tokenizer, job.settings, job.seed)
    if "loops" in parts:
        for way in job.ways():
            way.check(job.models.get("student") or job.models["teacher"])
    if "tasks" in parts:
        with quiet():
            check_tasks(job.settings.tasks, job.include_path)


def check_recall(tokenizer: Any, settings: EvalSettings, seed: int) -> None:
    """Make an example of each length.

    Raises:
        UserError: a length that holds none with this tokenizer.
    """
    for kind, length in itertools.product(KINDS, settings.recall_lengths_tokens):
        retrieval_examples(tokenizer, length, 1, seed, kind)


def _measure(
    job: Evaluation, facts: dict[str, Any], folder: Path, parts: Sequence[str]
) -> dict[str, Any]:
    path = folder / EVALUATION_FILE
    before = read_evaluation(folder) or {}
    whole = {"parts": {}, "seconds": {}, "depends_on": {}} | before
    whole |= {"models": facts, "precision": job.precision, "versions": versions()}
    needs = {
        name: _depends_on(job, facts, PARTS[name], whole["depends_on"].get(name, {}))
        for name in PARTS
        if name in parts or name in whole["parts"]
    }
    other = _computes_otherwise(before.get("models") or {}, facts)
    for name in list(whole["parts"]):
        if other or whole["depends_on"].get(name) != needs.get(name):
            for section in ("parts", "seconds", "depends_on"):
                whole[section].pop(name, None)
    for name in parts:
        applies = PARTS[name].applies(job)
        if name in whole["parts"]:
            if applies:
                job.log.say(f"evaluation: {name} measured before, kept")
            continue
        if applies:
            job.log.say(f"evaluation: {name} ...")
        began = time.perf_counter()
        whole["parts"][name] = PARTS[name].measure(job) if applies else None
        whole["seconds"][name] = time.perf_counter() - began
        whole["depends_on"][name] = _depends_on(job, facts, PARTS[name], {})
        if name == "heldout":
            job.log.say(describe(whole["parts"][name]))
        if is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, whole)
    return whole


def _computes_otherwise(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a model has the weights of before, perhaps, but reads them in another way."""
    return any(
        then[who].get(name, facts[name]) != facts[name]
        for who, facts in now.items()
        if who in then
        for name in ("mixers", "loops", "window_tokens")
    )


def _depends_on(
    job: Evaluation, facts: dict[str, Any], part: Part, then: dict[str, Any]
) -> dict[str, Any]:
    """What a part's result depends on, as JSON gives it back; ``then``: what an earlier one did."""
    needs: dict[str, Any] = {name: getattr(job.settings, name) for name in part.settings}
    needs |= {who: of_model["digest"] for who, of_model in facts.items()}
    needs |= {"precision": job.precision, "seed": job.seed}
    if part.reads_data:
        needs["data"] = as_recorded(job.text, then.get("data"))
    if "tasks" in part.settings:
        own = own_content(job.settings.tasks, job.include_path) or then.get("own_tasks")
        needs |= {} if own is None else {"own_tasks": own}
        if job.include_path is not None:
            needs["include_path"] = str(job.include_path)
    return json.loads(json.dumps(needs))


def model_facts(model: LT2ForCausalLM) -> dict[str, Any]:
    """Digest of the weights, layer map and size of a model."""
    return {
        "digest": digest(model.state_dict()),
        "mixers": list(model.config.mixers or []),
        "loops": model.config.num_loops,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "window_tokens": model.config.window_tokens,
    }


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """A folder's ``evaluation.json``, or None when there is none.

    Raises:
        UserError: the file is there and cannot be understood.
    """
    path = folder / EVALUATION_FILE
    if not path.exists():
        return None
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(whole["parts"], dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{path} is damaged; delete it to evaluate again") from None
    return whole


def evaluate_run(
    run_dir: Path,
    teacher: Teacher,
    student: LT2ForCausalLM,
    recipe: Recipe,
    log: RunLog,
    *,
    precision: str = "fp32",
    include_path: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a run's student against its teacher, then write report and model card.

    Returns:
        The content of ``evaluation.json``.

    Raises:
        UserError: see ``evaluate``.
    """
    from ltconvert.distill.report import build_report

    with working_in(run_dir):
        found = evaluate(
            teacher,
            student,
            teacher.tokenizer,
            recipe.eval,
            data=recipe.data,
            folder=run_dir,
            log=log,
            precision=precision,
            seed=recipe.seed,
            include_path=include_path,
        )
        if is_main_process():
            for path in build_report(run_dir):
                log.say(f"written: {path}")
    return found
