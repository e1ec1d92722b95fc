"""What one decoded token has to read and write, and how fast the memory does that."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.students.static_layers import StaticKeys, keys_of, states_of

COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}  # more than any cache of a processor holds
COPIES = 10
WARM_UP_CALLS = 2


def cache_bytes(cache: StaticCache, context: int) -> int:
    """Bytes of a cache that are in use behind so many tokens a row."""
    total = state_bytes(cache)
    for layer in cache.layers:
        if isinstance(layer, StaticKeys):
            held = sum(tensor.nbytes for tensor in keys_of(layer))
            total += held * min(context, layer.slots) // layer.slots
    return total


def state_bytes(cache: StaticCache) -> int:
    """Bytes of the states and histories of linear layers, which a step reads and writes."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in states_of(layer))


def weight_bytes(model: LT2ForCausalLM) -> int:
    """Bytes of weights that a step reads: every visit of a layer its own, and the head."""
    config = copy.deepcopy(model.config)
    config.tied_rank = None  # a loop's own tensors are merged into what its visit reads
    layers = model_facts(config).layers
    visits = model.dtype.itemsize * sum(layer.visits * layer.parameters for layer in layers)
    if model.model.injection is not None:
        visits += config.num_loops * model.model.injection.adapter.weight.nbytes
    return visits + model.head_weight.nbytes + model.model.norm.weight.nbytes


def step_bytes(model: LT2ForCausalLM, cache: StaticCache, context: int) -> int:
    """Bytes that a step behind so many tokens a row cannot but move."""
    read = cache_bytes(cache, context) - unread_bytes(model, cache, context)
    return weight_bytes(model) + read + state_bytes(cache)


def unread_bytes(model: LT2ForCausalLM, cache: StaticCache, context: int) -> int:
    """Bytes of keys and values in use that a step leaves alone, since it chooses among them."""
    total = 0
    for layer, step in zip(cache.layers, model.model.schedule, strict=True):
        most = model.config.attended(step.layer)
        if most is not None and isinstance(layer, StaticKeys):
            used = min(context, layer.slots)
            total += 2 * layer.keys.nbytes * max(0, used - most) // layer.slots
    return total


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written ones counted: the median of a few."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = seconds_of(lambda: target.copy_(source), device, COPIES)
    return 2 * source.nbytes / statistics.median(times)


def seconds_of(call: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    """Seconds of each of ``count`` calls in a row, after WARM_UP_CALLS that do not count.

    On a GPU between events, so that calls follow each other without the host in between.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(second) / 1000 for first, second in pairwise(events)]
