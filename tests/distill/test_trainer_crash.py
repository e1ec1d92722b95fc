"""Killed processes and several processes, each a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Corpus, tokenizer, and an undisturbed run in `whole`."""
    base = tmp_path_factory.mktemp("toy")
    toy_training.write_corpus(base / "corpus.jsonl")
    tiny_tokenizer.save_pretrained(base / "tokenizer")
    assert launch(base / "whole") == 0
    return base


def launch(folder: Path, **options: float) -> int | None:
    """Train in a process of its own, forked from one that has all imports done: its exit code."""
    context = multiprocessing.get_context("forkserver")
    # Optimisers import torch._dynamo at their first use, which takes seconds.
    context.set_forkserver_preload(["toy_training", "transformers", "torch._dynamo"])
    process = context.Process(target=toy_training.main, args=(folder, options))
    process.start()
    process.join(300)
    return process.exitcode


def launch_two(folder: Path, **options: float) -> subprocess.CompletedProcess[str]:
    """The same in two processes under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [f"{key}={value}" for key, value in options.items()]
    return subprocess.run(
        [sys.executable, *torchrun, toy_training.__file__, str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
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
    for step in (1, 5, 4):
        assert launch(folder, die_at=step) == -signal.SIGKILL
    assert json.loads((folder / "stage/checkpoint/state.json").read_text())["step"] == 6
    assert launch(folder) == 0
    assert_as_undisturbed(folder, base)


def test_killed_in_the_middle_of_writing_a_checkpoint(base: Path) -> None:
    folder = base / "writing"
    assert launch(folder, die_saving=2) == -signal.SIGKILL
    assert (folder / "stage/checkpoint.tmp").exists()
    assert json.loads((folder / "stage/checkpoint/state.json").read_text())["step"] == 3
    assert launch(folder) == 0
    assert_as_undisturbed(folder, base)


def test_killed_between_the_two_renames(base: Path) -> None:
    folder = base / "renames"
    assert launch(folder, die_at=7) == -signal.SIGKILL
    stage = folder / "stage"
    (stage / "checkpoint").rename(stage / "checkpoint.old")
    assert launch(folder) == 0
    assert_as_undisturbed(folder, base)


def test_sigterm_exits_130_and_goes_on(base: Path) -> None:
    folder = base / "term"
    assert launch(folder, stop_at=4) == 130
    assert "stopped after step 5 of 12 of stage logits" in (folder / "stopped.txt").read_text()
    assert launch(folder) == 0
    assert_as_undisturbed(folder, base)


@pytest.mark.slow
def test_two_processes_with_half_the_batch_equal_one(base: Path) -> None:
    assert launch(base / "one", dropout=0, accumulation=4) == 0
    for name, shape in (("two", {"accumulation": 2}), ("wide", {"rows": 4, "accumulation": 1})):
        done = launch_two(base / name, dropout=0, **shape)
        assert done.returncode == 0, done.stderr
        for key, tensor in final(base / "one").items():
            torch.testing.assert_close(final(base / name)[key], tensor, atol=1e-6, rtol=1e-5)
        for a, b in zip(metrics(base / name), metrics(base / "one"), strict=True):
            assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_resume_and_one_goes_on_in_their_place(base: Path) -> None:
    assert launch_two(base / "pair", dropout=0).returncode == 0
    for name in ("again", "alone"):
        assert launch_two(base / name, dropout=0, die_at=7).returncode != 0
        if name == "alone":
            assert launch(base / name, dropout=0, accumulation=4) == 0
        else:
            assert launch_two(base / name, dropout=0).returncode == 0
        for key, tensor in final(base / "pair").items():
            torch.testing.assert_close(final(base / name)[key], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_at_one_step(base: Path) -> None:
    """Both processes signal themselves here; the step they agree on is saved once."""
    assert launch_two(base / "stop", dropout=0, stop_at=4).returncode != 0
    assert json.loads((base / "stop/stage/checkpoint/state.json").read_text())["step"] == 5
