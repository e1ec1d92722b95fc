"""The alignment loss against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from ltconvert.distill.losses import contribution_loss, kept_squares


def test_error_over_the_targets_mean_square() -> None:
    teacher_BTC = torch.tensor([[[3.0, 4.0], [0.0, 5.0]]])
    student_BTC = torch.tensor([[[3.0, 2.0], [1.0, 5.0]]])
    keep_BT = torch.ones(1, 2, dtype=torch.bool)
    # errors 2^2 and 1^2, targets 25 and 25
    assert contribution_loss(student_BTC, teacher_BTC, keep_BT).item() == pytest.approx(0.1)


def test_padding_counts_in_neither_sum() -> None:
    teacher_BTC = torch.tensor([[[3.0, 4.0], [torch.nan, 1e30]]])
    student_BTC = torch.tensor([[[3.0, 2.0], [torch.inf, 0.0]]], requires_grad=True)
    keep_BT = torch.tensor([[True, False]])
    loss = contribution_loss(student_BTC, teacher_BTC, keep_BT)
    loss.backward()
    assert loss.item() == torch.tensor(4.0 / 25.0).item()
    assert torch.equal(student_BTC.grad[0, 1], torch.zeros(2))


def test_is_one_for_a_mixer_that_returns_nothing_and_ignores_the_targets_size() -> None:
    teacher_BTC = torch.randn(2, 5, 7)
    keep_BT = torch.rand(2, 5) < 0.7
    assert torch.isclose(
        contribution_loss(torch.zeros_like(teacher_BTC), teacher_BTC, keep_BT), torch.ones(())
    )
    student_BTC = torch.randn(2, 5, 7)
    small = contribution_loss(student_BTC * 1e-3, teacher_BTC * 1e-3, keep_BT)
    assert torch.isclose(small, contribution_loss(student_BTC, teacher_BTC, keep_BT))


def test_an_all_zero_target_gives_a_finite_loss_and_gradient() -> None:
    student_BTC = torch.zeros(1, 3, 2, requires_grad=True)
    loss = contribution_loss(student_BTC, torch.zeros(1, 3, 2), torch.ones(1, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0 and torch.isfinite(student_BTC.grad).all()


def test_low_precision_inputs_are_summed_in_fp32() -> None:
    teacher_BTC = torch.ones(1, 4096, 16, dtype=torch.bfloat16)
    student_BTC = torch.zeros_like(teacher_BTC)
    loss = contribution_loss(student_BTC, teacher_BTC, torch.ones(1, 4096, dtype=torch.bool))
    assert loss.dtype == torch.float32 and loss.item() == 1.0


def test_kept_squares_adds_up_over_tokens() -> None:
    x_BTC = torch.tensor([[[1.0, 2.0], [3.0, torch.nan]], [[2.0, 0.0], [1.0, 1.0]]])
    keep_BT = torch.tensor([[True, False], [True, True]])
    assert kept_squares(x_BTC, keep_BT).tolist() == [6.0, 5.0]
