"""The stage `select`: what it writes, refuses and resumes, the trained method, the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_case import make_case, make_recipe
from rich.console import Console

from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.convert.transfer import build_student, restore_full
from ltconvert.distill import select
from ltconvert.distill.data import PackedStream
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection.cost import batch_shape, most_cost
from ltconvert.distill.selection.kl_trained import outside, ranked
from ltconvert.distill.selection.render import summary_lines
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.selection.short_training import short_settings, train_layer
from ltconvert.distill.stage import StageInputs
from ltconvert.errors import UserError
from ltconvert.recipes.stages import SelectSettings

ALL_METHODS = ["kl", "kl-fast", "kl-greedy", "kl-gates", "recall", "recall-greedy", "uniform"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> tuple[Path, Teacher]:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer)
    return folder, load_teacher(str(folder / "teacher"))


def inputs_of(case: tuple[Path, Teacher], **sections: dict[str, Any]) -> StageInputs:
    """What the stage gets from the one before."""
    folder, teacher = case
    student = build_student(teacher.model, ["gdn"] * 3, share=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in student.model.layers:
            for parameter in layer.mixer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return StageInputs(
        teacher=teacher,
        recipe=make_recipe(folder, **sections),
        student=student.eval().requires_grad_(False),
        tokenizer=teacher.tokenizer,
        log=RunLog(None),
        precision="fp32",
        device=torch.device("cpu"),
        seed=2,
    )


def settings(method: str = "kl-fast", **changes: Any) -> SelectSettings:
    """A few rows; recall needs longer ones."""
    plain: dict[str, Any] = {
        "method": method,
        "eval_tokens": 256,
        "seq_len_tokens": 400 if method.startswith("recall") else 32,
        "recall_examples": 4,
        "train_tokens": 640,
        "stable_rounds": 3,
    }
    return SelectSettings(**plain | changes)


def plain(selection: Selection) -> dict[str, Any]:
    """Everything but the time."""
    found = selection.to_dict()
    found["cost"].pop("seconds")
    return found


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_writes_a_selection_that_can_be_read(
    case: tuple[Path, Teacher], tmp_path: Path, method: str
) -> None:
    inputs = inputs_of(case, student={"full_layers": 2})
    result = select.run(settings(method), inputs, tmp_path)
    assert result.student is inputs.student
    assert result.student.config.mixers == ["gdn"] * 3
    document = json.loads((tmp_path / "selection.json").read_text())
    selection = Selection.load(tmp_path / "selection.json")
    assert selection.to_dict() == document
    assert selection.method == method
    assert sorted(selection.ranking) == [0, 1, 2]
    assert selection.chosen == sorted(selection.ranking[:2]) == result.facts["chosen"]
    assert (
        document["set"]
        == f"--set student.full_layers=[{selection.chosen[0]},{selection.chosen[1]}]"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["selection.json"]
    if method.endswith("-greedy"):
        assert any("Stability: 2 picks" in line for line in summary_lines(selection))


def test_every_process_scores_the_same_rows(
    case: tuple[Path, Teacher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would rank, and in the method ``kl`` train, other layers than its peers."""
    inputs = inputs_of(case)
    alone = select.read_batches(settings(), inputs)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        found = select.read_batches(settings(), inputs)
        for mine, theirs in zip(alone, found, strict=True):
            assert torch.equal(mine.input_ids_BT, theirs.input_ids_BT)


def test_a_list_is_taken_whatever_the_method(case: tuple[Path, Teacher], tmp_path: Path) -> None:
    inputs = inputs_of(case, student={"full_layers": [0, 2]})
    select.run(settings("kl"), inputs, tmp_path)
    selection = Selection.load(tmp_path / "selection.json")
    assert (selection.method, selection.chosen, selection.cost.tokens) == ("list", [0, 2], 0)


@pytest.mark.parametrize(("asked", "chosen"), [(0, []), (1.0, [0, 1, 2])])
def test_none_and_all_need_no_scores(
    case: tuple[Path, Teacher], tmp_path: Path, asked: Any, chosen: list[int]
) -> None:
    select.run(settings("kl"), inputs_of(case, student={"full_layers": asked}), tmp_path)
    assert Selection.load(tmp_path / "selection.json").chosen == chosen


def test_method_list_without_a_list_is_refused(case: tuple[Path, Teacher], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"full_layers is 1; name the layers"):
        select.run(settings("list"), inputs_of(case), tmp_path)
    with pytest.raises(UserError, match=r"teacher has 3 physical layers"):
        select.run(settings(), inputs_of(case, student={"full_layers": 7}), tmp_path)


@pytest.mark.parametrize("method", ["kl", "kl-fast", "recall"])
def test_a_killed_selection_ends_like_an_undisturbed_one(
    case: tuple[Path, Teacher], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    select.run(settings(method), inputs, tmp_path / "whole")
    saves = []
    save = select.Progress.save

    def killed(self: Any, state: dict[str, Any]) -> None:
        save(self, state)
        saves.append(state)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(select.Progress, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        select.run(settings(method), inputs, tmp_path / "cut")
    assert not (tmp_path / "cut" / "selection.json").exists()
    select.run(settings(method), inputs, tmp_path / "cut")
    found = [plain(Selection.load(tmp_path / name / "selection.json")) for name in ("whole", "cut")]
    assert found[0] == found[1]


def test_partial_scores_of_other_settings_are_not_used(
    case: tuple[Path, Teacher], tmp_path: Path
) -> None:
    inputs = inputs_of(case)
    partial = {"fingerprint": {"select": "another"}, "state": {"history": [[0]] * 99}}
    (tmp_path / select.PARTIAL_FILE).write_text(json.dumps(partial))
    select.run(settings(), inputs, tmp_path)
    assert len(Selection.load(tmp_path / "selection.json").history) < 99


def test_a_finished_selection_is_not_made_again_unless_settings_change(
    case: tuple[Path, Teacher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    select.run(settings(), inputs, tmp_path)
    before = (tmp_path / "selection.json").read_bytes()
    monkeypatch.setattr(select, "make_probe", None)  # calling it would fail
    (tmp_path / select.PARTIAL_FILE).touch()  # as a kill leaves it
    select.run(settings(), inputs, tmp_path)
    assert not (tmp_path / select.PARTIAL_FILE).exists()
    assert (tmp_path / "selection.json").read_bytes() == before
    monkeypatch.undo()
    select.run(settings(direction="restore"), inputs, tmp_path)
    assert Selection.load(tmp_path / "selection.json").direction == "restore"


@pytest.mark.parametrize("text", ["{", "{}", '{"set": 1, "cost": {}}', "[]"])
def test_a_broken_selection_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "selection.json"
    path.write_text(text)
    with pytest.raises(UserError, match="remove it and select again"):
        Selection.load(path)
    with pytest.raises(UserError, match="run the select stage first"):
        Selection.load(tmp_path / "none.json")


def test_trained_kl_is_that_of_a_distillation_written_out(
    case: tuple[Path, Teacher], tmp_path: Path
) -> None:
    """One layer's curve against a plain loop with AdamW on the same rows."""
    inputs, chosen = inputs_of(case), settings("kl", train_tokens=320)
    probe = select.make_probe(chosen, inputs, tmp_path, keep=1)
    short, steps = short_settings(inputs.recipe.logits, chosen)
    assert (short.seq_len_tokens, steps, short.loop_warmup_share) == (32, 10, 0.0)
    kls = train_layer(probe, 1, short, steps, 5, lambda _: False)
    student = build_student(inputs.teacher.model, ["gdn"] * 3)
    student.load_state_dict(inputs.student.state_dict())
    restore_full(student, inputs.teacher.model, [1])
    objective = LogitsObjective(inputs.teacher.model, student, short)
    groups = objective.parameter_groups()
    optimiser = torch.optim.AdamW(
        [{"params": g["params"], "lr": g["lr"]} for g in groups],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    stream = PackedStream(
        inputs.recipe.data, inputs.tokenizer, split="train", seq_len_tokens=32, rows=1, seed=2
    )
    values = []
    for _ in range(steps):
        values.append(float(objective.train_step(next(stream), torch.Tensor.backward, 0.0)["kl"]))
        torch.nn.utils.clip_grad_norm_(student.parameters(), short.clip_norm)
        optimiser.step()
        optimiser.zero_grad()
    parts = [(values[i] + values[i + 1]) / 2 for i in range(0, 10, 2)]
    assert kls == pytest.approx(parts, rel=1e-4)
    assert kls[-1] != pytest.approx(kls[0], rel=1e-3)


def test_trained_layers_stop_once_they_are_out_and_cost_less(
    case: tuple[Path, Teacher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    select.run(settings("kl", stable_rounds=2), inputs, tmp_path / "early")
    select.run(settings("kl", stable_rounds=99), inputs, tmp_path / "whole")
    early, whole = (Selection.load(tmp_path / x / "selection.json") for x in ("early", "whole"))
    assert early.stopped_early
    assert not whole.stopped_early
    assert whole.cost.trained_tokens == 3 * 640
    assert early.cost.trained_tokens < whole.cost.trained_tokens
    for layer in range(3):  # the same rows, the same seed: the same curve as far as it goes
        parts = early.facts["curves"][layer]
        assert parts == whole.facts["curves"][layer][: len(parts)]
    assert not list((tmp_path / "early").glob("layer-*"))


def test_a_layer_is_out_when_enough_others_were_better_often_enough() -> None:
    better, worse, short = [1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [1.0]
    assert not outside([2.0], [better], keep=1, stable_rounds=2)
    assert outside([2.0, 2.0], [better], keep=1, stable_rounds=2)
    assert not outside([2.0, 2.0], [worse], keep=1, stable_rounds=2)
    assert not outside([2.0, 2.0], [better, worse], keep=2, stable_rounds=2)
    assert not outside([2.0, 0.5], [better], keep=1, stable_rounds=2)
    assert not outside([2.0, 2.0], [short], keep=1, stable_rounds=2)
    assert ranked({0: better, 1: short, 2: worse}) == [0, 2, 1]


@pytest.mark.parametrize("method", ["kl-fast", "kl-greedy", "recall", "kl", "kl-gates"])
@pytest.mark.parametrize("direction", ["both", "remove"])
def test_the_cost_told_before_is_the_cost_paid(
    case: tuple[Path, Teacher], tmp_path: Path, method: str, direction: str
) -> None:
    inputs = inputs_of(case, student={"full_layers": 1})
    chosen = settings(method, direction=direction, stable_rounds=99, train_tokens=320)
    select.run(chosen, inputs, tmp_path)
    paid = Selection.load(tmp_path / "selection.json").cost
    told = most_cost(chosen, inputs.teacher.model.model.schedule, keep=1)
    assert told.tokens == paid.tokens
    assert told.forwards == pytest.approx(paid.forwards)
    assert told.forward_tokens == pytest.approx(paid.forward_tokens)
    assert told.trained_tokens == paid.trained_tokens


def test_batches_leave_room_to_settle_and_do_not_outgrow_memory() -> None:
    rows, batches = batch_shape(SelectSettings())
    assert rows * 512 <= 4096
    assert batches >= 2 * (SelectSettings().stable_rounds + 1)
    assert rows * batches * 512 == SelectSettings().eval_tokens
    assert batch_shape(SelectSettings(eval_tokens=10)) == (1, 1)


def test_short_distillation_has_a_step_in_every_part() -> None:
    from ltconvert.recipes.stages import LogitsSettings

    for tokens in (2_000_000, 4096, 100):
        short, steps = short_settings(LogitsSettings(), SelectSettings(train_tokens=tokens))
        assert steps >= min(10, tokens // 512) or steps == 1
        assert plan_steps(short).steps == steps + 1
        assert short.schedule == "constant"


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_table_shows_rank_bars_cost_and_the_setting(
    case: tuple[Path, Teacher], tmp_path: Path, method: str
) -> None:
    select.run(settings(method), inputs_of(case), tmp_path)
    selection = Selection.load(tmp_path / "selection.json")
    console = Console(file=io.StringIO(), width=140)
    console.print(select.render_selection(selection))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert selection.setting in text
    assert f"Layers by {method}" in text
    if method != "uniform":
        assert "█" in text
        assert "Cost: " in text
    assert ("no full layer on answers: " in text) == (method == "recall-greedy")
    lines = [line for line in text.splitlines() if line.count("│") > 2 or line.count("┃") > 2]
    assert len(lines) == 3 + 1
