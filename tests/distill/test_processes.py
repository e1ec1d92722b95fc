"""What the processes of a run have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltconvert.distill import processes

# What each of two processes does: its number, a file to meet by.
SCRIPT = """
import json, sys
import torch
from ltconvert.distill.planning.rows import agreed_rows
from ltconvert.distill.processes import all_values, take_from_the_first

rank, meeting = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
tensors = [torch.full((2, 3), float(rank)), torch.tensor(rank)]
take_from_the_first(tensors)
found = {
    "values": all_values(f"process {rank}"),
    "rows": agreed_rows({"align": 8 >> rank, "logits": 2 << rank}),
    "taken": [x.sum().item() for x in tensors],
}
print(json.dumps(found))
"""


def test_processes_agree(tmp_path: Path) -> None:
    meeting = (tmp_path / "meeting").as_uri()
    command = [sys.executable, "-P", "-c", SCRIPT]
    two = [
        subprocess.Popen([*command, str(rank), meeting], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    for each in two:
        assert json.loads(each.communicate(timeout=300)[0]) == {
            "values": ["process 0", "process 1"],
            "rows": {"align": 4, "logits": 2},
            "taken": [0, 0],
        }


def test_a_single_process_agrees_with_itself() -> None:
    tensor = torch.tensor([3.0])
    processes.take_from_the_first([tensor])
    assert processes.all_values(5) == [5] and tensor.item() == 3.0


@pytest.mark.parametrize("together", [1, 5, 1000])
def test_tensors_of_any_shape_are_averaged_in_place(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes; the other one holds minus three times the same."""
    calls = []

    def add_up(value: torch.Tensor) -> torch.Tensor:
        calls.append(value.numel())
        return value.mul_(-2)

    monkeypatch.setattr(processes, "_TOGETHER", together)
    monkeypatch.setattr(processes, "_joined", lambda: True)
    monkeypatch.setattr(processes, "sum_of_processes", add_up)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    tensors = [torch.randn(size) for size in ((2, 3), (), (4,), (1, 1, 2), (7,))]
    before = [x.clone() for x in tensors]
    processes.average_over_processes(tensors)
    for found, expected in zip(tensors, before, strict=True):
        assert torch.equal(found, -expected)
    assert calls == {1: [6, 1, 4, 2, 7], 5: [6, 5, 9], 1000: [20]}[together]
