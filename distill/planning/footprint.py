"""What a token costs a model: weights held and used, arithmetic, memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ltconvert.convert.inspect import ModelFacts
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.planning.work import forward_flops


@dataclass(frozen=True)
class Footprint:
    """Costs of one model.

    Attributes:
        parameters: tied ones once.
        active_parameters: weights that a token is multiplied by, once for every visit.
        flops: multiplications and additions of a token's forward pass, head included.
        memory_bytes: cache of a token, a mean over the context.
    """

    parameters: int
    active_parameters: int
    flops: float
    memory_bytes: float

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


def footprint(facts: ModelFacts, spec: TeacherSpec, context_tokens: int) -> Footprint:
    """Of a layered or looped model, in rows of ``context_tokens``."""
    visited = sum(layer.visits * layer.visited[0] for layer in facts.layers)
    return Footprint(
        facts.parameters,
        visited + spec.vocab_size * spec.hidden_size,
        forward_flops(facts, spec, context_tokens),
        facts.cache_bytes(context_tokens) / context_tokens,
    )
