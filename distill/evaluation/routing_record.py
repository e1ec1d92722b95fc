"""Usage of a Dreamer's pools on text, where its depth attention looks, and what depths are worth.

B rows, T tokens, N tokens that are no padding, K choices, H heads, S depths seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.students.dreamer.depth import DepthAttention
from ltconvert.convert.students.dreamer.depths import set_depths
from ltconvert.convert.students.dreamer.layer import DreamerLayer
from ltconvert.convert.students.dreamer.pools import Pool
from ltconvert.convert.students.dreamer.router import Routes
from ltconvert.convert.students.dreamer.rows import Expert, Mixture
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.routing_usage import Usage
from ltconvert.distill.evaluation.scores import heldout_scores
from ltconvert.distill.precision import autocast

POOLS = ("attention", "experts")


@torch.inference_mode()
def pool_usage(
    model: LT2ForCausalLM, batches: Iterable[Batch], *, precision: str = "fp32"
) -> dict[str, Usage]:
    """How often each depth's tokens choose each entry, by pool; padding does not count.

    While routing is forced every depth uses its own layer.
    """
    layer = model.model.dreamer
    assert layer is not None, "not a Dreamer"
    sizes = layer.config.entries, layer.config.experts
    depths = len(model.model.schedule)
    usages = {name: Usage.empty(depths, size) for name, size in zip(POOLS, sizes, strict=True)}
    for batch in batches:
        batch = batch.to(model.device)
        keep_N = batch.keep_BT.flatten()
        with _adding(layer) as shares, autocast(model.device, precision):
            found = _run(model, batch) or _forced(model, batch)
        for depth, routes in enumerate(found):
            for name, of_pool in zip(POOLS, routes, strict=True):
                adds_N = shares[name][depth][keep_N]
                usages[name].add(
                    depth, of_pool.chosen_NK[keep_N], of_pool.weights_NK[keep_N], adds_N
                )
    return usages


@contextmanager
def _adding(layer: DreamerLayer) -> Iterator[dict[str, list[Tensor]]]:
    """Within the block: for each depth what both branches add to the stream they leave, [N]."""
    shares: dict[str, list[Tensor]] = {name: [] for name in POOLS}
    sizes: dict[str, Tensor] = {}

    def listen(name: str) -> None:
        pool: Pool = getattr(layer, name)
        joined = pool.joined

        def note(h_BTC: Tensor, mixture: Mixture, expert: Expert) -> Tensor:
            after_BTC = joined(h_BTC, mixture, expert)
            if layer.spec.norm_layout == "outer":  # the norm scales the stream and y alike
                y_BTC = mixture(expert).view_as(h_BTC)
                share_N = _lengths(y_BTC) / _lengths(h_BTC + y_BTC)
                sizes[name] = share_N * _lengths(after_BTC)
            else:  # y is not what is added where a norm stands behind it
                sizes[name] = _lengths(after_BTC - h_BTC)
            return after_BTC

        pool.joined = note  # type: ignore[method-assign]
        stack.callback(delattr, pool, "joined")

    def divide(_: Any, __: Any, left: tuple[Tensor, Any]) -> None:
        length_N = _lengths(left[0])
        for name in POOLS:  # an idle branch adds nothing
            shares[name].append(sizes.pop(name, torch.zeros_like(length_N)) / length_N)

    with ExitStack() as stack:
        for name in POOLS:
            listen(name)
        stack.callback(layer.register_forward_hook(divide).remove)
        yield shares


def _lengths(x_BTC: Tensor) -> Tensor:
    return x_BTC.flatten(0, 1).float().norm(dim=-1).clamp(min=1e-12)


def _run(model: LT2ForCausalLM, batch: Batch) -> tuple[tuple[Routes, Routes], ...]:
    output = model.model(
        batch.input_ids_BT,
        attention_mask=batch.mask_BT,
        segment_ids=batch.segment_ids_BT,
        use_cache=False,
    )
    found: tuple[tuple[Routes, Routes], ...] = output.routes
    return found


def _forced(model: LT2ForCausalLM, batch: Batch) -> list[tuple[Routes, Routes]]:
    """Every token through its depth's own layer, all slices of the MLP."""
    count, slices = batch.input_ids_BT.numel(), model.model.dreamer.config.slices

    def own(first: int, size: int) -> Routes:
        ids_NK = torch.arange(first, first + size, device=model.device).expand(count, -1)
        ones_NK = torch.ones_like(ids_NK, dtype=torch.float32)
        return Routes(ids_NK, ones_NK, ones_NK[:, 0])

    layers = [step.layer for step in model.model.schedule]
    return [(own(layer, 1), own(layer * slices, slices)) for layer in layers]


@torch.inference_mode()
def depth_map(
    model: LT2ForCausalLM, batches: Iterable[Batch], *, precision: str = "fp32"
) -> list[list[float]]:
    """Weight that each depth's queries give to each earlier depth, means over heads and tokens.

    Returns:
        A row a depth, as long as the depths before it; nothing without depth attention.
    """
    layer = model.model.dreamer
    if layer is None or layer.depth is None:
        return []
    sums: dict[int, Tensor] = {}
    count = 0
    for batch in batches:
        batch = batch.to(model.device)
        count += int(batch.keep_BT.sum())
        with _listening(layer.depth, batch.keep_BT, sums), autocast(model.device, precision):
            _run(model, batch)
    rows = [sums.get(depth) for depth in range(len(model.model.schedule))]
    return [[] if row is None else (row / max(count, 1)).tolist() for row in rows]


@contextmanager
def _listening(
    attention: DepthAttention, keep_BT: Tensor, sums: dict[int, Tensor]
) -> Iterator[None]:
    """Add up the weights of one pass, anew from its queries and keys."""

    def listen(module: DepthAttention, given: tuple[Any, ...], _: Any) -> None:
        h_BTC, depth, slots = given
        if not depth:
            return
        q_BTHD = module.placed(module.q_proj, module.norm(h_BTC), depth)
        keys_BTSHD = slots.keys_BTNGD[:, :, :depth]
        scores_BTHS = torch.einsum("bthd,btshd->bths", q_BTHD.float(), keys_BTSHD.float())
        weights_BTHS = (scores_BTHS * module.head_dim**-0.5).softmax(-1)
        row_S = weights_BTHS.mean(2)[keep_BT].sum(0).double().cpu()
        sums[depth] = sums.get(depth, torch.zeros_like(row_S)) + row_S

    handle = attention.register_forward_hook(listen)
    try:
        yield
    finally:
        handle.remove()


def by_depths(
    model: LT2ForCausalLM,
    teacher: LT2ForCausalLM,
    batches: list[Batch],
    *,
    precision: str = "fp32",
) -> list[dict[str, float]]:
    """What a Dreamer is worth at fewer and at more depths than it was trained for.

    Returns:
        For some ``depths`` ``kl`` to the teacher, nats a token, and ``ppl``.
    """
    before, trained = model.config.depths, len(model.config.made_schedule())
    found = []
    try:
        for depths in sorted({-(-trained * quarters // 4) for quarters in (2, 3, 4, 5)}):
            set_depths(model, depths)
            scores = heldout_scores(teacher, model, batches, precision=precision)
            found.append({"depths": depths, "kl": scores["kl"], "ppl": scores["student_ppl"]})
    finally:
        set_depths(model, before)
    return found
