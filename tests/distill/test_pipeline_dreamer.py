"""Dreamer students through the stages: routing is released, balanced, and resumed where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from pipeline_case import convert

from ltconvert import recipes
from ltconvert.convert.checkpoint import load_student
from ltconvert.convert.students.dreamer.router import Routes
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher
from ltconvert.convert.transfer import build_student, student_options
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.decode_bench import bench
from ltconvert.distill.evaluation.decode_models import random_model
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.report import summary
from ltconvert.distill.reporting.run_folder import read_run
from ltconvert.distill.reporting.run_sections import layers
from ltconvert.distill.resume import TrainState, load_checkpoint, save_checkpoint
from ltconvert.distill.routing import Release, loads
from ltconvert.errors import UserError
from ltconvert.recipes.stages import LogitsSettings
from ltconvert.recipes.student import StudentSettings

STUDENT = {"kind": "dreamer", "mixer": "full", "full_layers": 1.0, "slices": 2, "top_experts": 3}


FAMILY = "ouro"  # of the case


def test_it_starts_at_the_teacher_and_ends_with_routing_of_its_own(
    case: Path, teacher: Teacher, tmp_path: Path
) -> None:
    result = convert(teacher, case, tmp_path, student=STUDENT)
    assert [row["stage"] for row in result.rows] == ["start", "logits", "longctx"]
    assert result.rows[0]["kl"] < 1e-7
    loaded, ids = load_student(result.student_dir), tokens(1, 9)
    assert loaded.model.dreamer.released() == 1.0
    with torch.no_grad():
        found = loaded(ids)
        assert torch.equal(result.student(ids).logits, found.logits)
    assert len(found.routes) == 2 * 3  # loops times layers
    assert loaded.model.dreamer.expert_router.keys.any()


def dreamer(spec: Any, **settings: Any) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    """A tiny teacher and its Dreamer."""
    teacher = tiny_model(spec).requires_grad_(False)
    options = student_options(spec, StudentSettings(**STUDENT, **settings).model_dump())
    return teacher, build_student(teacher, ["full"] * spec.num_layers, options)


def batch_of(length: int) -> Batch:
    ids = tokens(1, length)
    return Batch(ids, torch.zeros_like(ids), ids.roll(-1, 1), torch.ones_like(ids).bool())


def test_routing_is_released_with_the_steps() -> None:
    teacher, student = dreamer(tiny_spec())
    settings = LogitsSettings(release_share=0.4, ce_weight=0.5)
    objective, layer = LogitsObjective(teacher, student, settings), student.model.dreamer
    for progress, wanted in ((0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (0.9, 1.0)):
        values = objective.train_step(batch_of(8), lambda loss: loss.backward(), progress)
        assert layer.released() == pytest.approx(wanted)
        assert values.keys() == {"loss", "kl", "ce", "max_load"}
    groups = {group["name"]: group["params"] for group in objective.parameter_groups()}
    assert {id(p) for p in groups["mixers"]} == {id(p) for p in layer.new_parameters()}
    assert layer.expert_router.load.sum() == 3 * 3 * 8  # of the last step: layers, experts, tokens


def test_biases_move_once_a_step_against_the_load_error() -> None:
    _, student = dreamer(tiny_spec())
    release, router = Release(student.model.dreamer, 0.0, 0.5), student.model.dreamer.expert_router
    chosen_NK = torch.tensor([[0, 1, 2], [0, 1, 3]])
    routes = Routes(chosen_NK, torch.ones(2, 3), torch.ones(2))
    single = Routes(chosen_NK[:, :2], torch.ones(2, 2), torch.ones(2))
    release.begin(0.0)
    for _ in range(2):  # two micro-batches of one step
        release.begin(0.0)
        values = release.count([(single, routes)], None)
    assert values["max_load"] == 2.0  # loads 2 2 1 1 0 0
    assert not router.balance.any()
    release.begin(0.5)
    assert router.balance.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.5, 0.5]
    assert not router.load.any()


def test_padding_is_no_load_and_nulls_have_none() -> None:
    routes = Routes(torch.tensor([[0, 1], [0, 2], [3, 0]]), torch.ones(3, 2), torch.ones(3))
    keep_BT = torch.tensor([[True, False, True]])
    assert loads(routes, keep_BT, 5).tolist() == [2.0, 1.0, 0.0, 1.0, 0.0]
    assert loads(routes, keep_BT, 2).tolist() == [2.0, 1.0]


def test_where_all_choose_nulls_nothing_is_loaded() -> None:
    _, student = dreamer(tiny_spec())
    release, experts = (
        Release(student.model.dreamer, 0.0, 0.5),
        student.model.dreamer.config.experts,
    )
    routes = Routes(torch.full((2, 1), experts), torch.ones(2, 1), torch.ones(2))
    assert release.count([(routes, routes)], None)["max_load"] == 0.0


def test_a_checkpoint_holds_loads_and_biases(tmp_path: Path) -> None:
    """A resumed step moves the biases by what the step before it has counted."""
    optimisers, found = [], []
    for resumed in (False, True):
        teacher, student = dreamer(tiny_spec())
        objective = LogitsObjective(teacher, student, LogitsSettings(release_share=0.0))
        optimisers.append(torch.optim.SGD(objective.parameter_groups()[0]["params"], lr=0.1))
        if resumed:
            load_checkpoint(tmp_path / "checkpoint", student, optimisers[-1], {})
        else:
            objective.train_step(batch_of(8), lambda loss: None, 0.1)
            state = TrainState(1, 0.0, {}, {}, {})
            save_checkpoint(tmp_path, state, student, optimisers[-1])
        objective.train_step(batch_of(8), lambda loss: None, 0.2)
        found.append(student.model.dreamer.expert_router.balance.clone())
    assert found[0].any() and torch.equal(*found)


def test_the_recipe_is_a_dreamer_whose_experts_can_hold_a_whole_mlp() -> None:
    student = recipes.resolve("dreamer", budget="demo").student
    options = student_options(tiny_spec(), student.model_dump())["dreamer"]
    assert options["entries"] == 3 and options["experts"] == 12 == 3 * options["slices"]
    assert options["top_experts"] >= options["slices"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "dreamer"}, "needs student.mixer full, got gdn"),
        (STUDENT | {"sdpa_gate": True}, "needs student.sdpa_gate False"),
        (STUDENT | {"loops": 2, "loop_start": "average"}, "needs student.loop_start None"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudentSettings(**given)


def test_sizes_that_do_not_fit_the_teacher_are_refused() -> None:
    with pytest.raises(UserError, match=r"48 wide, which student\.slices 5 does not divide"):
        settings = StudentSettings(**{**STUDENT, "slices": 5, "top_experts": 5})
        student_options(tiny_spec(), settings.model_dump())
    with pytest.raises(UserError, match="tensors of each loop's own"):
        dreamer(tiny_spec(num_loops=2, tied_rank=2))


def test_a_dreamer_is_no_teacher(case: Path, teacher: Teacher, tmp_path: Path) -> None:
    _, student = dreamer(tiny_spec("ouro", num_loops=2))
    given = Teacher(**{**vars(teacher), "model": student})
    with pytest.raises(UserError, match="is a Dreamer"):
        convert(given, case, tmp_path)


def test_the_report_names_pools_in_place_of_layers(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    pools = {"top_entries": 2, "entries": 7, "top_experts": 3, "experts": 14, "slices": 2}
    config = {"mixers": ["full"] * 7, "dreamer": pools}
    (tmp_path / "student" / "config.json").write_text(json.dumps(config))
    run = read_run(tmp_path)
    wanted = "uses 2 of 7 attention projections and 3 of 14 experts"
    assert wanted in summary(run)[0] and wanted in layers(run).text[0]


def test_its_decoding_is_timed_released() -> None:
    _, student = dreamer(tiny_spec())
    configs = {"teacher": LT2Config.from_spec(tiny_spec()), "student": student.config}
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "steps": 1}
    rows = list(bench(configs, [8], [1], **cpu))
    assert [(row["model"], row["path"]) for row in rows] == [
        ("teacher", "fast"),
        ("student", "fast"),
    ]
    assert all(row["ms_per_step"] > 0 for row in rows)
    random = random_model(student.config, torch.device("cpu"), torch.float32)
    assert random.model.dreamer.released() == 1.0
