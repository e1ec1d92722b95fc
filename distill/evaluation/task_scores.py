"""lm-eval's results as plain numbers, with what guessing reaches, and recovery of the teacher's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ltconvert.distill.evaluation.statistics import recovery

GUESSED = ("acc", "acc_norm", "acc_bytes")  # metrics whose value under guessing is 1 / choices
NEVER_GUESSED = ("exact_match", "em", "f1")  # metrics in [0, 1] that guessing leaves at 0

Scores = dict[str, Any]


def summarise(results: dict[str, Any]) -> Scores:
    """lm-eval's results in the form of ``ltconvert.distill.evaluation.lm_eval.run_tasks``."""
    guesses = {name: _guess(name, results) for name in results["configs"]}
    counts = {name: len(_documents(results, name)) for name in results["configs"]}
    members = {
        k: children for k, children in (results.get("group_subtasks") or {}).items() if children
    }
    found = {}
    for name, values in results["results"].items():
        leaves = _leaves(name, members)
        guess = [g for leaf in leaves if (g := guesses.get(leaf)) is not None]
        higher = (results.get("higher_is_better") or {}).get(name) or {}
        metrics = {
            metric: {
                "value": value,
                "stderr": stderr,
                "higher_is_better": higher.get(metric.split(",")[0]),
                "random": _random(metric.split(",")[0], guess),
            }
            for metric, (value, stderr) in _metrics(values).items()
        }
        if metrics:
            samples = sum(counts.get(leaf, 0) for leaf in leaves)
            found[name] = {"metrics": metrics, "samples": samples, "group": name in members}
    return found


def compare(teacher: Scores | None, student: Scores) -> list[dict[str, Any]]:
    """One row a task and metric: both scores, the random guess, recovery, with standard errors.

    Recovery is given for accuracies and exact matches, where the teacher is above guessing.
    """
    rows = []
    for task, scores in student.items():
        for metric, own in scores["metrics"].items():
            other = ((teacher or {}).get(task) or {"metrics": {}})["metrics"].get(metric)
            other = other or {"value": None, "stderr": None}
            share: tuple[float | None, float | None] = (None, None)
            if other["value"] is not None and own["random"] is not None:
                errors = own["stderr"], other["stderr"]
                share = recovery(own["value"], other["value"], own["random"], *errors)
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "group": scores["group"],
                    "samples": scores["samples"],
                    "random": own["random"],
                    "teacher": other["value"],
                    "teacher_stderr": other["stderr"],
                    "student": own["value"],
                    "student_stderr": own["stderr"],
                    "recovery": share[0],
                    "recovery_stderr": share[1],
                }
            )
    return rows


def _leaves(name: str, members: dict[str, list[str]]) -> list[str]:
    """The tasks of a group, groups inside it resolved; a task is its own."""
    if name not in members:
        return [name]
    return [leaf for child in members[name] for leaf in _leaves(child, members)]


def _metrics(values: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """``{metric: (value, stderr)}``; the filter "none" is left out of the name."""
    found = {}
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not _is_number(value):
            continue
        stderr: Any = values.get(f"{metric}_stderr,{filter_name}")
        shown = metric if filter_name == "none" else key
        found[shown] = (float(value), float(stderr) if _is_number(stderr) else None)
    return found


def _is_number(value: Any) -> bool:
    """lm-eval writes "N/A" where it has no standard error."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _documents(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """One sample a document (lm-eval lists one a filter)."""
    samples = (results.get("samples") or {}).get(task, [])
    return list({sample["doc_id"]: sample for sample in samples}.values())


def _guess(task: str, results: dict[str, Any]) -> float | None:
    """Expected accuracy of guessing: mean of 1 / choices, or 0 where an answer is free text."""
    config = results["configs"][task]
    kind = config.get("output_type")
    if kind in ("loglikelihood", "generate_until"):
        return 0.0
    documents = _documents(results, task)
    if kind != "multiple_choice" or not documents:
        return None
    metrics = {metric.get("metric") for metric in config.get("metric_list") or [{}]}
    # acc_mutual_info scores every choice a second time, without the context.
    repeats = 2 if "acc_mutual_info" in metrics else 1
    return float(np.mean([repeats / len(sample["resps"]) for sample in documents]))


def _random(metric: str, guesses: list[float]) -> float | None:
    """What guessing reaches in a metric of a task, or of a group of tasks."""
    if metric in GUESSED and guesses:
        return float(np.mean(guesses))
    return 0.0 if metric in NEVER_GUESSED else None
