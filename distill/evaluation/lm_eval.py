"""Benchmarks through lm-eval's own API, on a live model or a saved folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ltconvert.distill.evaluation.statistics import recovery
from ltconvert.distill.evaluation.task_files import load_tasks
from ltconvert.errors import UserError

GUESSED = ("acc", "acc_norm", "acc_bytes")  # metrics whose value under guessing is 1 / choices
NEVER_GUESSED = ("exact_match", "em", "f1")  # metrics in [0, 1] that guessing leaves at 0
BOOTSTRAP_ROUNDS = 100  # only for metrics without a closed form
SEED = 1234  # lm-eval's own default


def run_tasks(
    model: Any,
    tokenizer: Any | None,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Scores of lm-eval tasks.

    Args:
        model: a live model (LT2ForCausalLM or any of transformers' causal models), or a folder, a
            ``.gguf`` file or a name that ``load_teacher`` knows.
        tokenizer: None: the folder's own.
        tasks: names of tasks, groups or tags; ``.yaml`` files; folders of them.
        include_path: a folder whose tasks are known by name.
        limit: documents a task; None for all.
        precision: ``fp32`` or ``bf16``, for matrix products.

    Returns:
        ``{task: {"metrics": {metric: {"value", "stderr", "higher_is_better", "random"}},
        "samples": n, "group": bool}}``; stderr is None where lm-eval has none, random None where
        guessing has no value. A metric's name carries its filter (``exact_match,strict``) unless
        there is only the plain one.

    Raises:
        UserError: see ``ltconvert.distill.evaluation.task_files.load_tasks``.
    """
    if not tasks:
        return {}
    with quiet(), kept_random_state():
        loaded = load_tasks(tasks, include_path)
        model, tokenizer = _resolve(model, tokenizer)
        results = _evaluate(model, tokenizer, loaded, limit, batch_size, precision)
    return summarise(results)


def compare(teacher: dict[str, Any] | None, student: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a task and metric: both scores, the random guess, and recovery, with standard errors.

    Recovery is given for bounded metrics where higher is better (accuracies, exact matches).
    """
    rows = []
    for task, scores in student.items():
        for metric, own in scores["metrics"].items():
            other = ((teacher or {}).get(task) or {"metrics": {}})["metrics"].get(metric)
            row = {"task": task, "metric": metric, "group": scores["group"], "random": own["random"]}
            row |= {"samples": scores["samples"], "student": own["value"], "student_stderr": own["stderr"]}
            row |= {"teacher": None, "teacher_stderr": None, "recovery": None, "recovery_stderr": None}
            if other is not None:
                row |= {"teacher": other["value"], "teacher_stderr": other["stderr"]}
                if own["random"] is not None:
                    row["recovery"], row["recovery_stderr"] = recovery(
                        own["value"], other["value"], own["random"], own["stderr"], other["stderr"]
                    )
            rows.append(row)
    return rows


def _resolve(model: Any, tokenizer: Any | None) -> tuple[Any, Any]:
    if isinstance(model, str | Path):
        from ltconvert.convert.teachers.load import load_teacher

        found = load_teacher(str(model))
        model, tokenizer = found.model, tokenizer or found.tokenizer
    if tokenizer is None:
        raise UserError("lm-eval tasks need a tokenizer, and this model has none")
    return model, tokenizer


def _evaluate(
    model: Any, tokenizer: Any, loaded: list[Any], limit: int | None, batch_size: int, precision: str
) -> dict[str, Any]:
    """lm-eval's results. ``simple_evaluate`` would also look for git, pip and the model's hub entry."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        mixed_precision_dtype="bfloat16" if precision == "bf16" else None,
        softmax_dtype="float32",
        add_bos_token=_starts_with_bos(tokenizer) or None,
    )
    tasks = TaskManager(include_defaults=False).load(loaded)
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return evaluate(
        lm=wrapped, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP_ROUNDS, log_samples=True
    )


def _starts_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts BOS before a text (Gemma, Llama), which lm-eval else leaves out."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's results in the form of ``run_tasks``."""
    guesses = {name: _guess(name, results) for name in results["configs"]}
    counts = {name: len(_documents(results, name)) for name in results["configs"]}
    members = {name: children for name, children in results.get("group_subtasks", {}).items() if children}
    found = {}
    for name, values in results["results"].items():
        leaves = _leaves(name, members)
        metrics = _metrics(values)
        if not metrics:
            continue
        higher = results.get("higher_is_better", {}).get(name) or {}
        guess = [guesses[leaf] for leaf in leaves if guesses.get(leaf) is not None]
        found[name] = {
            "metrics": {
                metric: {
                    "value": value,
                    "stderr": stderr,
                    "higher_is_better": higher.get(metric.split(",")[0]),
                    "random": _random(metric.split(",")[0], guess),
                }
                for metric, (value, stderr) in metrics.items()
            },
            "samples": sum(counts.get(leaf, 0) for leaf in leaves),
            "group": name in members,
        }
    return found


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
        if metric.endswith("_stderr") or not isinstance(value, int | float | np.number) or not filter_name:
            continue
        stderr = values.get(f"{metric}_stderr,{filter_name}")
        shown = metric if filter_name == "none" else key
        found[shown] = (float(value), float(stderr) if _is_number(stderr) else None)
    return found


def _is_number(value: Any) -> bool:
    """lm-eval writes "N/A" where it has no standard error."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _documents(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """One sample a document (there is one a filter in lm-eval's list)."""
    by_id = {sample["doc_id"]: sample for sample in (results.get("samples") or {}).get(task, [])}
    return list(by_id.values())


def _guess(task: str, results: dict[str, Any]) -> float | None:
    """Expected accuracy of guessing: mean of 1 / choices for multiple choice, 0 for exact answers."""
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Only errors and, on a terminal, progress bars: nothing on stdout, which may carry a result."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    seen = sys.stderr if sys.stderr.isatty() else io.StringIO()
    # lm-eval would fork for the bootstrap, which threads of torch do not survive everywhere.
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(seen), contextlib.redirect_stderr(seen):
            yield
    finally:
        os.environ.pop("DISABLE_MULTIPROC")
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """lm-eval seeds everything; afterwards all is as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


