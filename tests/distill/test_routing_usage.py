"""Counts of routing against choices written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ltconvert.distill.evaluation.routing_usage import Usage
from ltconvert.distill.report import build_report


def counted(choices: list[list[list[int]]], entries: int) -> Usage:
    """Of choices by depth, token and place, all with weight 1/K, in branches that add 1."""
    usage = Usage.empty(len(choices), entries)
    for depth, ids in enumerate(choices):
        ids_NK = torch.tensor(ids)
        weights_NK = torch.full(ids_NK.shape, 1 / ids_NK.shape[1])
        usage.add(depth, ids_NK, weights_NK, torch.ones(len(ids_NK)))
    return usage


def test_layers_as_experts_reuse_nothing() -> None:
    usage = counted([[[depth]] * 6 for depth in range(4)], 4)
    assert usage.tokens == 6
    assert usage.distinct_D() == usage.depths_E() == [1] * 4
    assert usage.effective_D() == pytest.approx([1.0] * 4)
    assert usage.imbalance() == 1.0
    assert usage.reused_share(2) == 0.0 and usage.reused_share(1) == 1.0


def test_loops_use_an_entry_as_often_as_they_run() -> None:
    usage = counted([[[depth % 2]] * 3 for depth in range(14)], 3)
    assert usage.depths_E() == [7, 7, 0]
    assert usage.reused_share() == pytest.approx(2 / 3)
    assert usage.imbalance() == pytest.approx(1.5)  # 21 choices against a mean of 14


def test_two_choices_a_token() -> None:
    usage = counted([[[0, 1], [0, 2]], [[1, 2], [1, 2]]], 4)
    assert usage.chosen_DE.tolist() == [[2, 1, 1, 0], [0, 2, 2, 0]]
    assert usage.effect_DE.tolist() == [[1, 0.5, 0.5, 0], [0, 1, 1, 0]]
    entropy = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert usage.effective_D() == pytest.approx([math.exp(entropy), 2.0])
    assert usage.to_dict()["load"] == [[1, 0.5, 0.5, 0], [0, 1, 1, 0]]
    assert usage.imbalance() == pytest.approx(3 / 2)  # 3 choices at most, 8 of 4 entries


def test_a_choice_of_few_tokens_is_no_use() -> None:
    usage = counted([[[0]] * 298 + [[1]] * 2, [[0]] * 297 + [[1]] * 3], 2)
    assert usage.distinct_D() == [1, 2]
    assert usage.depths_E() == [2, 1]


def test_nulls_are_no_entries() -> None:
    usage = counted([[[0, 2], [1, 0]], [[2, 3], [2, 3]]], 2)
    assert usage.chosen_DE.tolist() == [[2, 1], [0, 0]]
    assert usage.effect_DE.tolist() == [[1.5, 0.5], [0, 0]]  # the first token's is entry 0's alone
    assert usage.to_dict()["null"] == [0.25, 1.0]
    assert usage.distinct_D() == [2, 0]


def test_batches_add_up() -> None:
    whole, parts = counted([[[0], [1], [1]]], 2), Usage.empty(1, 2)
    for ids in ([[0]], [[1], [1]]):
        parts.add(0, torch.tensor(ids), torch.ones(len(ids), 1), torch.ones(len(ids)))
    assert parts.tokens == 3
    assert torch.equal(parts.chosen_DE, whole.chosen_DE)


def test_the_report_shows_it(tmp_path: Path) -> None:
    usage = counted([[[depth % 2]] * 3 for depth in range(14)], 3)
    maps = [[1.0 / (depth + 1)] * (depth + 1) for depth in range(14)]
    part: dict[str, Any] = {"student": {"pools": {"experts": usage.to_dict()}, "depth_map": maps}}
    part["student"]["by_depths"] = [{"depths": 7, "kl": 0.5, "ppl": 20.0}]
    whole = {"parts": {"routing": part}, "models": {}, "seconds": {}, "depends_on": {}}
    (tmp_path / "evaluation.json").write_text(json.dumps(whole))
    build_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| experts | 3 | 1 | 66.7 % | 1.50 |" in text
    assert "| 13 | 1 | 1.0 | 0.0 % |" in text
    assert "| 7 | 0.5000 | 20.00 |" in text
    assert (tmp_path / "report_plots/depth_attention.png").stat().st_size > 1000
