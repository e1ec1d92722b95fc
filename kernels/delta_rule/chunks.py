"""What a span of chunks of the plain PyTorch delta rule needs beside the incoming state.

N chunks of a span, R rows (batch * heads), C tokens of a chunk, K key width, V value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ltconvert.kernels.chunkwise import NORM_EPS
from ltconvert.kernels.chunkwise.decays import ScalarDecay, decays
from ltconvert.kernels.chunkwise.spans import arithmetic, dot, to_chunks


class Options(NamedTuple):
    """What shapes do not say."""

    scale: float
    l2norm_qk: bool
    chunk: int


class Chunks(NamedTuple):
    """One span, laid out for batched products."""

    q_NRCK: Tensor  # times the scale
    k_NRCK: Tensor
    v_NRCV: Tensor
    beta_NRC1: Tensor
    q_factor_NRC1: Tensor | float  # q = factor * the q that was given
    k_factor_NRC1: Tensor | float
    decay: ScalarDecay
    inverse_NRCC: Tensor  # (I + A)^-1


def prepare(
    q: Tensor, k: Tensor, v: Tensor, beta_BTH1: Tensor, log_decay_BTHD: Tensor,
    counts_BT: Tensor | None, options: Options, span: slice,
) -> Chunks:  # fmt: skip
    """Everything about a span that does not depend on the incoming state."""
    dtype, chunk = arithmetic(q.dtype), options.chunk
    q_NRCK, k_NRCK, v_NRCV, beta_NRC1 = (
        to_chunks(x, span, chunk, dtype) for x in (q, k, v, beta_BTH1)
    )
    q_factor: Tensor | float = options.scale
    k_factor: Tensor | float = 1.0
    if options.l2norm_qk:
        q_factor, k_factor = inverse_length(q_NRCK).mul_(options.scale), inverse_length(k_NRCK)
        k_NRCK *= k_factor
    q_NRCK *= q_factor
    decay = decays(log_decay_BTHD, counts_BT, span, chunk, dtype)
    a_NRCC = decay.products(k_NRCK, k_NRCK).mul_(beta_NRC1)
    # Only the entries below the diagonal are read. A product series for the inverse would need
    # fewer steps, but its terms grow like binomials and cancel: nothing is left of them in fp32.
    eye_CC = torch.eye(chunk, dtype=dtype, device=q.device).expand_as(a_NRCC)
    inverse_NRCC = torch.linalg.solve_triangular(a_NRCC, eye_CC, upper=False, unitriangular=True)
    return Chunks(q_NRCK, k_NRCK, v_NRCV, beta_NRC1, q_factor, k_factor, decay, inverse_NRCC)


def inverse_length(x: Tensor) -> Tensor:
    """1 / length of the last axis, kept as 1; finite at the zero vector."""
    return dot(x, x).add_(NORM_EPS).rsqrt_()
