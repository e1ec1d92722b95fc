"""A dense model as a looped one: its core becomes few physical layers that run several times.

Relaxed recursive transformers (arXiv 2410.20672, sections 2.2 and 2.3). Of L layers the first p
and the last c stay; the L - p - c between them are tied to K = (L - p - c) / T physical ones that
run T times, so that visit t of core layer k stands for layer p + t K + k ("cycle"). Tied layers
share their matrices; norm gains and biases are each loop's own, and so is a low-rank correction of
every matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ltconvert.convert.low_rank import low_rank
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)")


def stepwise(index: int, tied: int, layers: int) -> list[int]:
    """The layer at an even distance, the first and the last one among them."""
    return [round(index * (layers - 1) / (tied - 1)) if tied > 1 else 0]


def average(index: int, tied: int, layers: int) -> list[int]:
    """All layers that are tied together."""
    return list(range(index, layers, tied))


def lower(index: int, tied: int, layers: int) -> list[int]:
    """The layer of the first loop."""
    return [index]


# Whose mean a tied matrix starts from: (index among the K tied layers, K, layers of the core) ->
# indices in the core.
STARTS: dict[str, Callable[[int, int, int], list[int]]] = {
    "stepwise": stepwise,
    "average": average,
    "lower": lower,
}


def tied_spec(spec: TeacherSpec, *, loops: int, prelude: int, coda: int, rank: int) -> TeacherSpec:
    """The architecture of the looped model that a dense one becomes.

    Args:
        loops: T.
        prelude, coda: p and c.
        rank: of each loop's own corrections, cut to that of the matrices.

    Raises:
        UserError: the teacher loops already, its core does not divide into so many loops, or
            layers that would be tied differ in their windows or positions.
    """
    if spec.num_loops > 1:
        raise UserError(
            f"student.loop_start ties the layers of a dense teacher, this one runs "
            f"{spec.num_loops} loops already; leave student.loop_start out"
        )
    core = spec.num_layers - prelude - coda
    if core < 1 or core % loops:
        raise UserError(
            f"{spec.num_layers} layers without student.prelude_layers {prelude} and "
            f"student.coda_layers {coda} leave {core}, which student.loops {loops} does not "
            f"divide; {_advice(spec.num_layers, core, loops)}"
        )
    tied = core // loops
    for name in ("layer_windows", "layer_rope"):
        _check_alike(getattr(spec, name)[prelude : prelude + core], tied, prelude, name)
    kept = [*range(prelude + tied), *range(spec.num_layers - coda, spec.num_layers)]
    return replace(
        spec,
        num_layers=len(kept),
        num_loops=loops,
        prelude_layers=prelude,
        coda_layers=coda,
        tied_rank=min(rank, spec.hidden_size),
        layer_windows=tuple(spec.layer_windows[i] for i in kept),
        layer_rope=tuple(spec.layer_rope[i] for i in kept),
    )


def _advice(num_layers: int, core: int, loops: int) -> str:
    if core < loops:
        return "keep fewer layers outside the core"
    fitting = ", ".join(str(count) for count in range(2, core + 1) if core % count == 0)
    outside = num_layers - core + core % loops
    return f"keep {outside} layers outside the core, or loop {fitting} times"


def _check_alike(values: Sequence[Any], tied: int, prelude: int, name: str) -> None:
    for i in range(tied, len(values)):
        if values[i] != values[i % tied]:
            what = {"layer_windows": "windows", "layer_rope": "positions"}[name]
            raise UserError(
                f"layers {prelude + i % tied} and {prelude + i} would be tied and have the {what} "
                f"{values[i % tied]} and {values[i]}; choose student.prelude_layers, "
                f"student.coda_layers and student.loops so that every loop has the same {what}"
            )


@torch.no_grad()
def tie_layers(
    teacher: LT2ForCausalLM,
    *,
    loops: int,
    prelude: int = 0,
    coda: int = 0,
    start: str = "average",
    rank: int = 0,
    squares: Mapping[str, Tensor] | None = None,
) -> LT2ForCausalLM:
    """The looped model, every teacher tensor used once; exact where the rank is full.

    What is not tied is the same memory as the teacher's.

    Args:
        start: one of STARTS.
        squares: mean of ``x x^T`` over the inputs of the teacher's matrices, by their tensors'
            names: corrections are then the best on such inputs, see ``low_rank``.

    Raises:
        UserError: see ``tied_spec``.
        ValueError: a teacher tensor has no place in it.
    """
    spec = tied_spec(teacher.config.spec(), loops=loops, prelude=prelude, coda=coda, rank=rank)
    with torch.device("meta"):
        model = LT2ForCausalLM(LT2Config.from_spec(spec))
    shapes = {name: value.shape for name, value in model.named_parameters()}
    tied = spec.num_layers - prelude - coda
    own, groups = _sorted_out(teacher, prelude, tied, loops)
    _check_places({*own, *(f"model.layers.{prelude + i}.{name}" for i, name in groups)}, shapes)
    for (index, name), mine in groups.items():
        if len(mine) != loops:
            raise ValueError(
                f"layer {prelude + min(mine)} has {name}, which layers tied to it have not"
            )
        stem = f"model.layers.{prelude + index}.{name}"
        # Evenly spaced layers come from the groups of others, too.
        sources = STARTS[start](index, tied, tied * loops)
        wanted = [groups[i % tied, name][i] for i in sources]
        names = [f"model.layers.{prelude + i}.{name}" for i in sorted(mine)]
        read = [squares.get(own_name) if squares else None for own_name in names]
        own |= _tied_tensors(stem, [mine[i] for i in sorted(mine)], wanted, read, shapes)
    model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = teacher.generation_config
    return model.requires_grad_(False).train(teacher.training)


Groups = dict[tuple[int, str], dict[int, Tensor]]


def _sorted_out(
    teacher: LT2ForCausalLM, prelude: int, tied: int, loops: int
) -> tuple[dict[str, Tensor], Groups]:
    """Tensors that stay, by their new names; those of the core by (index among the tied, name),
    each by its layer's index in the core.
    """
    own: dict[str, Tensor] = {}
    groups: Groups = {}
    for name, value in teacher.named_parameters():  # a tied head appears once, as the embedding
        match = _LAYER_TENSOR.fullmatch(name)
        layer = int(match[1]) - prelude if match else -1
        if match and 0 <= layer < tied * loops:
            groups.setdefault((layer % tied, match[2]), {})[layer] = value.detach()
        elif match and layer >= 0:
            own[f"model.layers.{int(match[1]) - tied * (loops - 1)}.{match[2]}"] = value.detach()
        else:
            own[name] = value.detach()
    return own, groups


def _check_places(found: set[str], shapes: Mapping[str, Any]) -> None:
    """Every tensor of the teacher has a place, and every place but corrections a tensor."""
    wanted = {name for name in shapes if not name.endswith((".lora_a", ".lora_b"))}
    if lost := sorted(found ^ wanted):
        raise ValueError(f"dense and looped model do not match: no place or no value for {lost[0]}")


def _tied_tensors(
    stem: str,
    values: Sequence[Tensor],
    wanted: Sequence[Tensor],
    squares: Sequence[Tensor | None],
    shapes: Mapping[str, Any],
) -> dict[str, Tensor]:
    """What becomes of one tensor of all layers that are tied together, in the order of loops."""
    if values[0].dim() == 1:
        return {stem: values[0].clone() if len(values) == 1 else torch.stack(list(values))}
    shared = torch.stack([value.double() for value in wanted]).mean(0).to(values[0].dtype)
    module = stem.removesuffix(".weight")
    if f"{module}.lora_a" not in shapes:
        return {stem: shared}
    rank = shapes[f"{module}.lora_a"][1]
    # From the shared matrix as it is stored, so that its rounding is corrected, too.
    factors = [
        low_rank(value.double() - shared.double(), rank, read)
        for value, read in zip(values, squares, strict=True)
    ]
    return {
        stem: shared,
        f"{module}.lora_a": torch.stack([a for _, a in factors]).to(shared.dtype),
        f"{module}.lora_b": torch.stack([b for b, _ in factors]).to(shared.dtype),
    }
