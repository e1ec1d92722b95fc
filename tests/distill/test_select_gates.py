"""Method `kl-gates`: its budget, what it finds, what it leaves alone, how it is resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_case import make_case, make_recipe
from selection_case import kl, packed, pair, probe

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.convert.transfer import build_student
from ltconvert.distill import select
from ltconvert.distill.gradients import NotFinite
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.optim import plan_steps
from ltconvert.distill.resume import trainable
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.selection import kl_gates
from ltconvert.distill.selection.kl_gates import Gates, GatesObjective, gated, shares
from ltconvert.distill.selection.result import Selection
from ltconvert.distill.selection.short_training import GATE_STEPS, gate_settings
from ltconvert.distill.stage import StageInputs
from ltconvert.distill.trainer import CHECKPOINT_STEPS_VARIABLE
from ltconvert.errors import UserError
from ltconvert.recipes.stages import LogitsSettings, SelectSettings


@pytest.mark.parametrize("total", [1, 3, 4.5, 7])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_gates_add_up_to_the_budget(total: float, spread: float) -> None:
    scores = spread * torch.randn(
        8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    gates = shares(scores, total)
    assert float(gates.sum()) == pytest.approx(total, abs=1e-6)
    # One shift for all: the differences of the gates' logits are those of the scores.
    if spread <= 1:
        torch.testing.assert_close(torch.logit(gates).diff(), scores.diff(), atol=1e-6, rtol=1e-6)


def test_the_gradient_of_gates_is_that_of_finite_differences() -> None:
    scores = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.autograd.gradcheck(lambda x: shares(x, 2.0), (scores.requires_grad_(),))


def spoiled(teacher: LT2ForCausalLM, layers: list[int]) -> LT2ForCausalLM:
    """A student whose mixers are the teacher's attention, but for noise in some layers."""
    student = build_student(teacher, ["gdn"] * len(teacher.model.layers), share=True).eval()
    generator = torch.Generator().manual_seed(4)
    for index, layer in enumerate(student.model.layers):
        layer.mixer = copy.deepcopy(teacher.model.layers[index].mixer)
        if index in layers:
            for parameter in layer.mixer.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += parameter.std() * noise
    return student.requires_grad_(False)


@pytest.mark.parametrize("bad", [[0], [3], [1, 4]], ids=str)
@pytest.mark.parametrize(("family", "loops"), [("llama", 1), ("ouro", 2)])
def test_layers_that_matter_are_found_within_the_budget(
    family: str, loops: int, bad: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 5
    size = {"num_layers": count, "layer_rope": ("default",) * count}
    teacher, _ = pair(family, num_loops=loops, layer_windows=(None,) * count, **size)
    student = spoiled(teacher, bad)
    assert kl(teacher, student, [packed()]) > 0.01
    given = probe(teacher, student, [], keep=len(bad), train_tokens=40 * 34)
    given.inputs.recipe = make_recipe(Path())
    drawn: list[float] = []

    def train(objective: Any, settings: LogitsSettings, *_: Any) -> Any:
        """A plain loop in place of the trainer's."""
        optimiser = torch.optim.Adam([objective.gates.scores], lr=settings.lr, betas=(0.9, 0.95))
        for step in range(40):
            torch.manual_seed(step)
            batch = packed(seed=step)
            found = objective.train_step(batch, torch.Tensor.backward, step / 40)
            drawn.append(float(objective.gates.values_N.detach().sum()))
            optimiser.step()
            optimiser.zero_grad()
        return type("Trained", (), {"tokens": 1360, "seconds": 0.0, "metrics": found})

    monkeypatch.setattr(given.inputs, "train", train)
    scores = kl_gates.rank(given)
    assert sorted(scores.ranking[: len(bad)]) == bad
    assert drawn == pytest.approx([len(bad)] * 40, abs=1e-4)
    gates = scores.columns["gate"]
    assert sum(gates) == pytest.approx(len(bad), abs=1e-4)
    assert min(gates[layer] for layer in bad) > 0.9


def test_nothing_but_scores_trains_and_the_student_is_as_before() -> None:
    teacher, student = pair("ouro", num_loops=2)
    student.requires_grad_(False)
    mixers = [layer.mixer for layer in student.model.layers]
    before = {name: value.clone() for name, value in student.state_dict().items()}
    gradients = []
    for checkpointing in (False, True):
        gates = Gates(3, 1)
        with gated(probe(teacher, student, []), gates, checkpointing=checkpointing) as both:
            objective = GatesObjective(teacher, both, LogitsSettings(loop_warmup_share=0), gates)
            assert [p is gates.scores for p in trainable(objective.module).values()] == [True]
            torch.manual_seed(0)
            objective.train_step(packed(), torch.Tensor.backward, 0.0)
        gradients.append(gates.scores.grad)
    assert bool(gradients[0].abs().min() > 0)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert [layer.mixer for layer in student.model.layers] == mixers
    assert not student.training and not student.model.gradient_checkpointing
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert all(p.grad is None for model in (teacher, student) for p in model.parameters())


def test_gates_at_their_ends_are_either_model() -> None:
    teacher, student = pair()
    settings, batch, gates = LogitsSettings(loop_warmup_share=0), packed(), Gates(3, 1)

    def loss(model: LT2ForCausalLM) -> float:
        objective = GatesObjective(teacher, model, settings, gates)
        with torch.no_grad():  # the parent's step: no gates are drawn
            found = LogitsObjective.train_step(objective, batch, lambda _: None, 0.0)
        return float(found["kl"])

    alone, found = loss(student), []
    with gated(probe(teacher, student, []), gates, checkpointing=False) as both:
        for value in (0.0, 1.0):
            gates.values_N = torch.full((3,), value)
            found.append(loss(both))
    assert alone > 0.01
    assert found == pytest.approx([alone, 0.0], abs=1e-6)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> tuple[Path, Teacher]:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer, "ouro")
    return folder, load_teacher(str(folder / "teacher"))


def inputs_of(case: tuple[Path, Teacher]) -> StageInputs:
    folder, teacher = case
    student = build_student(teacher.model, ["gdn"] * 3, share=True)
    return StageInputs(
        teacher=teacher,
        recipe=make_recipe(folder),
        student=student.eval().requires_grad_(False),
        tokenizer=teacher.tokenizer,
        log=RunLog(None),
        precision="fp32",
        device=torch.device("cpu"),
        seed=2,
    )


CHOSEN = SelectSettings(method="kl-gates", train_tokens=640, seq_len_tokens=32)


def test_a_killed_run_ends_like_an_undisturbed_one(
    case: tuple[Path, Teacher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    select.run(CHOSEN, inputs, tmp_path / "whole")
    monkeypatch.setenv(CHECKPOINT_STEPS_VARIABLE, "1")
    noted, steps = RunLog.metrics, []

    def killed(self: RunLog, stage: str, step: int, values: Any) -> None:
        noted(self, stage, step, values)
        steps.append(step)
        if step == 7 and len(steps) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "metrics", killed)
    with pytest.raises(KeyboardInterrupt):
        select.run(CHOSEN, inputs, tmp_path / "cut")
    assert (tmp_path / "cut" / "gates" / "checkpoint").is_dir()
    select.run(CHOSEN, inputs, tmp_path / "cut")
    assert steps == [*range(1, 8), *range(7, 21)]
    found = [
        Selection.load(tmp_path / name / "selection.json").to_dict() for name in ("whole", "cut")
    ]
    for document in found:
        document["cost"].pop("seconds")
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["selection.json"]
    assert found[0]["cost"]["trained_tokens"] == 640


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NotFinite("step 3: the loss is nan", "select"), "step 3: the loss is nan; choose another"),
        (UserError("the text is too short; lower seq_len_tokens"), "lower seq_len_tokens$"),
    ],
)
def test_only_what_no_rate_can_mend_asks_for_another_method(
    case: tuple[Path, Teacher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: UserError,
    line: str,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StageInputs, "train", broken)
    with pytest.raises(UserError, match=line):
        select.run(CHOSEN, inputs_of(case), tmp_path)


def test_scores_that_are_trained_are_not_trained_again(
    case: tuple[Path, Teacher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    monkeypatch.setattr(Selection, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        select.run(CHOSEN, inputs, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(StageInputs, "train", None)  # calling it would fail
    select.run(CHOSEN, inputs, tmp_path)
    assert (tmp_path / "selection.json").is_file()


@pytest.mark.parametrize("tokens", [2_000_000, 32 * 1024, 2048])
def test_small_steps_where_rows_allow(tokens: int) -> None:
    settings = gate_settings(LogitsSettings(), SelectSettings(train_tokens=tokens))
    plan, wanted = plan_steps(settings), min(GATE_STEPS, tokens // 512)
    assert wanted <= plan.steps <= 1.25 * wanted
    assert plan.steps * plan.step_tokens >= tokens
    assert settings.loop_warmup_share == 0
