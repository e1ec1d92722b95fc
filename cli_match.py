"""`ltconvert inspect --match`: a Dreamer with the parameters, arithmetic and memory of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_inspect import read_config
from ltconvert.cli_models import student_folder
from ltconvert.distill.reporting.tables import size
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.students.lt2 import LT2Config
    from ltconvert.distill.planning.dreamer_shape import DreamerShape
    from ltconvert.distill.planning.footprint import Footprint


def run(
    reference: str, revision: str | None, hold: Sequence[str], context: int, *, as_json: bool
) -> None:
    """Print the model, the Dreamer that it would become, and the one that matches it.

    Args:
        hold: numbers of the shape that do not change: ``NAME``, or ``NAME=VALUE``.
        context: tokens of the rows in which arithmetic and memory are counted.

    Raises:
        UserError: a name in ``hold`` is unknown, a value makes no shape, or layers are not full.
    """
    from ltconvert.convert.inspect import model_facts
    from ltconvert.distill.planning.dreamer_shape import NUMBERS
    from ltconvert.distill.planning.footprint import footprint
    from ltconvert.distill.planning.match import match

    config, _ = read_config(student_folder(reference), revision)
    if others := sorted(set(config.mixers) - {"full"}):
        raise UserError(
            f"{reference} has {' and '.join(others)} layers; --match counts Dreamers with full "
            "attention alone: give the model that it was made from"
        )
    target = footprint(model_facts(config), config.spec(), context)
    first = start_of(config)
    start = held(first, hold)
    free = [name for name in NUMBERS if name not in {text.partition("=")[0] for text in hold}]
    found = match(start, target, free, context)
    models = {"unmatched": first, "matched": found}
    shapes = {name: {n: s.number(n) for n in NUMBERS} for name, s in models.items()}
    costs = {"model": target} | {name: s.footprint(context) for name, s in models.items()}
    if as_json:
        document = {name: cost.to_dict() for name, cost in costs.items()}
        output.print_json({"reference": reference, "footprints": document, "shapes": shapes})
        return
    columns = ("", reference, "its Dreamer", "matched Dreamer", "matched / model")
    output.print_table(f"in rows of {context:,} tokens", columns, _rows(costs))
    shown = [(n, *(shape[n] for shape in shapes.values())) for n in NUMBERS]
    inner = [s.spec.intermediate_size // s.dreamer.slices for s in models.values()]
    shown.append(("width of an expert", *inner))
    output.print_table("", ("shape", "its Dreamer", "matched Dreamer"), shown)


def start_of(config: LT2Config) -> DreamerShape:
    """The Dreamer that a model becomes by the recipe `dreamer`, or that it is."""
    from ltconvert import recipes
    from ltconvert.convert.students.dreamer.build import dreamer_options
    from ltconvert.convert.students.dreamer.config import DreamerConfig
    from ltconvert.distill.planning.dreamer_shape import DreamerShape

    student = recipes.resolve("dreamer").student.model_dump()
    options = config.dreamer or dreamer_options(config.spec(), student)
    assert options is not None
    schedule = [step.layer for step in config.schedule()]
    return DreamerShape.at_start(config.spec(), schedule, DreamerConfig(**options))


def held(shape: DreamerShape, hold: Sequence[str]) -> DreamerShape:
    """The shape with the numbers that were given as ``NAME=VALUE``.

    Raises:
        UserError: see ``run``.
    """
    from ltconvert.distill.planning.dreamer_shape import NUMBERS

    for text in hold:
        name, equals, value = text.partition("=")
        if name not in NUMBERS or (equals and not value.isdecimal()):
            raise UserError(
                f"--hold {text}: expected NAME or NAME=COUNT, with NAME one of {', '.join(NUMBERS)}"
            )
        moved = shape.with_number(name, int(value)) if equals else shape
        if moved is None:
            raise UserError(f"--hold {text}: there is no such Dreamer; choose another number")
        shape = moved
    return shape


def _rows(costs: dict[str, Footprint]) -> list[tuple[Any, ...]]:
    shown = {
        "parameters": ("parameters", output.human_count),
        "active_parameters": ("weights a token meets", output.human_count),
        "flops": ("operations a token", output.human_count),
        "memory_bytes": ("cache a token", size),
    }
    rows = []
    for name, (title, show) in shown.items():
        model, first, found = (getattr(cost, name) for cost in costs.values())
        rows.append((title, show(model), show(first), show(found), f"{found / model:.3f}"))
    return rows
