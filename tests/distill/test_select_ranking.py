"""How many layers stay, ranks with ties, when a choice has settled, even spacing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import rankdata

from ltconvert.distill.selection.partial import Progress
from ltconvert.distill.selection.ranking import (
    Stability,
    average_ranks,
    count_full_layers,
    mean_ranks,
    order,
)
from ltconvert.distill.selection.simple import given, uniform_layers
from ltconvert.errors import UserError


@pytest.mark.parametrize(
    ("asked", "layers", "kept"),
    [
        (0.25, 30, 8),  # 7.5, halves up
        (0.25, 36, 9),
        (0.125, 30, 4),
        (0.01, 24, 1),  # a share above nothing keeps something
        (0.0, 24, 0),
        (1.0, 24, 24),
        (8, 30, 8),
        (1, 30, 1),  # a count, not a share
        (0, 30, 0),
        ([4, 0], 30, 2),
        ([], 30, 0),
    ],
)
def test_count_of_full_layers(asked: Any, layers: int, kept: int) -> None:
    assert count_full_layers(asked, layers) == kept


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (1.5, "share lies between"),
        (-0.1, "share lies between"),
        (math.nan, "share lies between"),
        (31, "30 physical layers"),
        (-1, "30 physical layers"),
        ([0, 30], "layer 30"),
        ([-1], "layer -1"),
        ([3, 3], "layer 3 more than once"),
        (True, "expected a share"),
        (None, "expected a share"),
    ],
)
def test_a_wrong_number_is_told_in_one_line(asked: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        count_full_layers(asked, 30)
    assert "\n" not in str(caught.value)
    assert "student.full_layers" in str(caught.value)


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [1.0, 1.0, 2.0, 0.0], [0.0] * 4, [5.0]])
def test_average_ranks_equal_scipy(values: list[float]) -> None:
    assert average_ranks(values) == list(rankdata([-value for value in values]))


def test_order_is_stable_and_puts_nan_last() -> None:
    assert order([1.0, math.nan, 2.0, 1.0, -math.inf]) == [2, 0, 3, 4, 1]


def test_mean_ranks() -> None:
    assert mean_ranks([[3.0, 2.0, 1.0], [0.1, 0.9, 0.5]]) == [2.0, 1.5, 2.5]


def test_stability_counts_batches_in_a_row() -> None:
    stability = Stability(stable_rounds=2)
    settled = [stability.add(chosen) for chosen in ([1, 2], [2, 1], [0, 1], [1, 0], [0, 1])]
    assert settled == [False, False, False, False, True]
    assert stability.unchanged == 2
    assert stability.history[0] == stability.history[1] == [1, 2]
    # As a resumed run has it.
    assert Stability(2, list(stability.history)).settled


def test_uniform_starts_at_the_first_layer() -> None:
    assert uniform_layers(9, 36) == list(range(0, 36, 4))
    assert uniform_layers(8, 30) == [0, 3, 7, 11, 15, 18, 22, 26]
    assert uniform_layers(0, 30) == []
    assert uniform_layers(3, 3) == [0, 1, 2]


def test_a_given_choice_ranks_first() -> None:
    assert given([1, 3], 5).ranking == [1, 3, 0, 2, 4]


def test_partial_scores_of_the_same_text_in_other_words_are_gone_on_from(tmp_path: Path) -> None:
    """From another folder, or noted before texts had a digest; another text is another choice."""
    now = {"seed": 1, "data": {"source": "b/text.txt", "content": "1"}}
    for then, known in (
        (now, True),
        ({"seed": 1, "data": {"source": "a/text.txt", "content": "1"}}, True),
        ({"seed": 1, "data": {"source": "b/text.txt"}}, True),
        ({"seed": 1, "data": {"source": "b/text.txt", "content": "2"}}, False),
        ({"seed": 2, "data": now["data"]}, False),
    ):
        Progress(tmp_path / "partial.json", then).save({"curves": [1]})
        assert bool(Progress(tmp_path / "partial.json", now).state) is known
