"""Killed processes and several processes, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training
from toy_training import write_corpus

SCRIPT = Path(toy_training.__file__)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Corpus, tokenizer, and an undisturbed run in `whole`."""
    base = tmp_path_factory.mktemp("toy")
    write_corpus(base / "corpus.jsonl")
    tiny_tokenizer.save_pretrained(base / "tokenizer")
    assert launch(base / "whole").returncode == 0
    return base


def launch(
    folder: Path, *options: str, every: int = 3, with_torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "LTCONVERT_CHECKPOINT_STEPS": str(every), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    if with_torchrun:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(SCRIPT),
        ]
    return subprocess.run(
        [*command, str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def final(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


def assert_as_undisturbed(folder: Path, base: Path) -> None:
    """Same bits in the weights, same metrics, every step once, nothing left lying about."""
    for name, tensor in final(base / "whole").items():
        assert torch.equal(tensor, final(folder)[name]), name
    assert metrics(folder) == metrics(base / "whole")
    assert [record["step"] for record in metrics(folder)] == list(range(1, 13))
    assert [path.name for path in (folder / "stage").iterdir()] == ["checkpoint"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_killed_twice_in_the_middle_of_a_step(base: Path) -> None:
    folder = base / "steps"
    # Before any checkpoint, then three steps after one: calls count from the resumed step on.
    for options in (["die_at=1"], ["die_at=5"], ["die_at=4"]):
        assert launch(folder, *options).returncode == -signal.SIGKILL
    assert json.loads((folder / "stage/checkpoint/state.json").read_text())["step"] == 6
    assert launch(folder).returncode == 0
    assert_as_undisturbed(folder, base)


def test_killed_in_the_middle_of_writing_a_checkpoint(base: Path) -> None:
    folder = base / "writing"
    assert launch(folder, "die_saving=2").returncode == -signal.SIGKILL
    assert (folder / "stage/checkpoint.tmp").exists()
    assert json.loads((folder / "stage/checkpoint/state.json").read_text())["step"] == 3
    assert launch(folder).returncode == 0
    assert_as_undisturbed(folder, base)


def test_killed_between_the_two_renames(base: Path) -> None:
    folder = base / "renames"
    assert launch(folder, "die_at=7").returncode == -signal.SIGKILL
    stage = folder / "stage"
    (stage / "checkpoint").rename(stage / "checkpoint.old")
    assert launch(folder).returncode == 0
    assert_as_undisturbed(folder, base)


def test_sigterm_exits_130_and_goes_on(base: Path) -> None:
    folder = base / "term"
    stopped = launch(folder, "stop_at=4")
    assert stopped.returncode == 130
    assert "stopped after step 5 of 12 of stage logits" in stopped.stdout
    assert launch(folder).returncode == 0
    assert_as_undisturbed(folder, base)


@pytest.mark.slow
def test_two_processes_with_half_the_batch_equal_one(base: Path) -> None:
    assert launch(base / "one", "dropout=0", "accumulation=4").returncode == 0
    for name, options in (("two", ["accumulation=2"]), ("wide", ["rows=4", "accumulation=1"])):
        done = launch(base / name, "dropout=0", *options, with_torchrun=True)
        assert done.returncode == 0, done.stderr
        for key, tensor in final(base / "one").items():
            torch.testing.assert_close(final(base / name)[key], tensor, atol=1e-6, rtol=1e-5)
        for a, b in zip(metrics(base / name), metrics(base / "one"), strict=True):
            assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_resume_and_one_goes_on_in_their_place(base: Path) -> None:
    assert launch(base / "pair", "dropout=0", "accumulation=2", with_torchrun=True).returncode == 0
    for name, alone in (("again", False), ("alone", True)):
        died = launch(base / name, "dropout=0", "accumulation=2", "die_at=7", with_torchrun=True)
        assert died.returncode != 0
        accumulation = "accumulation=4" if alone else "accumulation=2"
        done = launch(base / name, "dropout=0", accumulation, with_torchrun=not alone)
        assert done.returncode == 0, done.stderr
        for key, tensor in final(base / "pair").items():
            torch.testing.assert_close(final(base / name)[key], tensor, atol=1e-6, rtol=1e-5)
