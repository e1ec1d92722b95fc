"""The nearest matrix of a rank, as two factors; near on all inputs alike or on those that come.

O output channels, I input channels, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of an input channel: directions that calibration did not see


def low_rank(
    matrix_OI: Tensor, rank: int, squares_II: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Factors B [O, R] and A [R, I] whose product is nearest to a matrix W (Eckart and Young 1936).

    Without ``squares_II`` the Frobenius norm of ``W - B A`` is least; with it the mean square of
    ``(W - B A) x`` over inputs x, as in SVD-LLM (arXiv 2403.07378): the truncated SVD of ``W L``
    with ``L L^T`` the inputs' second moment. At full rank the product is W either way. Rows of A
    have length 1, so that both factors can train at the rates of other matrices.

    Args:
        matrix_OI: W, in fp64.
        squares_II: mean of ``x x^T`` over inputs.
    """
    if squares_II is None:
        return _balanced(*_truncated(matrix_OI, rank))
    squares_II = squares_II.to(matrix_OI)
    ridge = RIDGE * squares_II.diagonal().mean()
    root_II = torch.linalg.cholesky(squares_II + ridge * torch.eye(len(squares_II)).to(squares_II))
    b_OR, a_RI = _truncated(matrix_OI @ root_II, rank)
    return _balanced(b_OR, torch.linalg.solve_triangular(root_II, a_RI, upper=False, left=False))


def _balanced(b_OR: Tensor, a_RI: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with rows of A of length 1; rows that are 0 stay.

    Adam moves all values alike, whatever their size: a step of B moves an output by that step times
    the sum of what A makes of an input. Rows that whiten inputs make as much of small inputs as of
    large ones, of which the shared matrix makes little.
    """
    norms_R1 = a_RI.norm(dim=1, keepdim=True)
    norms_R1 = norms_R1.where(norms_R1 > 0, 1.0)
    return b_OR * norms_R1.mT, a_RI / norms_R1


def _truncated(matrix_OI: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The truncated SVD, by the eigenvectors of the smaller of W^T W and W W^T.

    Orthonormal vectors on that side, the matrix projected on them on the other. So the product is
    the matrix itself at full rank, and where the matrix is 0 one factor is not, and can learn.
    """
    outputs, inputs = matrix_OI.shape
    if outputs < inputs:
        a_IR, b_RO = _truncated(matrix_OI.mT, rank)
        return b_RO.mT.contiguous(), a_IR.mT.contiguous()
    _, vectors_II = torch.linalg.eigh(matrix_OI.mT @ matrix_OI)  # eigenvalues ascend
    a_RI = vectors_II[:, inputs - rank :].flip(1).mT.contiguous()
    return matrix_OI @ a_RI.mT, a_RI
