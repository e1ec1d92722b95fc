"""Sequence attention over a pool whose entries were linear mixers: a state in place of keys.

B rows, T tokens, M = heads times their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.joint import ALIGNED
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.students.dreamer.pools import AttentionPool, Depth
from ltconvert.convert.teachers.spec import TeacherSpec


class RecurrentPool(AttentionPool):
    """A linear mixer whose projections are mixtures over the pool, by the same weights.

    ``qkv`` is all projections of the mixer's input, one below the other, filled up with zeros to
    whole ``ALIGNED`` channels, which grouped products need. What a mixer has beside matrices that
    read the stream or write to it (convolution, decays, norm of the heads) belongs to the depth, as
    windows and positions do.

    Attributes:
        cores: of each layer of the teacher its mixer without projections.

    Args:
        mixers: one a layer of the teacher; they lose their projections.
    """

    def __init__(self, spec: TeacherSpec, entries: int, mixers: Sequence[LinearMixer]) -> None:
        linears = [getattr(mixers[0], name) for name in mixers[0].projections()]
        widths = [linear.out_features for linear in linears]
        bias = any(linear.bias is not None for linear in linears)
        super().__init__(spec, entries, [*widths, -sum(widths) % ALIGNED], bias=bias)
        self.cores = nn.ModuleList(mixer.core() for mixer in mixers)

    def mixed(
        self, projected: Sequence[Tensor], context: SequenceContext, cache_layer: Any, at: Depth
    ) -> Tensor:
        """See ``AttentionPool``."""
        core, (*projected, filling) = self.cores[at.layer], projected
        assert isinstance(core, LinearMixer)
        return core.mixed(projected, context, cache_layer).to(filling.dtype)

    def core_parameters(self) -> int:
        """Values that belong to a depth."""
        return sum(parameter.numel() for parameter in self.cores[0].parameters())


def sequence_pool(
    spec: TeacherSpec, entries: int, mixers: Sequence[LinearMixer] = ()
) -> AttentionPool:
    """The pool for the mixers of a teacher's layers: linear ones, or softmax attention."""
    return RecurrentPool(spec, entries, mixers) if mixers else AttentionPool(spec, entries)
