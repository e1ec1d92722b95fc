"""The residual stream of one token between layers, and how a product reads it.

A branch with a norm behind it is added by the product that reads the stream next, so that it costs
no launch of its own.

B rows, C hidden width, O outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.kernels.decode_linear import decode_add_linear, decode_linear
from ltconvert.kernels.decode_norm import decode_norm


@dataclass(frozen=True)
class Stream:
    """``h``, or ``h + norm(branch)`` that nobody has added yet.

    Attributes:
        h_BC: [B, C].
        branch: what is yet to be normed and added, [B, C], and the norm; None where nothing is.
    """

    h_BC: Tensor
    branch: tuple[Tensor, RMSNorm] | None = None

    def settled(self) -> Tensor:
        """The stream itself, [B, C]: a launch where a branch is yet to be added."""
        return self.h_BC if self.branch is None else normed(*self.branch, self.h_BC)

    def product(
        self, weight_OC: Tensor, bias_O: Tensor | None, norm: nn.Module, **gate: Any
    ) -> tuple[Tensor, Tensor]:
        """(linear(norm(stream)) [B, O], the stream [B, C]); ``gate`` as in ``decode_linear``."""
        options = {**norm_of(norm), **gate}
        if self.branch is None:
            return decode_linear(self.h_BC, weight_OC, bias_O, **options), self.h_BC
        branch_BC, branch_norm = self.branch
        options |= {f"branch_{name}": value for name, value in norm_of(branch_norm).items()}
        return decode_add_linear(branch_BC, weight_OC, bias_O, stream_BC=self.h_BC, **options)


def normed(x_BC: Tensor, norm: RMSNorm, residual_BC: Tensor | None = None) -> Tensor:
    """residual + norm(x), [B, C]."""
    return decode_norm(x_BC, norm.weight, residual_BC, eps=norm.eps, offset=norm.offset)


def norm_of(norm: nn.Module) -> dict[str, Any]:
    """A norm as the keywords of ``decode_linear``."""
    if not isinstance(norm, RMSNorm):
        return {}
    return {"norm_weight_C": norm.weight, "norm_eps": norm.eps, "norm_offset": norm.offset}
