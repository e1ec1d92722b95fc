"""Footprints of Dreamers against built models, and the search for one that matches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import FAMILIES, tiny_spec

from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.distill.planning.dreamer_shape import NUMBERS, DreamerShape
from ltconvert.distill.planning.footprint import footprint
from ltconvert.distill.planning.match import match, mismatch
from ltconvert.errors import UserError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"slices": 4, "top_experts": 6, "depth_heads": 0},
    {"shared_size": 0, "stream_norm": True, "top_entries": 1, "top_experts": 1},
]
CONTEXT = 24


def pools(entries: int, **options: Any) -> DreamerConfig:
    return DreamerConfig(entries, entries * options.get("slices", 1), **options)


def shape_of(family: str, **options: Any) -> DreamerShape:
    spec = tiny_spec(family)
    schedule = [step.layer for step in LT2Config.from_spec(spec).schedule()]
    return DreamerShape.at_start(spec, schedule, pools(3, **options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", [*FAMILIES, "huginn"])
def test_arithmetic_is_that_of_the_built_model(family: str, options: dict[str, Any]) -> None:
    shape = shape_of(family, **options)
    grown = shape.with_number("entries", 5)
    assert grown is not None
    for found in (shape, grown.with_number("depths", 7), grown.with_number("width", 96)):
        assert found is not None
        counted = footprint(model_facts(found.config()), found.spec, CONTEXT)
        assert vars(found.footprint(CONTEXT)) == pytest.approx(vars(counted), rel=1e-12)


@pytest.mark.parametrize(
    ("goal", "held"),
    [({"depths": 10, "entries": 22}, "width"), ({"width": 1024, "top_experts": 9}, "entries")],
)
def test_a_known_shape_is_found_again(goal: dict[str, int], held: str) -> None:
    spec = replace(tiny_spec("llama"), hidden_size=512, intermediate_size=1536, vocab_size=4096)
    start = DreamerShape.at_start(spec, [0, 1, 2] * 4, pools(3, slices=4, top_experts=6))
    wanted = start
    for name, value in goal.items():
        moved = wanted.with_number(name, value)
        assert moved is not None
        wanted = moved
    target = wanted.footprint(512)
    found = match(start, target, [name for name in NUMBERS if name != held], 512).footprint(512)
    for name in ("parameters", "flops", "memory_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(target, name), rel=0.01)
    assert mismatch(found, target) < 1e-4


def test_held_numbers_stay() -> None:
    start = shape_of("llama")
    target = replace(start.footprint(64), parameters=10**6)
    found = match(start, target, ["entries"], 64)
    assert [found.number(n) for n in NUMBERS if n != "entries"] == [
        start.number(n) for n in NUMBERS if n != "entries"
    ]
    assert found.number("entries") > start.number("entries")
    with pytest.raises(UserError, match="leave at least one free"):
        match(start, target, [], 64)
