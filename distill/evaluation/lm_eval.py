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

from ltconvert.distill.data.tokens import starts_with_bos
from ltconvert.distill.evaluation.task_files import load_tasks
from ltconvert.distill.evaluation.task_scores import by_size_of, summarise
from ltconvert.errors import UserError

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
        return _evaluate(model, tokenizer, loaded, limit, batch_size, precision)


def _resolve(model: Any, tokenizer: Any | None) -> tuple[Any, Any]:
    if isinstance(model, str | Path):
        from ltconvert.convert.teachers.load import load_teacher

        found = load_teacher(str(model))
        model, tokenizer = found.model, tokenizer or found.tokenizer
    if tokenizer is None:
        raise UserError("lm-eval tasks need a tokenizer, and this model has none")
    return model, tokenizer


def _evaluate(
    model: Any,
    tokenizer: Any,
    loaded: list[Any],
    limit: int | None,
    batch_size: int,
    precision: str,
) -> dict[str, Any]:
    """The summary. lm-eval's ``simple_evaluate`` would also ask git, pip and the hub about it."""
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
        add_bos_token=starts_with_bos(tokenizer) or None,  # lm-eval by itself would put none
    )
    tasks = TaskManager(include_defaults=False).load(loaded)
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    results = evaluate(
        lm=wrapped, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAP_ROUNDS, log_samples=True
    )
    return summarise(results, by_size_of(tasks["groups"]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Progress bars on a terminal, else nothing: stdout may carry the command's result."""
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
