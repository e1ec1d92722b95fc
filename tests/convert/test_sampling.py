"""Sampling against transformers' own processors, and by counting."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ltconvert.convert.sampling import Sampling, choose

DRAWS = 60_000


def shares(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """How often each token is chosen."""
    generator = torch.Generator().manual_seed(5)
    drawn = choose(logits_V.expand(DRAWS, -1), sampling, generator=generator)
    return torch.bincount(drawn, minlength=len(logits_V)) / DRAWS


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_k=3),
        Sampling(1.3, top_p=0.6),
        Sampling(0.9, top_k=6, top_p=0.8),
        Sampling(1.0, top_p=0.0),
        Sampling(1.0, top_k=99),
    ],
    ids=str,
)
def test_shares_are_the_probabilities_that_transformers_would_draw_from(sampling: Sampling) -> None:
    logits_V = torch.tensor([0.3, -1.0, 2.2, 1.9, 0.0, -4.0, 1.0, 0.9])
    expected = TemperatureLogitsWarper(sampling.temperature)(None, logits_V[None])
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    probability_V = expected[0].softmax(-1)
    found_V = shares(logits_V, sampling)
    assert not found_V[probability_V == 0].any()
    error_V = 5 * (probability_V * (1 - probability_V) / DRAWS).sqrt()  # five standard errors
    assert ((found_V - probability_V).abs() <= error_V + 1e-9).all()


def test_the_penalty_is_that_of_transformers() -> None:
    logits_BV = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[4, 3], [2, 2], [1, 10]])
    expected = RepetitionPenaltyLogitsProcessor(4.0)(ids, logits_BV.clone()).argmax(-1)
    seen_BV = torch.zeros(3, 11, dtype=torch.bool).scatter(1, ids, True)
    found = choose(logits_BV, Sampling(repetition_penalty=4.0), seen_BV=seen_BV)
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits_BV.argmax(-1))


def test_a_seed_repeats_itself() -> None:
    logits_BV = torch.zeros(4, 50)
    draws = [
        choose(logits_BV, Sampling(1.0), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"repetition_penalty": 0.0}]
)
def test_values_outside_of_their_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampling(**values)
