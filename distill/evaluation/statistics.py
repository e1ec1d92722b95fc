"""Means with standard errors, and recovery: what is left of a teacher's score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def ratio(sums_R: Tensor, counts_R: Tensor) -> tuple[float, float | None]:
    """Mean over all tokens, and its standard error over rows.

    Tokens of one row depend on each other, so the rows are the sample: the linearised variance of
    the ratio ``sum(sums) / sum(counts)`` (Cochran, Sampling Techniques, 6.4).

    Args:
        sums_R: the quantity summed over each row's tokens.
        counts_R: tokens of each row; rows without tokens are ignored.

    Returns:
        ``(mean, stderr)``; mean is NaN without tokens, stderr None with fewer than two rows.
    """
    used = counts_R > 0
    sums, counts = sums_R[used].double(), counts_R[used].double()
    rows, total = len(counts), float(counts.sum())
    if rows == 0:
        return math.nan, None
    mean = float(sums.sum()) / total
    if rows < 2:
        return mean, None
    variance = float((sums - mean * counts).square().sum()) * rows / (rows - 1)
    return mean, math.sqrt(variance) / total


def proportion(hits: Sequence[bool] | Tensor) -> tuple[float, float | None]:
    """Share of hits and its standard error with Bessel's correction, as lm-eval has it.

    Returns:
        ``(share, stderr)``; share is NaN without trials, stderr None with fewer than two.
    """
    values = torch.as_tensor(hits, dtype=torch.float64)
    if len(values) == 0:
        return math.nan, None
    share = float(values.mean())
    if len(values) < 2:
        return share, None
    return share, math.sqrt(share * (1 - share) / (len(values) - 1))


def recovery(
    student: float,
    teacher: float,
    random: float = 0.0,
    student_stderr: float | None = None,
    teacher_stderr: float | None = None,
) -> tuple[float | None, float | None]:
    """``(s - random) / (t - random)`` and its standard error by the delta method.

    The two scores are taken as independent. They are not (both models see the same documents), so
    the error is an upper bound for any pair that errs alike.

    Returns:
        ``(recovery, stderr)``; both None where the teacher is not above random guessing, stderr
        None where one of the two is not known.
    """
    room = teacher - random
    if not (math.isfinite(student) and math.isfinite(room) and room > 0):
        return None, None
    share = (student - random) / room
    if student_stderr is None or teacher_stderr is None:
        return share, None
    return share, math.hypot(student_stderr, share * teacher_stderr) / room
