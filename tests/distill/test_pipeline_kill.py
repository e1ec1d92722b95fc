"""`kill -9` in the middle of any stage, then the same call: the same final weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipeline_case
import pytest
import torch

from ltconvert.convert.checkpoint import load_student

# A start a point; within stages, and while files of each kind are put in place.
POINTS = ["put:checkpoint:2", "put:selection.partial.json:2", "put:student:2"]
LOOPED: dict[str, Any] = {
    "student": {
        "loops": 2,
        "prelude_layers": 1,
        "loop_start": "average",
        "loop_rank": 2,
        "loop_calibration_tokens": 256,
    },
    "longctx": {"enabled": False},
}
MORE_POINTS = [
    "align:1",
    "align:5",
    "put:checkpoint:2",
    "put:student:1",
    "put:selection.partial.json:2",
    "put:selection.json:1",
    "logits:6",
    "put:checkpoint.old:1",
    "put:stage.json:2",
    "longctx:4",
    "put:student:1",
    "put:student:2",
]


def run_driver(
    folder: Path,
    run_dir: Path,
    points: list[str],
    sections: dict[str, Any],
    launcher: Sequence[str] = (),
) -> None:
    environment = os.environ | {
        "CASE_SECTIONS": json.dumps(sections),
        "LTCONVERT_CHECKPOINT_STEPS": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(pipeline_case.__file__).parent),
    }
    environment.pop("PYTHONSAFEPATH", None)
    subprocess.run(
        [
            sys.executable,
            "-P",
            *launcher,
            pipeline_case.__file__,
            str(folder),
            str(run_dir),
            *points,
        ],
        env=environment,
        check=True,
        timeout=600,
    )


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Each takes half of a step's rows: the same losses but for the order of sums."""
    pipeline_case.make_case(tmp_path, tiny_tokenizer)
    sections = {"longctx": {"batch_tokens": 128}}
    run_driver(tmp_path, tmp_path / "one", [], sections)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_driver(tmp_path, tmp_path / "two", [], sections, launcher)
    one, two = (_losses(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [x[:2] for x in one] == [x[:2] for x in two]
    assert [x[2] for x in one] == pytest.approx([x[2] for x in two], rel=1e-3)


def assert_same_run(one: Path, two: Path) -> None:
    for student in ("student", "stages/align/student"):
        a, b = (load_student(run_dir / student).state_dict() for run_dir in (one, two))
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{student}: {name}"
    noted = [_losses(run_dir / "metrics.jsonl") for run_dir in (one, two)]
    assert noted[0] == noted[1]


def _losses(path: Path) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["stage"], r["step"], r["loss"]) for r in records if "loss" in r]


@pytest.mark.parametrize(
    ("family", "points", "sections"),
    [
        ("llama", POINTS, {}),
        (
            "llama",
            ["loop:4"],
            LOOPED,
        ),
        pytest.param("llama", MORE_POINTS, {}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            ["loop:4", "put:student:1", "align:3", "put:selection.json:1", "logits:4"],
            LOOPED,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ouro",
            MORE_POINTS,
            {"student": {"mixer": "window", "window_tokens": 5}, "align": {"layers_at_once": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_runs_end_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, tiny_tokenizer: Any, family: str, points: list[str], sections: dict[str, Any]
) -> None:
    pipeline_case.make_case(tmp_path, tiny_tokenizer, family)
    run_driver(tmp_path, tmp_path / "whole", [], sections)
    run_driver(tmp_path, tmp_path / "killed", points, sections)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
