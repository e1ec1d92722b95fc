"""Whole steps of a student of Ouro-1.4B's shape with constants of the decode kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.benchmarks.tune_candidates import Constants, applied, text_of
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.teachers.shapes import shape_spec
from ltconvert.distill.evaluation import decode_work as work
from ltconvert.distill.evaluation.decode_bench import Case, fast_seconds
from ltconvert.distill.evaluation.decode_models import random_model, student_config

SHAPE, RECIPE = "ouro-1.4b", "hybrid25"
BATCHES = (1, 8)
STEPS = 24
WORSE = 0.002  # by less than this share a step is not faster


class Steps:
    """Times steps; every fourth layer keeps its attention.

    Args:
        mixer: of the other layers.
        context: tokens that every row has read.
    """

    def __init__(self, mixer: str, context: int, device: torch.device) -> None:
        spec = shape_spec(SHAPE)
        settings = recipes.resolve(RECIPE, overrides=["student.full_layers=0.25"]).student
        self.model = random_model(student_config(spec, settings, [mixer]), device, torch.bfloat16)
        self.context = context
        rate = work.copy_bandwidth(device)
        self.least = {batch: self._step_bytes(batch) / rate for batch in BATCHES}
        print(f"steps: {SHAPE}, {mixer} and 25 % full, {context} tokens", flush=True)

    def choose(
        self,
        best: dict[str, Any],
        others: Sequence[tuple[set[str], Constants]],
        until: float,
    ) -> dict[str, Any]:
        """The fastest of the present constants, the best of each op, and changes to these."""
        now = self._show({}, BATCHES)
        self._show({"overlap.ALLOWED": False}, BATCHES)
        chosen, least = {}, now
        if best:
            found = self._show(best, BATCHES)
            if found < now:
                chosen, least = dict(best), found
        for names, other in others:
            if time.time() > until:
                print("  no time left for the others", flush=True)
                break
            changed = {k: value for k, value in chosen.items() if k not in names} | dict(other)
            found = self._show(changed, BATCHES)
            if found < least * (1 - WORSE):
                chosen, least = changed, found
        return chosen

    def _show(self, constants: Constants, batches: Sequence[int]) -> float:
        """Seconds of steps over the least they could take, summed over batches."""
        total, cells = 0.0, []
        for batch in batches:
            with applied(constants):
                seconds = fast_seconds(self.model, Case(batch, self.context, STEPS))
            share = self.least[batch] / seconds
            cells.append(f"{batch} rows {batch / seconds:7.1f} tokens/s ({100 * share:4.1f} %)")
            total += 1 / share
            torch.cuda.empty_cache()
        print(f"  {', '.join(cells)}  {text_of(constants)}", flush=True)
        return total

    def _step_bytes(self, batch: int) -> int:
        cache = StaticCache(
            self.model.config, batch, self.context + 1, dtype=self.model.dtype, device="meta"
        )
        return work.step_bytes(self.model, cache, self.context)
