"""The plan of a Dreamer whose pools shrink."""

from __future__ import annotations

import io
from typing import Any

import pytest
from helpers import tiny_spec
from rich.console import Console

from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.distill.plan import Plan, plan
from ltconvert.distill.planning.machine import Machine
from ltconvert.distill.planning.render import render_plan
from ltconvert.recipes.schema import Recipe

MACHINE = Machine("test", 64 << 30, flops=1e12, bytes_per_second=1e10)
STUDENT: dict[str, Any] = {
    "kind": "dreamer",
    "mixer": "full",
    "full_layers": 1.0,
    "slices": 2,
    "top_entries": 1,
    "pool_schedule": [0.67, 0.34],
}


def make(**student: Any) -> Plan:
    rows = {"seq_len_tokens": 64, "batch_tokens": 256, "budget_tokens": 10_240}
    recipe = Recipe.model_validate(
        {"name": "test", "student": STUDENT | student, "shrink": rows | {"usage_tokens": 128}}
    )
    return plan(recipe, tiny_spec(), "cpu", "fp32", machine=MACHINE)


def test_every_step_has_a_row_with_the_parameters_of_its_model() -> None:
    made = make()
    assert [(pool.entries, pool.experts) for pool in made.pools] == [(3, 6), (2, 4), (1, 2)]
    for pool in made.pools:
        sizes = {"entries": pool.entries, "experts": pool.experts, "slices": 2, "top_entries": 1}
        if pool.entries < 3:
            sizes |= {"null_entries": 1, "null_experts": 2}
        model = LT2ForCausalLM(LT2Config.from_spec(tiny_spec(), dreamer=sizes))
        held = {p.data_ptr(): p.numel() for p in model.parameters()}
        assert pool.footprint.parameters == sum(held.values())
    same = [pool.footprint.memory_bytes for pool in made.pools]
    assert same == [same[0]] * 3  # as many visits, each with a cache of its own
    page = io.StringIO()
    Console(file=page, width=160).print(render_plan(made))
    assert "34%" in page.getvalue() and "1 (33%)" in page.getvalue()


def test_shares_below_what_a_token_uses_are_noted() -> None:
    assert not any("pool_schedule" in note for note in make().notes)
    made = make(top_entries=2, top_experts=3, pool_schedule=[0.67, 0.34])
    assert [note for note in made.notes if "pool_schedule" in note] == [
        "student.pool_schedule 0.34 leaves 2 of 3 entries (67%), since a token uses 2 "
        "(student.top_entries)",
        "student.pool_schedule 0.34 leaves 4 of 6 experts (67%), since a token uses 3 "
        "(student.top_experts)",
    ]


def test_fewer_experts_a_token_are_fewer_parameters_that_it_meets() -> None:
    same = {"top_entries": 1, "pool_schedule": [1.0, 1.0]}
    whole, wide, narrow = make(**same, top_experts=3, top_schedule=[4, 2]).pools
    assert [pool.top_experts for pool in (whole, wide, narrow)] == [3, 4, 2]
    met = [pool.footprint.active_parameters for pool in (narrow, whole, wide)]
    expert = 3 * tiny_spec().hidden_size * tiny_spec().intermediate_size // 2
    depths = tiny_spec().num_layers
    assert met == [met[0], met[0] + depths * expert, met[0] + 2 * depths * expert]


def test_memory_is_that_of_the_step_that_takes_most() -> None:
    peaks = []
    for tops in ([2, 6], [6, 2], [2, 2]):
        made = make(pool_schedule=[1.0, 1.0], top_schedule=tops)
        (row,) = (row for row in made.rows if row.stage == "shrink")
        peaks.append(row.peak_bytes)
    assert peaks[0] == peaks[1] > peaks[2]


def test_the_steps_share_the_budget() -> None:
    made = make()
    row = next(row for row in made.rows if row.stage == "shrink")
    assert row.tokens == 2 * 20 * 256 and row.steps == 40
    assert row.trained_parameters == made.pools[1].footprint.parameters
    longctx = next(row for row in made.rows if row.stage == "longctx")
    assert longctx.trained_parameters == made.pools[2].footprint.parameters
    # Two checkpoints of the largest step and one of the other, twelve bytes a parameter.
    sizes = [pool.footprint.parameters for pool in made.pools[1:]]
    assert row.disk_bytes >= 12 * (2 * sizes[0] + sizes[1])


def test_a_single_expert_in_any_step_is_noted() -> None:
    single = "student.top_schedule 1 leaves a single score"
    for tops, noted in (([2, 1], True), ([2, 2], False)):
        made = make(slices=1, top_schedule=tops)
        assert any(note.startswith(single) for note in made.notes) == noted


@pytest.mark.parametrize("given", [{"pool_schedule": []}, {"kind": "lt2"}])
def test_no_schedule_no_stage(given: dict[str, Any]) -> None:
    made = make(**given)
    assert made.pools == () and "shrink" not in [row.stage for row in made.rows]


def test_a_disabled_stage_leaves_the_pools_as_they_are() -> None:
    recipe = Recipe.model_validate(
        {"name": "test", "student": STUDENT, "shrink": {"enabled": False}}
    )
    made = plan(recipe, tiny_spec(), "cpu", "fp32", machine=MACHINE)
    trained = {row.stage: row.trained_parameters for row in made.rows}
    assert made.pools == () and trained["longctx"] == trained["logits"]
