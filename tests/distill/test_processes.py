"""Means over processes."""

from __future__ import annotations

import pytest
import torch

from ltconvert.distill import processes


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
    monkeypatch.setattr(processes, "sum_of_processes", add_up)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    tensors = [torch.randn(size) for size in ((2, 3), (), (4,), (1, 1, 2), (7,))]
    before = [x.clone() for x in tensors]
    processes.average_over_processes(tensors)
    for found, expected in zip(tensors, before, strict=True):
        assert torch.equal(found, -expected)
    assert calls == {1: [6, 1, 4, 2, 7], 5: [6, 5, 9], 1000: [20]}[together]
