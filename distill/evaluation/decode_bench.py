"""Time of a decoded token behind a long context, beside what the memory allows.

No prompt is read: lengths are set and caches filled with random numbers.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.cache import LoopCache
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.students.static_layers import tensors_of
from ltconvert.distill.evaluation import decode_work as work
from ltconvert.distill.evaluation.decode_models import random_model
from ltconvert.distill.planning.machine import free_memory
from ltconvert.errors import out_of_memory

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Case:
    """Rows at a time, tokens that each has read, and steps to time."""

    batch: int
    context: int
    steps: int


def bench(
    configs: dict[str, LT2Config],
    contexts: Sequence[int],
    batches: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    steps: int = 32,
    plain: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row a model, batch and context, and with ``plain`` one more for the loop users have.

    Args:
        configs: by the name that rows carry; weights are random.
        plain: also time forward passes with a growing cache, one launch after the other, the host
            reading every token, as transformers' ``generate()`` does.

    Yields:
        ``model``, ``path`` (``fast`` or ``plain``), ``batch``, ``context``, ``cache_bytes``,
        ``step_bytes`` (which a step cannot but move), ``roofline_tokens_per_second`` (those bytes
        at the speed of a copy) and ``ms_per_step``, ``tokens_per_second`` (of all rows),
        ``roofline_share``, ``peak_bytes`` (None on a CPU); or ``error`` in place of the last four,
        where model, cache or step do not fit into memory; the other rows are measured then, too.
    """
    bandwidth = work.copy_bandwidth(device)
    for name, config in configs.items():
        shape = random_model(config, torch.device("meta"), dtype)
        paths = {"fast": fast_seconds} | ({"plain": plain_seconds} if plain else {})
        model = _in_memory(config, device, dtype, sum(p.nbytes for p in shape.parameters()))
        for case in (Case(batch, context, steps) for batch in batches for context in contexts):
            floor = _floor(shape, case, bandwidth)
            for path, seconds in paths.items():
                row = {"model": name, "path": path, "batch": case.batch, "context": case.context}
                yield row | floor | _measured(seconds, model, case, floor)
        del model
        _free(device)


def fast_seconds(model: LT2ForCausalLM, case: Case) -> float:
    """Median seconds of a step of a Decoder: on a GPU the replay of a graph."""
    decoder = Decoder(model, case.batch, case.context + case.steps + work.WARM_UP_CALLS)
    advance = decoder.prepare()
    generator = torch.Generator(model.device).manual_seed(0)
    for layer in decoder.cache.layers:
        for tensor in tensors_of(layer):
            tensor.normal_(generator=generator)
    decoder.cache.lengths_B.fill_(case.context)
    decoder.cache.settled = True
    with torch.no_grad():
        return statistics.median(work.seconds_of(advance, model.device, case.steps))


@torch.no_grad()
def plain_seconds(model: LT2ForCausalLM, case: Case) -> float:
    """Median seconds of a forward pass with a growing cache, its token read by the host."""
    token_B1 = torch.zeros(case.batch, 1, dtype=torch.int64, device=model.device)
    cache = model.new_cache()
    named: dict[str, Any] = {CACHE_NAME: cache}
    model(token_B1, use_cache=True, **named)
    _pretend(model, cache, case.context)

    def step() -> None:
        output = model(token_B1, use_cache=True, **named)
        token_B1.copy_(output.logits[:, -1:].argmax(-1))
        bool((token_B1 < 0).all())  # generate() looks for ends after every token

    return statistics.median(work.seconds_of(step, model.device, case.steps))


def _pretend(model: LT2ForCausalLM, cache: LoopCache, context: int) -> None:
    """Make a cache of one token one of so many, with random numbers."""
    generator = torch.Generator(model.device).manual_seed(0)
    for layer, step in zip(cache.layers, model.model.schedule, strict=True):
        window = model.config.window(step.layer, step.loop)
        if isinstance(layer, CacheLayerMixin):
            kept = context if window is None else min(context, window - 1)
            counts = dict.fromkeys(("keys", "values", "indexer_keys"), kept)
            blocks = context // model.config.block_tokens + 1
            counts |= dict.fromkeys(("block_keys", "block_values"), blocks)
            for name, count in counts.items():
                if (old := getattr(layer, name, None)) is not None:
                    setattr(layer, name, old.new_empty(*old.shape[:-2], count, old.shape[-1]))
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = context
        for tensor in tensors_of(layer):
            tensor.normal_(generator=generator)
    cache.num_tokens = context


def _floor(model: LT2ForCausalLM, case: Case, bandwidth: float) -> dict[str, Any]:
    """What follows from sizes alone."""
    cache = StaticCache(
        model.config, case.batch, case.context + 1, dtype=model.dtype, device="meta"
    )
    moved = work.step_bytes(model, cache, case.context)
    return {
        "cache_bytes": work.cache_bytes(cache, case.context),
        "step_bytes": moved,
        "roofline_tokens_per_second": case.batch * bandwidth / moved,
    }


def _in_memory(
    config: LT2Config, device: torch.device, dtype: torch.dtype, weights: int
) -> LT2ForCausalLM | None:
    """The model, or None where its ``weights`` bytes find no room."""
    model = None
    if _there_is_room(weights, device):
        with _no_room_is_no_fault():
            model = random_model(config, device, dtype)
    _free(device)
    return model


def _measured(
    seconds_of: Callable[[LT2ForCausalLM, Case], float],
    model: LT2ForCausalLM | None,
    case: Case,
    floor: dict[str, Any],
) -> dict[str, Any]:
    """What was measured, or ``error`` where model, cache or step found no room."""
    if model is None or not _there_is_room(floor["cache_bytes"], model.device):
        return {"error": OUT_OF_MEMORY}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    seconds = None
    with _no_room_is_no_fault():
        seconds = seconds_of(model, case)
    _free(model.device)
    if seconds is None:
        return {"error": OUT_OF_MEMORY}
    speed = case.batch / seconds
    return {
        "ms_per_step": 1000 * seconds,
        "tokens_per_second": speed,
        "roofline_share": speed / floor["roofline_tokens_per_second"],
        "peak_bytes": torch.cuda.max_memory_allocated(model.device) if on_gpu else None,
    }


@contextmanager
def _no_room_is_no_fault() -> Iterator[None]:
    """Swallow that memory was refused, and nothing else."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise


def _there_is_room(needed: int, device: torch.device) -> bool:
    """Whether it is worth trying. A GPU refuses what it does not have; an operating system promises
    main memory that it does not have, and kills who takes it.
    """
    return device.type != "cpu" or needed <= free_memory()


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # graphs and what refers to them are cycles
        torch.cuda.empty_cache()
