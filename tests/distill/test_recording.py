"""Recorded steps: the same numbers as plain ones, new recordings where the work changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import scatter, tiny_model, tiny_spec, tokens
from toy_training import ToyModel, ToyObjective, make_settings, run_toy, write_corpus

from ltconvert.convert.transfer import build_student
from ltconvert.distill import recording, trainer
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.optim import build_optimizer
from ltconvert.distill.precision import autocast
from ltconvert.distill.recording import PLAIN, Passes, wanted
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import LogitsSettings

Values = dict[str, torch.Tensor]


class Recorder:
    """A recording as CUDA makes it: nothing runs until it is replayed, values keep their place."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(
        self, launch: Callable[[], Values], device: torch.device
    ) -> tuple[Values, Callable[[], None]]:
        assert device.type == "cpu"
        self.made += 1
        values: Values = {}

        def replay() -> None:
            self.replayed += 1
            for name, value in launch().items():
                values.setdefault(name, torch.empty_like(value)).copy_(value)

        return values, replay


def fail(reason: str) -> None:
    raise AssertionError(reason)


def packed(seed: int = 0, *, padded: bool | None = False) -> Batch:
    """Two rows of two documents."""
    ids_BT = tokens(2, 16, seed=seed)
    segments_BT = torch.stack([(torch.arange(16) >= cut).int() for cut in (5, 9)])
    keep_BT = torch.ones(2, 16, dtype=torch.bool)
    return Batch(ids_BT, segments_BT, ids_BT.roll(-1, 1), keep_BT, padded)


class Counted:
    """An objective whose work is the number of whole tenths that are done."""

    def work(self, progress: float) -> int | None:
        return None if progress < 0.1 else int(10 * progress)


def test_only_equal_work_in_a_row_is_recorded() -> None:
    record, seen = Recorder(), []
    run = lambda batch, _: seen.append(batch) or {"loss": batch.input_ids_BT.sum().float()}  # noqa: E731
    passes = Passes(Counted(), on=True, say=fail, record=record)  # type: ignore[arg-type]
    for _ in range(5):
        passes(run, packed(), 0.0)  # not to be recorded
    assert (record.made, record.replayed, passes.holds) == (0, 0, False)
    for _ in range(PLAIN):
        passes(run, packed(), 0.1)
    assert (record.made, passes.holds) == (0, True)
    passes(run, packed(), 0.1)
    passes(run, packed(), 0.19)
    assert (record.made, record.replayed) == (1, 2)
    passes(run, packed(), 0.2)  # other work
    passes(run, packed(padded=True), 0.2)  # other forms of a batch
    assert (record.made, record.replayed) == (1, 2)
    for seed in range(PLAIN + 2):
        loss = passes(run, packed(seed), 0.2)["loss"]
        assert float(loss) == packed(seed).input_ids_BT.sum()
    assert (record.made, record.replayed) == (2, 4)
    passes(run, packed(), 0.0)
    assert passes._recording is None  # which would hold the memory of a pass


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_ends_at_the_same_weights(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    torch.manual_seed(5)
    model = ToyModel(dropout=0.0)
    settings = make_settings(steps=8, accumulation=accumulation)
    found = {}
    for name in ("plain", "recorded"):
        record, own = Recorder(), copy.deepcopy(model)
        monkeypatch.setattr(recording, "_cuda_graph", record)
        monkeypatch.setattr(recording, "wanted", lambda *_, on=name == "recorded": on)
        (tmp_path / name).mkdir()
        run_toy(tmp_path / name, tiny_tokenizer, settings, objective=ToyObjective(own))
        found[name] = own.state_dict()
        replays = 0 if name == "plain" else 8 * accumulation - PLAIN
        assert (record.made, record.replayed) == (int(name == "recorded"), replays)
    for key, value in found["plain"].items():
        assert torch.equal(value, found["recorded"][key]), key


@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_of_a_run_outlives_it(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Neither optimiser nor recording, which hold as much as the model, nor gradients."""
    made: list[weakref.ref[Any]] = []

    def build(*arguments: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(*arguments)
        made.append(weakref.ref(optimizer))
        return optimizer

    monkeypatch.setattr(trainer, "build_optimizer", build)
    monkeypatch.setattr(recording, "_cuda_graph", Recorder())
    monkeypatch.setattr(recording, "wanted", lambda *_: recorded)
    write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "run").mkdir()
    objective = ToyObjective(ToyModel(dropout=0.0))
    gc.collect()
    gc.disable()  # what goes in circles would wait for it
    try:
        run_toy(tmp_path / "run", tiny_tokenizer, make_settings(steps=6), objective=objective)
        assert made[0]() is None
    finally:
        gc.enable()
    assert all(p.grad is None for p in objective.module.parameters())


def test_a_run_that_died_goes_on_recorded(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_cuda_graph", Recorder())
    monkeypatch.setattr(recording, "wanted", lambda *_: True)
    monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", "3")
    write_corpus(tmp_path / "corpus.jsonl")
    torch.manual_seed(5)
    model, settings = ToyModel(dropout=0.0), make_settings(steps=9)

    def die(call: int) -> None:
        if call == 2 * 5 + 1:
            raise RuntimeError("in the middle of a step")

    found = {}
    for name, before in (("whole", None), ("died", die)):
        own = copy.deepcopy(model)
        (tmp_path / name).mkdir()
        if before is not None:
            with pytest.raises(RuntimeError, match="middle of a step"):
                run_toy(
                    tmp_path / name, tiny_tokenizer, settings, objective=ToyObjective(own, before)
                )
            own = copy.deepcopy(model)
        run_toy(tmp_path / name, tiny_tokenizer, settings, objective=ToyObjective(own))
        found[name] = own.state_dict()
    for key, value in found["whole"].items():
        assert torch.equal(value, found["died"][key]), key


def test_goes_on_without_where_recording_fails() -> None:
    """As a capture does: its end complains of what has happened inside."""
    said: list[str] = []

    def record(*_: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise ValueError("previous error during capture")

    passes = Passes(ToyObjective(ToyModel()), on=True, say=said.append, record=record)
    for _ in range(PLAIN + 3):
        assert float(passes(lambda *_: {"loss": torch.ones(())}, packed(), 0.0)["loss"]) == 1
    assert not passes.holds
    assert said == [
        "recording steps failed, going on without: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(
    ("setting", "device", "steps", "backend", "expected"),
    [
        ("auto", "cuda", recording.LEAST_STEPS, "triton", True),
        ("auto", "cuda", recording.LEAST_STEPS, "reference", False),  # looks at values
        ("auto", "cuda", recording.LEAST_STEPS - 1, "triton", False),
        ("off", "cuda", 1000, "triton", False),
        ("auto", "cpu", 1000, "reference", False),
    ],
)
def test_wanted(
    setting: Any,
    device: str,
    steps: int,
    backend: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "choose", lambda *_: (backend, "a test"))
    assert wanted(setting, torch.device(device), steps) is expected


def test_work_changes_with_what_is_compared_and_merged() -> None:
    teacher = tiny_model(tiny_spec("llama")).requires_grad_(False)
    student = build_student(teacher, ["moda"] * len(teacher.model.layers), {}, share=False)
    settings = LogitsSettings(loop_warmup_share=0.65, depth_warmup_share=0.5)
    objective = LogitsObjective(teacher, student.train(), settings)
    answers = [objective.work(progress) for progress in (0.1, 0.49, 0.5, 0.6, 0.7, 0.9)]
    assert answers == [None, None, True, True, False, False]


GPU_MIXERS = ["full", "gdn_window", "gdn", "gdn_window"]


def _steps(kind: str, recorded: bool, checkpointing: bool) -> tuple[list[float], Values]:
    """Losses and weights of eight steps on the GPU, plain or recorded."""
    device = torch.device("cuda")
    spec = tiny_spec("llama", num_layers=4, layer_rope=("default",) * 4, layer_windows=(None,) * 4,
                     head_dim=64)  # fmt: skip
    teacher = tiny_model(spec).requires_grad_(False)
    student = build_student(teacher, GPU_MIXERS, {"window_tokens": 4}, share=kind == "align")
    for seed, layer in enumerate(student.model.layers):
        if layer.mixer.kind != "full":
            scatter(layer.mixer, seed + 1)
    teacher.to(device)
    student.to(device).train()
    objective: Any = (
        AlignObjective(teacher, student)
        if kind == "align"
        else LogitsObjective(teacher, student, LogitsSettings(ce_weight=0.5))
    )
    student.model.gradient_checkpointing = checkpointing
    optimizer = torch.optim.AdamW(objective.parameter_groups(), lr=1e-3)

    def run(batch: Batch, progress: float) -> Values:
        with autocast(device, "bf16"):
            return dict(objective.train_step(batch, lambda loss: loss.backward(), progress))

    passes, losses = Passes(objective, on=recorded, say=fail), []
    with dispatch.use("triton"):
        for seed in range(8):
            losses.append(passes(run, packed(seed).to(device), seed / 8)["loss"].clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=not passes.holds)
    assert (passes._recording is not None) == recorded
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    return [float(loss) for loss in losses], trained


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("align", False), ("logits", False), ("logits", True)]
)
def test_a_cuda_graph_trains_alike(kind: str, checkpointing: bool) -> None:
    plain_losses, plain = _steps(kind, False, checkpointing)
    losses, weights = _steps(kind, True, checkpointing)
    assert len(set(losses)) == len(losses)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-6)
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_pass_that_waits_is_not_recorded_and_goes_on() -> None:
    said: list[str] = []
    weight = torch.ones(3, device="cuda", requires_grad=True)

    def run(batch: Batch, progress: float) -> Values:
        loss = (weight * batch.labels_BT.sum()).sum()
        loss.backward()
        return {"loss": loss.detach() * (loss.item() > 0)}

    passes = Passes(ToyObjective(ToyModel()), on=True, say=said.append)
    stream = torch.cuda.current_stream()
    for seed in range(PLAIN + 2):
        batch = packed(seed).to("cuda")
        assert float(passes(run, batch, 0.0)["loss"]) == 3 * int(batch.labels_BT.sum())
    assert len(said) == 1
    assert torch.cuda.current_stream() == stream
