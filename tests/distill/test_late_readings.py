"""Steps whose numbers are read one step late, as on a GPU, end as steps that are read at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_training import ToyModel, ToyObjective, make_settings, run_toy, write_corpus

from ltconvert.distill import readings
from ltconvert.distill.interrupt import Stopped
from ltconvert.errors import UserError

ACCUMULATION = 2  # micro-batches a step of the toy's settings
STEPS = 12


@pytest.fixture(autouse=True)
def _late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    monkeypatch.setitem(readings.STEPS_LATE, "cpu", 1)


def toy(change: Any = None) -> ToyObjective:
    torch.manual_seed(5)
    return (change or ToyObjective)(ToyModel())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(found: ToyObjective, expected: Mapping[str, Tensor]) -> None:
    for name, value in found.module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def at_once(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, _late: None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Weights and metrics of a run that reads its numbers in the same step."""
    with monkeypatch.context() as context:
        context.setitem(readings.STEPS_LATE, "cpu", 0)
        objective, _ = run_toy(tmp_path / "a", tiny_tokenizer, make_settings(), objective=toy())
    return objective.module.state_dict(), lines(tmp_path / "a")


@pytest.mark.parametrize("every", [0, 1, 3])
def test_the_same_run(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, at_once: Any, every: int
) -> None:
    monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", str(every))
    objective, _ = run_toy(tmp_path / "b", tiny_tokenizer, make_settings(), objective=toy())
    same(objective, at_once[0])
    assert lines(tmp_path / "b") == at_once[1]


@pytest.mark.parametrize("at", [0, 2, STEPS - 1])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_nothing_of_a_step_that_is_not_finite_is_kept(
    tmp_path: Path,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    at_once: Any,
    kind: str,
    at: int,
) -> None:
    monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", "1")
    before: dict[str, Tensor] = {}

    class Broken(ToyObjective):
        def train_step(self, *arguments: Any) -> dict[str, Tensor]:
            now = self.calls == at * ACCUMULATION
            if now:
                before.update({k: v.clone() for k, v in self.module.state_dict().items()})
            found = super().train_step(*arguments)
            if now and kind == "loss":
                found["loss"] = found["loss"] * float("nan")
            elif now:
                self.module.hidden.weight.grad[0, 0] = float("nan")
            return found

    objective = toy(Broken)
    with pytest.raises(UserError, match=f"step {at + 1} of"):
        run_toy(tmp_path / "n", tiny_tokenizer, make_settings(), objective=objective)
    same(objective, before)
    checkpoint = tmp_path / "n" / "stage" / "checkpoint" / "state.json"
    assert not checkpoint.exists() or json.loads(checkpoint.read_text())["step"] <= at
    objective, _ = run_toy(tmp_path / "n", tiny_tokenizer, make_settings(), objective=toy())
    same(objective, at_once[0])
    assert lines(tmp_path / "n") == at_once[1]


@pytest.mark.parametrize("at", [0, 5, STEPS - 1])
def test_a_stop_saves_the_step_it_came_in(
    tmp_path: Path, tiny_tokenizer: Any, at_once: Any, at: int
) -> None:
    def stop(call: int) -> None:
        if call == at * ACCUMULATION:
            os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(5)
    stopped = ToyObjective(ToyModel(), stop)
    with pytest.raises(Stopped):
        run_toy(tmp_path / "n", tiny_tokenizer, make_settings(), objective=stopped)
    state = json.loads((tmp_path / "n" / "stage" / "checkpoint" / "state.json").read_text())
    assert state["step"] == at + 1
    objective, _ = run_toy(tmp_path / "n", tiny_tokenizer, make_settings(), objective=toy())
    same(objective, at_once[0])
    assert lines(tmp_path / "n") == at_once[1]


@pytest.mark.parametrize("error", [UserError, RuntimeError])
def test_steps_done_before_another_error_are_noted(
    tmp_path: Path, tiny_tokenizer: Any, error: type[Exception]
) -> None:
    class Ends(ToyObjective):
        def train_step(self, *arguments: Any) -> dict[str, Tensor]:
            if self.calls == 3 * ACCUMULATION:
                raise error("the data ran out")
            return super().train_step(*arguments)

    with pytest.raises(error, match="ran out"):
        run_toy(tmp_path / "n", tiny_tokenizer, make_settings(), objective=toy(Ends))
    assert [line["step"] for line in lines(tmp_path / "n")] == [1, 2, 3]
