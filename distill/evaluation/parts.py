"""The parts of an evaluation: how each is measured, and which settings its result depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch, data_identity
from ltconvert.distill.evaluation.depth_mass import depth_mass
from ltconvert.distill.evaluation.generation import (
    decode_speed,
    generation_agreement,
    prompts_from,
)
from ltconvert.distill.evaluation.lm_eval import run_tasks
from ltconvert.distill.evaluation.loop_decoding import Way, loop_decoding, ways
from ltconvert.distill.evaluation.recall import recall_scores
from ltconvert.distill.evaluation.routing_record import by_depths, depth_map, pool_usage
from ltconvert.distill.evaluation.scores import BATCH_TOKENS, heldout_rows, heldout_scores
from ltconvert.distill.evaluation.task_scores import compare
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.distill.runlog import RunLog
    from ltconvert.recipes.data import DataSettings
    from ltconvert.recipes.evaluation import EvalSettings

PROMPT_TOKENS = 64
TASK_ROWS = 8
DEPTH_BATCHES = 4
ROUTING_BATCHES = 4


@dataclass
class Evaluation:
    """What is to be measured; ``models`` holds ``teacher``, ``student`` or both, on one device."""

    models: dict[str, LT2ForCausalLM]
    tokenizer: Any
    settings: EvalSettings
    data: DataSettings
    log: RunLog
    precision: str
    seed: int = 0
    include_path: Path | None = None
    _batches: list[Batch] | None = field(default=None, repr=False)

    @property
    def both(self) -> bool:
        """There is a teacher to compare the student with."""
        return len(self.models) == 2

    @cached_property
    def text(self) -> dict[str, Any]:
        """What tells the held-out text from another one."""
        return data_identity(self.data)

    def batches(self) -> list[Batch]:
        """The fixed held-out rows, read once."""
        if self._batches is None:
            self._batches = heldout_rows(self.data, self.tokenizer, self.settings)
        return self._batches

    def ways(self) -> list[Way]:
        """Ways of decoding a looped model that are asked for, the ordinary one aside."""
        return ways(self.settings.loop_cache, self.settings.exit_thresholds)

    def each(self, measure: Callable[[LT2ForCausalLM], Any]) -> dict[str, Any]:
        """``{"teacher": ..., "student": ...}`` of what is there."""
        return {who: measure(model) for who, model in self.models.items()}


def _heldout(job: Evaluation) -> dict[str, Any]:
    if job.both:
        models = job.models["teacher"], job.models["student"]
        return heldout_scores(*models, job.batches(), precision=job.precision)
    (who, model), *_ = job.models.items()
    scores = heldout_scores(model, None, job.batches(), precision=job.precision)
    return {name.replace("teacher", who): value for name, value in scores.items()}


def _recall(job: Evaluation) -> dict[str, Any]:
    settings = job.settings
    return job.each(
        lambda model: recall_scores(
            model,
            job.tokenizer,
            settings.recall_lengths_tokens,
            settings.recall_examples,
            seed=job.seed,
            precision=job.precision,
            batch_tokens=BATCH_TOKENS,
        )
    )


def _generation(job: Evaluation) -> dict[str, Any]:
    prompts_BP = prompts_from(job.batches(), job.settings.generation_prompts, PROMPT_TOKENS)
    return generation_agreement(
        job.models["teacher"],
        job.models["student"],
        job.tokenizer,
        prompts_BP,
        job.settings.generation_tokens,
        precision=job.precision,
    )


def _decode(job: Evaluation) -> dict[str, Any]:
    contexts = job.settings.decode_contexts_tokens
    return job.each(lambda model: decode_speed(model, contexts, precision=job.precision))


def _loops(job: Evaluation) -> dict[str, Any]:
    settings, asked = job.settings, job.ways()
    length = PROMPT_TOKENS + settings.generation_tokens
    texts_BT = prompts_from(job.batches(), settings.generation_prompts, length)
    if not len(texts_BT) or settings.generation_tokens < 2:
        raise UserError(
            f"no held-out document has {length} tokens to decode; lower eval.generation_tokens, or "
            "raise eval.generation_prompts or eval.heldout_tokens"
        )
    found = {}
    for who, model in job.models.items():
        if mine := [way for way in asked if way.fits(model)]:  # a dense teacher has no loops
            found[who] = loop_decoding(
                model, texts_BT, PROMPT_TOKENS, mine, precision=job.precision
            )
    return found


def _has_depth(job: Evaluation) -> bool:
    return "student" in job.models and job.models["student"].model.depth_plan is not None


def _depth(job: Evaluation) -> dict[str, Any]:
    batches = job.batches()[:DEPTH_BATCHES]
    return job.each(lambda model: depth_mass(model, batches, precision=job.precision))


def _has_routing(job: Evaluation) -> bool:
    return "student" in job.models and job.models["student"].model.dreamer is not None


def _routing(job: Evaluation) -> dict[str, Any]:
    student = job.models["student"]
    batches = job.batches()[:ROUTING_BATCHES]
    usage = pool_usage(student, batches, precision=job.precision)
    weights = depth_map(student, batches, precision=job.precision)
    pools = {name: of_pool.to_dict() for name, of_pool in usage.items()}
    found: dict[str, Any] = {"pools": pools, "depth_map": weights}
    if job.both:
        models = student, job.models["teacher"]
        found["by_depths"] = by_depths(*models, batches, precision=job.precision)
    return {"student": found}


def _tasks(job: Evaluation) -> dict[str, Any]:
    found = job.each(
        lambda model: run_tasks(
            model,
            job.tokenizer,
            job.settings.tasks,
            include_path=job.include_path,
            limit=job.settings.task_limit,
            batch_size=TASK_ROWS,
            precision=job.precision,
        )
    )
    last = found.get("student") or found["teacher"]
    other = found.get("teacher") if "student" in found else None
    return found | {"rows": compare(other, last)}


@dataclass(frozen=True)
class Part:
    """One part: how it is measured, the settings that its result depends on, whether there is
    anything to measure.
    """

    measure: Callable[[Evaluation], Any]
    settings: tuple[str, ...]
    reads_data: bool = False
    applies: Callable[[Evaluation], bool] = lambda _: True


PARTS: dict[str, Part] = {
    "heldout": Part(_heldout, ("heldout_tokens", "heldout_seq_len_tokens"), reads_data=True),
    "recall": Part(_recall, ("recall_lengths_tokens", "recall_examples")),
    "generation": Part(
        _generation,
        ("generation_prompts", "generation_tokens", "heldout_tokens", "heldout_seq_len_tokens"),
        reads_data=True,
        applies=lambda job: job.both and job.settings.generation_prompts > 0,
    ),
    "decode": Part(_decode, ("decode_contexts_tokens",)),
    "loops": Part(
        _loops,
        (
            "loop_cache",
            "exit_thresholds",
            "generation_prompts",
            "generation_tokens",
            "heldout_tokens",
            "heldout_seq_len_tokens",
        ),
        reads_data=True,
        applies=lambda job: bool(job.ways()),
    ),
    "depth": Part(
        _depth,
        ("heldout_tokens", "heldout_seq_len_tokens"),
        reads_data=True,
        applies=_has_depth,
    ),
    "routing": Part(
        _routing,
        ("heldout_tokens", "heldout_seq_len_tokens"),
        reads_data=True,
        applies=_has_routing,
    ),
    "tasks": Part(_tasks, ("tasks", "task_limit"), applies=lambda job: bool(job.settings.tasks)),
}
