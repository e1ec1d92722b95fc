"""Triton kernels of ``decode_route``: a program for each logit, then one for each row's choice.

C channels, filled up to BC; E experts, X logits, filled up to BX; K choices, filled up to BK.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ltconvert.kernels.decode_linear.parts import rounded
from ltconvert.kernels.overlap_kernels import let_go, take_turn

NONE = tl.constexpr(float("-inf"))


@triton.jit
def logits_kernel(
    h_ptr, keys_ptr, bias_ptr, x_ptr, logits_ptr, eps,
    X: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One logit of one row; the program of the first one keeps the normed row."""
    let_go(OVERLAP)
    which, row, c_C = tl.program_id(0), tl.program_id(1), tl.arange(0, BC)
    in_C = c_C < C
    key_C = tl.load(keys_ptr + which * C + c_C, mask=in_C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + which).to(tl.float32)
    take_turn(OVERLAP)
    h_C = tl.load(h_ptr + row * C + c_C, mask=in_C, other=0.0).to(tl.float32)
    x_C = rounded(h_C * tl.rsqrt(tl.sum(h_C * h_C, axis=0) / C + eps), x_ptr)
    tl.store(logits_ptr + row * X + which, tl.sum(key_C * x_C, axis=0) + bias)
    if which == 0:
        tl.store(x_ptr + row * C + c_C, x_C.to(x_ptr.dtype.element_ty), mask=in_C)


@triton.jit
def _first(values_X, x_X):
    """(The highest value, the first number that has it.)"""
    most = tl.max(values_X, axis=0)
    return most, tl.min(tl.where(values_X == most, x_X, values_X.shape[0]), axis=0)


@triton.jit
def choice_kernel(
    logits_ptr, balance_ptr, chosen_ptr, weights_ptr, top_ptr, total,
    E: tl.constexpr, X: tl.constexpr, K: tl.constexpr, BY_SCORES: tl.constexpr,
    BX: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The choice of one row: K times the highest that is left."""
    let_go(OVERLAP)
    row, x_X, k_K = tl.program_id(0), tl.arange(0, BX), tl.arange(0, BK)
    balance_X = tl.load(balance_ptr + x_X, mask=x_X < E, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    logits_X = tl.load(logits_ptr + row * X + x_X, mask=x_X < X, other=NONE)
    scores_X = 1 / (1 + tl.exp(-logits_X))
    plain_X = tl.where(x_X < X, scores_X if BY_SCORES else logits_X, NONE)
    ranked_X = plain_X + balance_X
    if X > E:
        left_X, least = plain_X, 0.0
        for _ in tl.static_range(K):
            least, at = _first(left_X, x_X)
            left_X = tl.where(x_X == at, NONE, left_X)
        null_X = tl.where((plain_X >= least) & (x_X < X), float("inf"), NONE)
        ranked_X = tl.where(x_X < E, ranked_X, null_X)
    weights_K = tl.zeros([BK], tl.float32)
    chosen_K = tl.zeros([BK], tl.int32)
    for k in tl.static_range(K):
        _, at = _first(ranked_X, x_X)
        ranked_X = tl.where(x_X == at, NONE, ranked_X)
        chosen_K = tl.where(k_K == k, at, chosen_K)
        weights_K = tl.where(k_K == k, tl.sum(tl.where(x_X == at, scores_X, 0.0)), weights_K)
    at_K = row * K + k_K
    tl.store(chosen_ptr + at_K, chosen_K.to(tl.int64), mask=k_K < K)
    shares_K = weights_K / (tl.sum(weights_K, axis=0) / total)
    tl.store(weights_ptr + at_K, shares_K, mask=k_K < K)
    tl.store(top_ptr + row, tl.max(weights_K, axis=0))
