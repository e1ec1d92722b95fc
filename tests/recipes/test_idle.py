"""Settings that do nothing are named; settings that act, defaults and budgets are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_spec

from ltconvert import recipes
from ltconvert.cli import app
from ltconvert.cli_session import run
from ltconvert.distill.plan import plan
from ltconvert.distill.planning.machine import Machine
from ltconvert.distill.planning.render import summary_lines
from ltconvert.recipes.idle import idle_settings
from ltconvert.recipes.idle_rules import rules
from ltconvert.recipes.keys import dotted_keys

# Settings that act in every student, or that are refused where they do not.
ALWAYS = {
    "name", "description", "seed",
    "student.mixer", "student.kind", "student.loop_residual", "student.loops",
    "student.loop_start", "student.drop_layers",
    "data.source", "data.heldout_share", "data.shuffle_seed",
    "runtime.compile",
    "runtime.cuda_graph",
}  # fmt: skip
# Of `logits` and `longctx`, which every recipe can run.
TRAINING = {
    "enabled", "budget_tokens", "seq_len_tokens", "batch_tokens", "micro_batch_rows", "lr",
    "schedule", "warmup_share", "final_lr_share", "weight_decay", "beta1", "beta2", "clip_norm",
    "gradient_checkpointing", "checkpoint_minutes", "kl_weight", "ce_weight",
}  # fmt: skip


def test_every_setting_has_a_rule_or_always_acts() -> None:
    """A new setting has to be put into one of both."""
    ruled = {key for rule in rules() for key in rule.keys}
    always = ALWAYS | {f"{stage}.{key}" for stage in ("logits", "longctx") for key in TRAINING}
    always |= {f"{stage}.enabled" for stage in ("loop", "align", "select", "shrink")}
    always |= {key for key in dotted_keys() if key.startswith("eval.")} - ruled
    assert ruled | always == set(dotted_keys())
    assert not ruled & always


@pytest.mark.parametrize("name", recipes.names())
def test_no_shipped_recipe_has_an_idle_setting(name: str) -> None:
    for budget in (None, *recipes.budgets()):
        recipe = recipes.resolve(name, budget=budget)
        loops = 4 if name == "sparse-window" else 1
        assert idle_settings(recipe, loops) == []


@pytest.mark.parametrize(
    ("name", "override", "line"),
    [
        ("hybrid25", "student.slices=4", "it needs student.kind=dreamer"),
        ("dreamer", "student.pool_cut=merge", "needs student.kind=dreamer with a student.pool_sch"),
        ("dreamer", "student.depth_slots=last:8", 'student.depth_slots "last:8" does nothing'),
        ("hybrid25", "student.depth_bias=1", "it needs student.mixer=moda"),
        ("moda", "student.depth_linear_writes=true", "it needs other mixers beside moda"),
        ("hybrid25", "student.loop_rank=8", "it needs a dense teacher that student.loop_start ti"),
        ("loop", "student.loop_rank=0", None),
        ("hybrid25", "student.top_k_tokens=64", "it needs student.mixer=dsa"),
        ("sparse-dsa", "student.block_tokens=64", "it needs student.mixer=nsa"),
        ("linear-gdn", "student.window_tokens=64", "one of these as student.mixer: window, gdn_w"),
        ("moda", "student.conv_size=3", "one of these as student.mixer: gdn, "),
        ("baseline-uniform25", "student.conv_size=3", "it needs student.short_conv=true"),
        ("linear-gdn", "student.sdpa_gate=true", "it needs full layers"),
        ("linear-gdn", "student.full_mixer=moda", "it needs student.full_layers above 0"),
        ("hybrid25", "student.full_mixer=moda", None),
        ("finetune", "student.full_layers=3", "it needs a student.mixer for the other layers"),
        ("finetune", "align.lr=1e-4", "align.lr 0.0001 does nothing here"),
        ("finetune", "logits.mixer_lr=1e-3", "all of this student trains at logits.lr"),
        ("hybrid25", "shrink.lr=1e-3", "it needs student.kind=dreamer with a student.pool_sched"),
        ("hybrid25", "loop.lr=1e-3", "it needs a dense teacher that student.loop_start ties"),
        ("loop", "loop.mixer_lr=1e-3", "all layers are full: set logits.mixer_lr"),
        ("hybrid25", "logits.release_share=0.2", "it needs student.kind=dreamer"),
        ("hybrid25", "longctx.jsd_beta=0.1", "it needs longctx.divergence=jsd"),
        ("hybrid25", "logits.loop_warmup_share=0.3", "it needs a looped teacher"),
        ("hybrid25", "student.prelude_layers=1", "it needs a student that loops"),
        ("hybrid25", "select.train_tokens=9000", "it needs select.method kl or kl-gates"),
        ("baseline-uniform25", "select.direction=both", "it needs select.method kl-fast"),
        ("hybrid25", "data.hub_split=test", "it needs a hub id as data.source"),
        ("window", "align.lr=1e-4", None),  # the stage is disabled, and that was said
        ("hybrid25", "student.slices=1", "it needs student.kind=dreamer"),  # the default, asked for
        ("dreamer", "student.full_layers=0.25", "it needs student.kind=lt2: a Dreamer has one lay"),
        ("dreamer", "student.full_layers=8", "it needs student.kind=lt2: a Dreamer has one layer"),
        ("dreamer", "student.sdpa_gate=false", "it needs student.kind=lt2 and full layers"),
        ("dreamer", "align.lr=1e-4", "it needs student.kind=lt2 and a student.mixer that stands"),
        ("dreamer-half", "shrink.usage_tokens=64", "student.pool_rank=use or student.pool_cut=me"),
        ("hybrid25", "shrink.lr=1e-5", None),  # what a budget says
    ],
)
def test_what_does_nothing_is_named_with_what_it_needs(
    name: str, override: str, line: str | None
) -> None:
    found = idle_settings(recipes.resolve(name, overrides=[override]), teacher_loops=1)
    assert len(found) == (0 if line is None else 1), found
    if line is not None:
        assert found[0].startswith(override.partition("=")[0]) and line in found[0]


def test_a_list_of_layers_leaves_nothing_to_choose() -> None:
    """``select.method`` list asks for one; any other ranks no layer where there is one."""
    overrides = ["student.full_layers=[0,5]", "select.method=recall", "select.recall_examples=8"]
    (found,) = idle_settings(recipes.resolve("hybrid25", overrides=overrides), teacher_loops=1)
    assert found.startswith('select.method "recall" and select.recall_examples 8 do nothing here')
    overrides[1:] = ["select.method=list"]
    assert idle_settings(recipes.resolve("hybrid25", overrides=overrides), teacher_loops=1) == []


def test_settings_with_one_reason_stand_in_one_line() -> None:
    overrides = ["student.mixer=full", "student.full_layers=1.0"]
    found = idle_settings(recipes.resolve("hybrid25", overrides=overrides), teacher_loops=1)
    assert found[0].startswith(
        "align.seq_len_tokens 2048 and align.batch_tokens 32768 do nothing here: they need a "
        "student.mixer"
    )


def test_a_dreamer_is_not_told_to_change_its_mixer_alone() -> None:
    recipe = recipes.resolve("dreamer", overrides=["student.window_tokens=64"])
    (found,) = idle_settings(recipe)
    assert "it needs student.kind=lt2 and one of these as student.mixer" in found


def test_a_recipe_that_spells_out_every_setting_asks_for_none(tmp_path: Path) -> None:
    """As `recipes show` prints it, for a person to change a line of."""
    path = tmp_path / "mine.yaml"
    shown = recipes.dump(recipes.resolve("dreamer"))
    path.write_text(shown.replace("window_tokens: 128", "window_tokens: 64"), encoding="utf-8")
    (found,) = idle_settings(recipes.resolve(str(path)))
    assert found.startswith("student.window_tokens 64 does nothing here")


def test_of_an_unknown_teacher_nothing_is_said() -> None:
    recipe = recipes.resolve("hybrid25", overrides=["logits.loop_warmup_share=0.3"])
    assert idle_settings(recipe) == []
    assert idle_settings(recipe, teacher_loops=4) == []


def test_plan_and_check_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("student: {slices: 4}\n", encoding="utf-8")
    assert run(app, ["recipes", "check", str(path)]) == 0
    assert "student.slices 4 does nothing here" in capsys.readouterr().out
    machine = Machine("test", 1 << 36, flops=1e12, bytes_per_second=1e10)
    made = plan(recipes.resolve(str(path)), tiny_spec(), "cpu", "fp32", machine=machine)
    assert any("student.slices 4 does nothing here" in line for line in summary_lines(made))


def test_merged_pools_leave_nothing_to_skip() -> None:
    given = ["student.pool_skip=true", "student.pool_cut=merge"]
    (line,) = idle_settings(recipes.resolve("dreamer-half", overrides=given))
    assert line.startswith("student.pool_skip true") and "student.pool_cut=drop" in line
