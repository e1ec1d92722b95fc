"""Recorded steps: the same numbers as plain ones, new recordings where the work changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import scatter, tiny_model, tiny_spec, tokens
from toy_training import ToyModel, ToyObjective, make_settings, run_toy, write_corpus

from ltconvert.convert.transfer import build_student
from ltconvert.distill import recording
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.precision import autocast
from ltconvert.distill.recording import PLAIN, Passes, wanted
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import LogitsSettings

Values = dict[str, torch.Tensor]


class Recorder:
    """A recording as CUDA makes it: nothing runs until it is replayed, values keep their place."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, launch: Callable[[], Values]) -> tuple[Values, Callable[[], None]]:
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
    passes = Passes(Counted(), run, on=True, say=fail, record=record)  # type: ignore[arg-type]
    for _ in range(5):
        passes(packed(), 0.0)  # not to be recorded
    assert (record.made, record.replayed) == (0, 0)
    for _ in range(PLAIN):
        passes(packed(), 0.1)
    assert record.made == 0
    passes(packed(), 0.1)
    passes(packed(), 0.19)
    assert (record.made, record.replayed) == (1, 2)
    passes(packed(), 0.2)  # other work
    passes(packed(padded=True), 0.2)  # other forms of a batch
    assert (record.made, record.replayed) == (1, 2)
    for seed in range(PLAIN + 2):
        loss = passes(packed(seed), 0.2)["loss"]
        assert float(loss) == packed(seed).input_ids_BT.sum()
    assert (record.made, record.replayed) == (2, 4)


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


def test_goes_on_without_where_recording_fails() -> None:
    said: list[str] = []

    def record(_: Callable[[], Values]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    passes = Passes(
        ToyObjective(ToyModel()), lambda *_: {"loss": torch.ones(())}, on=True, say=said.append,
        record=record,
    )  # fmt: skip
    for _ in range(PLAIN + 3):
        assert float(passes(packed(), 0.0)["loss"]) == 1
    assert not passes.on
    assert said == [
        "recording steps failed, going on without: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(
    ("setting", "device", "steps", "expected"),
    [
        ("auto", "cuda", recording.LEAST_STEPS, True),
        ("auto", "cuda", recording.LEAST_STEPS - 1, False),
        ("off", "cuda", 1000, False),
        ("auto", "cpu", 1000, False),
    ],
)
def test_wanted(setting: Any, device: str, steps: int, expected: bool) -> None:
    assert wanted(setting, torch.device(device), steps) is expected


def test_work_changes_with_what_is_compared_and_merged() -> None:
    teacher = tiny_model(tiny_spec("llama")).requires_grad_(False)
    student = build_student(teacher, ["moda"] * len(teacher.model.layers), {}, share=False)
    settings = LogitsSettings(loop_warmup_share=0.25, depth_warmup_share=0.5)
    objective = LogitsObjective(teacher, student.train(), settings)
    answers = [objective.work(progress) for progress in (0.1, 0.2, 0.3, 0.5, 0.6, 0.9)]
    assert len({*answers[:4]}) == 4  # every step merges more
    assert answers[3] == answers[4] == answers[5]


GPU_MIXERS = ["full", "gdn_window", "gdn", "gdn_window"]


def _steps(kind: str, recorded: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
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
    optimizer = torch.optim.AdamW(objective.parameter_groups(), lr=1e-3)

    def run(batch: Batch, progress: float) -> Values:
        with autocast(device, "bf16"):
            return dict(objective.train_step(batch, lambda loss: loss.backward(), progress))

    passes, losses = Passes(objective, run, on=recorded, say=fail), []
    with dispatch.use("triton"):
        for seed in range(8):
            losses.append(passes(packed(seed).to(device), seed / 8)["loss"].clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=not recorded)
    assert (passes._recording is not None) == recorded
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    return [float(loss) for loss in losses], trained


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["align", "logits"])
def test_a_cuda_graph_trains_alike(kind: str) -> None:
    plain_losses, plain = _steps(kind, recorded=False)
    losses, weights = _steps(kind, recorded=True)
    assert len(set(losses)) == len(losses)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-6)
    for name, value in plain.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
