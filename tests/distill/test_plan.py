"""The plan: sizes against real models, activations against autograd, refusals, forms."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import covering, kept_bytes, tiny_model, tiny_spec, tokens
from rich.console import Console

from ltconvert import recipes
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students import depth
from ltconvert.convert.students.depth_stream import DepthStream
from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import build_student
from ltconvert.convert.tying import tie_layers
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.plan import Plan, plan
from ltconvert.distill.planning.machine import Machine, free_disk, free_memory, measure
from ltconvert.distill.planning.memory import saved_bytes, stage_memory
from ltconvert.distill.planning.models import models_of
from ltconvert.distill.planning.render import render_plan, summary_lines
from ltconvert.distill.planning.rows import (
    SHARE_OF_MEMORY,
    choose_rows,
    recorded_rows,
    with_rows,
)
from ltconvert.distill.planning.work import forward_flops
from ltconvert.distill.records import RECIPE_FILE
from ltconvert.distill.selection.result import Cost
from ltconvert.errors import UserError
from ltconvert.kernels import dispatch
from ltconvert.kernels.chunkwise.spans import CHUNK_TOKENS
from ltconvert.recipes.schema import Recipe

GIB = 1 << 30
MACHINE = Machine("test", 64 * GIB, flops=1e12, bytes_per_second=1e10)


def recipe(**sections: Any) -> Recipe:
    """The defaults with some sections changed."""
    return Recipe.model_validate({"name": "test"} | sections)


def deep(**changes: Any) -> TeacherSpec:
    """Eight layers."""
    shape = {"num_layers": 8, "layer_rope": ("default",) * 8, "layer_windows": (None,) * 8}
    return tiny_spec(**shape | changes)


def make(spec: TeacherSpec | None = None, machine: Machine = MACHINE, **options: Any) -> Plan:
    """A plan on the CPU."""
    sections = options.pop("sections", {})
    return plan(recipe(**sections), spec or deep(), "cpu", "fp32", machine=machine, **options)


def test_a_row_a_stage_with_its_tokens_and_steps() -> None:
    made = make(sections={"logits": {"budget_tokens": 1_000_000, "batch_tokens": 8192}})
    rows = {row.stage: row for row in made.rows}
    assert list(rows) == ["align", "select", "logits", "longctx"]
    assert rows["logits"].steps == 123  # 1 000 000 / 8192, rounded up
    assert rows["logits"].tokens == 123 * 8192
    assert rows["align"].tokens >= 100_000_000
    assert made.hours == pytest.approx(sum(row.hours for row in made.rows))


def test_disabled_stages_and_a_student_without_conversion_are_left_out() -> None:
    made = make(sections={"select": {"enabled": False}, "longctx": {"enabled": False}})
    assert [row.stage for row in made.rows] == ["align", "logits"]
    assert made.selection is None
    full = make(sections={"student": {"mixer": "full"}})
    assert [row.stage for row in full.rows] == ["logits", "longctx"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "ouro"])
@pytest.mark.parametrize("mixer", ["gdn", "dsa", "nsa"])
def test_trained_parameters_are_those_of_the_objectives(family: str, mixer: str) -> None:
    spec = tiny_spec(family)
    long = {stage: {"seq_len_tokens": 4096} for stage in ("align", "select")}
    made = make(spec, sections={"student": {"full_layers": [1], "mixer": mixer}, **long})
    teacher = tiny_model(spec).requires_grad_(False)
    student = build_student(teacher, [mixer, "full", mixer], share=True)

    def trained(objective: Any) -> int:
        return sum(p.numel() for group in objective.parameter_groups() for p in group["params"])

    rows = {row.stage: row.trained_parameters for row in made.rows}
    assert rows["align"] == trained(AlignObjective(teacher, student, [0, 2], lr=1e-3))
    whole = build_student(teacher, [mixer, "full", mixer])
    gate = sum(p.numel() for n, p in whole.named_parameters() if "exit_gate" in n)
    assert rows["logits"] == trained(LogitsObjective(teacher, whole, recipe().logits)) + gate


LOOPED = {"loops": 2, "prelude_layers": 1, "coda_layers": 1, "loop_start": "average"}


def test_a_dense_teacher_is_looped_first_and_the_plan_says_at_what_cost() -> None:
    """8 layers: a prelude, 3 tied ones that run twice, a coda."""
    student = LOOPED | {"loop_rank": 4, "full_layers": 2}
    healing = {"budget_tokens": 1_000_000, "batch_tokens": 8192}
    made = make(sections={"student": student, "loop": healing})
    assert [row.stage for row in made.rows] == ["loop", "align", "select", "logits", "longctx"]
    assert made.rows[0].tokens == 123 * 8192 and made.rows[0].hours > 0
    looped = tie_layers(tiny_model(deep()), loops=2, prelude=1, coda=1, rank=4)
    size = sum(p.numel() for p in looped.parameters())
    assert made.rows[0].trained_parameters == size
    assert made.student.loops == 2 and len(made.student.layers) == 5 and made.keep == 2
    assert [layer.visits for layer in made.student.layers] == [1, 2, 2, 2, 1]
    teacher = sum(p.numel() for p in tiny_model(deep()).parameters())
    memory = {row.stage: row.memory for row in made.rows}
    assert memory["loop"]["teacher"] == 4 * teacher == memory["logits"]["teacher"]
    assert memory["loop"]["optimiser"] == 8 * size
    assert memory["align"]["teacher"] == 4 * (teacher + size)  # the looped one is compared with
    assert any("in 2 loops (" in x and "single loops' own)" in x for x in summary_lines(made))


@pytest.mark.parametrize("family", ["ouro", "smollm3", "gemma3"])  # positions of 1, 2 and 2 kinds
def test_a_depth_stream_is_counted_as_it_is_made(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(family)
    chosen = recipe(student={"mixer": "moda", "full_layers": 0, "depth_slots": "last:4"})
    models, length = models_of(chosen, spec), 9
    model = tiny_model(spec, ["moda"] * 3, depth_slots="last:4")
    made: list[DepthStream] = []

    def noted(*given: Any) -> DepthStream:
        made.append(DepthStream(*given))
        return made[-1]

    monkeypatch.setattr(depth, "DepthStream", noted)
    model(tokens(1, length)).logits.sum().backward()
    (stream,) = made
    held = [x for s in stream.slots.values() for x in (s.k_NBTGD, s.v_NBTGD, *s.gradients[:2])]
    assert sum(x.nbytes for x in held) == 2 * 4 * models.hybrid.depth_width * length
    plain = models_of(recipe(student={"mixer": "full"}), spec)
    less = stage_memory("logits", recipe(student={"mixer": "full"}), plain, "fp32")
    more = stage_memory("logits", chosen, models, "fp32")["activations"] - less["activations"]
    tokens_at_once = chosen.logits.rows_at_once * chosen.logits.seq_len_tokens
    assert more > tokens_at_once * 8 * models.hybrid.depth_width
    # 4 products and sums a slot, head and channel, and the projections.
    width = spec.num_attention_heads * spec.head_dim
    read = sum(x.visits * x.depth_slots for x in models.hybrid.layers)
    projected = sum(x.numel() for n, x in model.named_parameters() if "depth_proj" in n)
    visits = spec.num_loops if family == "ouro" else 1
    flops = forward_flops(models.hybrid, spec, 64) - forward_flops(plain.hybrid, spec, 64)
    assert flops == pytest.approx(4 * width * read + 2 * visits * projected)


def test_a_visit_of_a_tied_layer_counts_one_loops_corrections() -> None:
    """At rank 0 a looped model multiplies as much as the dense one it came from."""
    bare = models_of(recipe(student=LOOPED | {"loop_rank": 0}), deep())
    assert forward_flops(bare.origin, bare.spec, 64) == forward_flops(bare.teacher, deep(), 64)
    ranked = models_of(recipe(student=LOOPED | {"loop_rank": 4}), deep())
    corrections = 4 * (7 * 32 + 3 * 48 + 2 * 48 + 2 * 24)  # inputs and outputs of seven matrices
    more = forward_flops(ranked.origin, ranked.spec, 64) - forward_flops(bare.origin, bare.spec, 64)
    assert more == 6 * 2 * corrections


def test_layers_that_do_not_divide_are_refused_by_the_plan() -> None:
    with pytest.raises(UserError, match=r"leave 6, which student\.loops 4 does not divide"):
        make(sections={"student": LOOPED | {"loops": 4}})
    with pytest.raises(ValueError, match=r"student\.loops is 2, the teacher runs 1.*loop_start"):
        make(sections={"student": {"loops": 2}})


def test_weights_gradients_and_optimiser_add_up() -> None:
    spec, chosen = deep(), recipe(student={"full_layers": 2})
    models = models_of(chosen, spec)
    teacher, student = tiny_model(spec), models.hybrid.parameters
    parts = stage_memory("logits", chosen, models, "fp32")
    assert parts["teacher"] == 4 * sum(p.numel() for p in teacher.parameters())
    assert parts["gradients"] == 4 * student
    assert parts["optimiser"] == 8 * student
    aligned = stage_memory("align", chosen, models, "fp32")
    assert aligned["optimiser"] == 2 * aligned["gradients"] == 8 * models.mixer_parameters


def test_logits_on_a_gpu_are_two_buffers_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, chosen = deep(vocab_size=49152), recipe(logits={"seq_len_tokens": 4096})
    models = models_of(chosen, spec)
    head = 4 * 49152 * spec.hidden_size

    def logits(precision: str, device: str) -> int:
        return stage_memory("logits", chosen, models, precision, device)["logits"] - head

    monkeypatch.setattr(dispatch, "choose", lambda *_: ("triton", "a test"))
    assert logits("bf16", "cuda") == 2 * 2048 * 49152 * 2
    assert logits("fp32", "cuda") == 2 * 2048 * 49152 * 4
    monkeypatch.undo()
    assert logits("bf16", "cpu") == logits("fp32", "cpu") > 0
    with dispatch.use(linear_kl="reference"):
        assert logits("bf16", "cuda") == logits("bf16", "cpu")


@pytest.mark.parametrize(
    ("family", "mixer", "precision"),
    covering(
        ["llama", "qwen3", "ouro", "tied"],
        ["full", "gdn", "gdn_window", "deltanet", "kda", "mamba2", "retnet", "dsa", "nsa"],
        ["fp32", "bf16"],
    )
    + covering(["llama", "qwen3", "ouro"], ["dreamer"], ["fp32", "bf16"]),
)
def test_activations_are_near_what_autograd_keeps(family: str, mixer: str, precision: str) -> None:
    """The growth of saved memory with one more layer and with more tokens."""

    small = {"window_tokens": 16, "top_k_tokens": 24, "block_tokens": 8, "chosen_blocks": 2}

    def config_of(num_layers: int) -> LT2Config:
        spec = shape(family, num_layers)
        if mixer != "dreamer":
            return LT2Config.from_spec(spec, [mixer] * num_layers, **small)
        pools = {"entries": num_layers, "experts": 2 * num_layers, "slices": 2, "shared_size": 16}
        return LT2Config.from_spec(spec, dreamer=pools | {"top_entries": 1, "top_experts": 2})

    def kept(num_layers: int, length: int) -> int:
        config = config_of(num_layers)
        model = tiny_model(config.spec(), config.mixers, **small, dreamer=config.dreamer)
        return kept_bytes(model, length, precision)

    grown = (kept(2, 128) - kept(1, 128)) - (kept(2, 64) - kept(1, 64))
    layer = model_facts(config_of(1)).layers[0]
    predicted = layer.visits * saved_bytes(shape(family, 1), layer, precision)
    assert predicted == pytest.approx(grown / 64, rel=0.25)


def shape(family: str, num_layers: int) -> TeacherSpec:
    """One loop, proportions of a real model; tied ones two."""
    tied = family == "tied"
    return tiny_spec(
        "llama" if tied else family,
        tied_rank=24 if tied else None,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_layers=num_layers,
        num_loops=2 if tied else 1,
        layer_rope=("default",) * num_layers,
        layer_windows=(None,) * num_layers,
    )


def test_checkpointing_short_rows_and_few_layers_at_once_need_less() -> None:
    spec = deep()

    def peak(stage: str, **settings: Any) -> int:
        chosen = recipe(**{stage: settings})
        return sum(stage_memory(stage, chosen, models_of(chosen, spec), "fp32").values())

    assert peak("logits", gradient_checkpointing=True) < peak("logits")
    assert peak("logits", seq_len_tokens=512) < peak("logits")
    assert peak("align", layers_at_once=1) < peak("align")
    assert peak("align", micro_batch_rows=8) > peak("align")


def test_align_stays_below_one_and_a_half_teachers_for_a_large_one() -> None:
    """With few layers at once; a teacher of 1.4 billion parameters."""
    spec = deep(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        num_layers=24,
        layer_rope=("default",) * 24,
        layer_windows=(None,) * 24,
    )
    chosen = recipe(align={"layers_at_once": 2})
    parts = stage_memory("align", chosen, models_of(chosen, spec), "fp32")
    # On a GPU the mixers that wait are in the host's memory.
    assert sum(parts.values()) - parts["student"] < 1.5 * parts["teacher"]


def test_flops_of_a_dense_model_are_two_a_weight_and_token() -> None:
    spec = tiny_spec()
    facts = model_facts(LT2Config.from_spec(spec))
    weights = facts.parameters - facts.embedding_parameters + spec.vocab_size * spec.hidden_size
    without_attention = forward_flops(facts, spec, 0)
    assert without_attention == pytest.approx(2 * weights, rel=0.01)
    width = spec.num_attention_heads * spec.head_dim
    attention = forward_flops(facts, spec, 1000) - without_attention
    assert attention == pytest.approx(3 * 4 * width * 500)


def test_work_of_linear_mixers() -> None:
    """A token costs the same in rows of any length; corrections and decays a channel cost more."""
    spec, work = tiny_spec(), {}
    for kind in ("full", "deltanet", "gdn", "kda", "mamba2", "retnet"):
        facts = model_facts(LT2Config.from_spec(spec, [kind] * 3))
        weights = sum(2 * x.parameters for x in facts.layers)
        short, long = (forward_flops(facts, spec, n, head=False) for n in (100, 10_000))
        assert (short == long) == (kind != "full")
        work[kind] = short - weights
    assert work["mamba2"] == work["retnet"] < work["deltanet"] == work["gdn"] < work["kda"]
    # Of Mamba-2, a head and token: q.k and the sum over values of half a chunk of tokens, and with
    # the state one product that reads and one that writes; two operations each.
    width = spec.head_dim
    one = 2 * (2 * CHUNK_TOKENS / 2 * width + 2 * width * width)
    assert work["mamba2"] == pytest.approx(3 * spec.num_attention_heads * one)


def test_loops_multiply_the_work() -> None:
    once, four = (make(tiny_spec("ouro", num_loops=loops)).rows for loops in (1, 4))
    assert four[2].flops / once[2].flops == pytest.approx(4, rel=0.2)


def test_hours_follow_a_given_speed() -> None:
    made = make(tokens_per_second=1000.0)
    logits = next(row for row in made.rows if row.stage == "logits")
    assert logits.hours == pytest.approx(logits.tokens / 1000 / 3600)
    assert make(tokens_per_second=500.0).hours == pytest.approx(2 * made.hours)
    with pytest.raises(UserError, match="expected a number above 0"):
        make(tokens_per_second=0.0)


@pytest.mark.parametrize(
    ("method", "forwards"),
    [
        ("kl-fast", 2 * 4.5 + 2),  # 8 layers: N/2 + 1/2 each way, and one pass of each model
        ("kl-greedy", 2 * (4.5 + 2)),
        ("recall", 4.5 + 1),
    ],
)
def test_selection_cost_is_told(method: str, forwards: float) -> None:
    chosen = {"method": method, "recall_examples": 8, "direction": "both"}
    made = make(sections={"select": chosen})
    assert made.keep == 2
    assert made.selection is not None
    batches = {"recall": 8}.get(method, 16)
    assert made.selection.forwards == pytest.approx(batches * forwards)
    trained = make(sections={"select": {"method": "kl", "train_tokens": 1_000_000}}).selection
    assert trained is not None
    assert trained.trained_tokens == 8_000_000


def test_layers_that_are_listed_cost_no_selecting() -> None:
    """Whatever the method: the stage takes the list."""
    made = make(sections={"student": {"full_layers": [0, 5]}, "select": {"method": "kl-fast"}})
    assert made.selection == Cost()
    assert not any(line.startswith("Selecting") for line in summary_lines(made))


def test_gates_are_trained_once_for_all_layers() -> None:
    chosen = {"train_tokens": 1_048_576, "seq_len_tokens": 512}
    made = {m: make(sections={"select": chosen | {"method": m}}) for m in ("kl", "kl-gates")}
    assert made["kl-gates"].selection is not None
    assert made["kl-gates"].selection.trained_tokens == 1_048_576
    gates, each = (
        next(row for row in made[m].rows if row.stage == "select") for m in ("kl-gates", "kl")
    )
    assert (gates.tokens, gates.trained_parameters) == (1_048_576, 8)
    assert gates.flops < each.flops / 4  # eight layers, one at a time
    assert gates.memory["activations"] > 0
    assert gates.memory["optimiser"] == gates.memory["gradients"] == 0
    off = make(sections={"select": {"method": "kl-gates"}, "student": {"full_layers": 0}})
    assert next(row for row in off.rows if row.stage == "select").trained_parameters == 0


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("logits", {"micro_batch_rows": 8}),
        ("align", {"micro_batch_rows": 4}),
        ("longctx", {}),
        ("select", {"seq_len_tokens": 8192}),
        ("select", {"eval_tokens": 65_536}),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_that_makes_it_fit(
    stage: str, settings: dict[str, Any]
) -> None:
    off = {name: {"enabled": False} for name in ("align", "select", "logits", "longctx")}
    sections = off | {stage: settings}
    needed = make(sections=sections).rows[0].peak_bytes
    small = Machine("small", needed - 1, 1e12, 1e10)
    with pytest.raises(UserError) as caught:
        make(machine=small, sections=sections)
    message = str(caught.value)
    assert message.startswith(f"stage {stage} needs about")
    assert "\n" not in message
    words = [word for word in message.split() if "=" in word]
    assert words
    for word in words:  # what it names does make it fit
        (section, name), value = word.split("=")[0].split("."), json.loads(word.split("=")[1])
        sections[section] = sections[section] | {name: value}
    assert make(machine=small, sections=sections).rows[0].peak_bytes <= small.free_bytes


def test_where_no_setting_helps_it_says_what_takes_the_memory() -> None:
    tiny = Machine("tiny", 1 << 20, 1e12, 1e10)
    with pytest.raises(UserError, match=r"no setting .* is enough \(most of it is \w+\)"):
        make(machine=tiny)
    assert make(machine=tiny, check=False).rows


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "new"
    made = make(run_dir=folder)
    assert made.free_disk_bytes is not None
    assert not folder.exists()
    monkeypatch.setattr("ltconvert.distill.plan.free_disk", lambda _: made.disk_bytes - 1)
    with pytest.raises(UserError, match="choose an --out folder on a larger disk"):
        make(run_dir=folder)


def test_plain_form_is_json_and_complete() -> None:
    made = make()
    document = json.loads(json.dumps(made.to_dict()))
    assert [row["stage"] for row in document["rows"]] == [row.stage for row in made.rows]
    assert document["rows"][2]["peak_bytes"] == sum(document["rows"][2]["memory"].values())
    assert (
        document["student"]["cache_bytes_per_token"] < document["teacher"]["cache_bytes_per_token"]
    )


def test_table_shows_every_stage_and_what_is_free() -> None:
    console = Console(file=io.StringIO(), width=200)
    made = make()
    console.print(render_plan(made))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("align", "select", "logits", "longctx", "peak", "64.0 GiB free", "LT2 student"):
        assert words in text
    assert len(summary_lines(made)) == 7


@pytest.mark.parametrize(
    ("student", "words"),
    [
        ({"full_layers": 2}, "Student: LT2, gdn in 6, full in 2 of 8 layers; "),
        ({"mixer": "moda", "full_layers": 0}, "Student: MoDA, moda in 8 of 8 layers; "),
        (
            {"kind": "dreamer", "mixer": "full", "slices": 2, "top_experts": 3},
            "Student: Dreamer, one layer at 8 depths, where a token uses 2 of 8 attention "
            "projections and 3 of 16 experts (slices of an MLP: 2); ",
        ),
    ],
)
def test_it_says_what_kind_of_student_comes_out(student: dict[str, Any], words: str) -> None:
    made = make(sections={"student": student}, check=False)
    assert summary_lines(made)[1].startswith(words)
    assert made.to_dict()["kind"] == made.kind


@pytest.mark.parametrize("name", ["top_entries", "top_experts"])
def test_a_router_without_a_gradient_is_told(name: str) -> None:
    student = {"kind": "dreamer", "mixer": "full", "full_layers": 1.0, "shared_size": 0}
    assert not any("gradient" in line for line in make(sections={"student": student}).notes)
    told = [x for x in make(sections={"student": student | {name: 1}}).notes if "gradient" in x]
    assert len(told) == 1 and told[0].startswith(f"student.{name} 1")


def test_a_single_score_has_no_gradient_and_two_have_one() -> None:
    """One score over its own sum is 1, whatever it is."""
    for top in (1, 2):
        router = Router(8, 3, [0, 1, 2], slices=1, top=top, select_by="logits")
        weights_NK = router(torch.randn(5, 8), 1).weights_NK
        (weights_NK * torch.randn(5, top)).sum().backward()
        grads = [router.keys.grad, router.depth_logits.grad]
        assert all((grad.abs().max() > 1e-4) == (top > 1) for grad in grads)


def test_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "one.txt").write_text("a single document")
    (tmp_path / "odd.jsonl").write_text('{"body": "a"}\n')
    for name, message in {
        "none.jsonl": "no such file or folder",
        "blank.txt": "no document with text",
        "one.txt": "no document",
        "odd.jsonl": "neither a field 'text'",
    }.items():
        with pytest.raises(UserError, match=message):
            make(sections={"data": {"source": str(tmp_path / name)}})
    assert "not looked at" in make(sections={"data": {"source": "owner/name"}}).notes[0]


def test_decoding_that_the_student_does_not_have_is_refused() -> None:
    for settings in ({"exit_thresholds": [0.5]}, {"loop_cache": "last"}):
        with pytest.raises(UserError, match="leave it out"):
            make(sections={"eval": settings})
    make(tiny_spec("ouro", num_loops=2), sections={"eval": {"exit_thresholds": [0.5]}})


def test_a_recipe_that_does_not_fit_the_teacher_is_refused() -> None:
    with pytest.raises(UserError, match="8 physical layers"):
        make(sections={"student": {"full_layers": 9}})
    with pytest.raises(ValueError, match="loops"):
        make(sections={"student": {"loops": 2}})


def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    machine = measure("cpu", "fp32")
    assert machine.free_bytes == pytest.approx(free_memory(), rel=0.5)
    assert machine.flops > 1e8
    assert machine.bytes_per_second > 1e8
    assert free_disk(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_are_as_many_as_fit_and_pay_and_divide_a_step(device: str) -> None:
    chosen = recipe(logits={"seq_len_tokens": 512, "batch_tokens": 48 * 512})
    models = models_of(chosen, deep())

    def rows(free: float, **logits: Any) -> dict[str, int]:
        sections = {"logits": chosen.logits.model_dump() | logits}
        return choose_rows(recipe(**sections), models, "fp32", device, int(free))

    plenty = rows(1e15)
    assert plenty["logits"] == {"cpu": 4, "cuda": 48}[device]
    assert rows(1e15, micro_batch_rows=3)["logits"] == 3
    assert rows(0)["logits"] == 1
    one = sum(stage_memory("logits", chosen, models, "fp32", device).values())
    some = rows(one / SHARE_OF_MEMORY)["logits"]
    assert some == 1
    four = with_rows(chosen, {"logits": 4})
    need = sum(stage_memory("logits", four, models, "fp32", device).values())
    assert rows(need / SHARE_OF_MEMORY + 1)["logits"] == 4
    assert "select" not in plenty


def test_rows_leave_the_length_of_a_step_to_the_recipe() -> None:
    for batch in (49_152, 32_768, 3 * 512):
        chosen = recipe(align={"seq_len_tokens": 512, "batch_tokens": batch})
        rows = choose_rows(chosen, models_of(chosen, deep()), "fp32", "cuda", 1 << 50)
        assert plan_steps(with_rows(chosen, rows).align).step_tokens == batch


def test_rows_of_a_run_that_has_begun_are_kept(tmp_path: Path) -> None:
    chosen = recipe(align={"micro_batch_rows": 2})
    begun = with_rows(chosen, {"logits": 8, "longctx": 4})
    (tmp_path / RECIPE_FILE).write_text(recipes.dump(begun))
    assert recorded_rows(chosen, tmp_path) == {"logits": 8, "longctx": 4}
    assert recorded_rows(chosen, tmp_path / "new") == {}
