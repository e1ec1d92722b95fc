"""lm-eval's results as plain numbers, with what guessing reaches, and recovery of the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ltconvert.distill.evaluation.statistics import recovery

GUESSED = ("acc", "acc_norm", "acc_bytes")  # metrics whose value under guessing is 1 / choices
NEVER_GUESSED = ("exact_match", "em", "f1")  # metrics of free text that guessing leaves at 0

Scores = dict[str, Any]


def summarise(
    results: dict[str, Any], by_size: Mapping[str, Mapping[str, bool]] | None = None
) -> Scores:
    """lm-eval's results in the form of ``ltconvert.distill.evaluation.lm_eval.run_tasks``.

    Args:
        by_size: ``{group: {metric: whether tasks count by their documents}}``, see ``by_size_of``.
    """
    counts = {name: len(_documents(results, name)) for name in results["configs"]}
    members = {
        k: children for k, children in (results.get("group_subtasks") or {}).items() if children
    }
    found = {}
    for name, values in results["results"].items():
        leaves = _leaves(name, members)
        weighted = (by_size or {}).get(name) or {}
        higher = (results.get("higher_is_better") or {}).get(name) or {}
        metrics = {}
        for metric, (value, stderr) in _metrics(values).items():
            plain = metric.split(",")[0]
            measured = [
                leaf for leaf in leaves if metric in _metrics(results["results"].get(leaf, {}))
            ]
            sizes = [counts.get(leaf, 0) if weighted.get(plain) else 1 for leaf in measured]
            metrics[metric] = {
                "value": value,
                "stderr": stderr,
                "higher_is_better": higher.get(plain),
                "random": _mean([_guess(plain, leaf, results) for leaf in measured], sizes),
            }
        if metrics:
            samples = sum(counts.get(leaf, 0) for leaf in leaves)
            found[name] = {"metrics": metrics, "samples": samples, "group": name in members}
    return found


def by_size_of(groups: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """``by_size`` of lm-eval's groups: its results do not tell how their means were taken."""
    return {
        name: {each.metric: bool(each.weight_by_size) for each in group.aggregate_metric_list or []}
        for name, group in groups.items()
    }


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


def _guess(metric: str, task: str, results: dict[str, Any]) -> float | None:
    """What guessing reaches: mean of 1 / choices, 0 where an answer is free text, None: unknown."""
    config = results["configs"][task]
    kind = config.get("output_type")
    if metric == "exact_match" or (metric in NEVER_GUESSED and kind != "multiple_choice"):
        return 0.0
    if metric not in GUESSED:
        return None
    if kind in ("loglikelihood", "generate_until"):
        return 0.0
    documents = _documents(results, task)
    if kind != "multiple_choice" or not documents:
        return None
    metrics = {each.get("metric") for each in config.get("metric_list") or [{}]}
    # acc_mutual_info scores every choice a second time, without the context.
    repeats = 2 if "acc_mutual_info" in metrics else 1
    return float(np.mean([repeats / len(sample["resps"]) for sample in documents]))


def _mean(guesses: list[float | None], sizes: list[int]) -> float | None:
    """The mean of a task, or of a group's tasks as the group takes it; None where one is."""
    known = [guess for guess in guesses if guess is not None]
    if not known or len(known) < len(guesses) or not sum(sizes):
        return None
    return float(np.average(known, weights=sizes))
