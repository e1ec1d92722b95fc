"""`ltconvert bench decode`: tokens a second of a teacher and its student behind long contexts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_models import own_teacher, student_folder
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.cli_session import Session
    from ltconvert.convert.students.lt2 import LT2Config
    from ltconvert.recipes.student import StudentSettings

COLUMNS = (
    "model",
    "path",
    "batch",
    "context",
    "tokens/s",
    "ms a step",
    "cache",
    "peak memory",
    "roofline tokens/s",
    "of it",
)


@dataclass(frozen=True)
class Request:
    """What `bench decode` was asked to measure, as it was typed."""

    reference: str | None
    shape: str | None
    recipe: str | None
    mixers: str | None
    full: str | None
    contexts: str
    batches: str
    steps: int
    plain: bool
    save: Path | None
    plot: Path | None


def run(session: Session, request: Request) -> None:
    """Measure, show a row as it comes, print the table (with `--json` a document)."""
    import torch

    from ltconvert.distill.evaluation.decode_bench import bench
    from ltconvert.distill.reporting import plots

    contexts, batches = sizes(request.contexts), sizes(request.batches)
    for path in (request.save, request.plot):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; name a file in it")
    configs = models(request)
    device = session.device()
    session.choose_kernels(device)
    precision, _ = session.precision(device)
    rows = []
    for row in bench(
        configs,
        contexts,
        batches,
        device=device,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        steps=request.steps,
        plain=request.plain,
    ):
        rows.append(row)
        output.print_note("  ".join(_cells(row)))
    document = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "precision": precision,
        "models": {name: _facts(config) for name, config in configs.items()},
        "rows": rows,
    }
    if session.json:
        output.print_json(document)
    else:
        output.print_table("", COLUMNS, [_cells(row) for row in rows])
    if request.save is not None:
        request.save.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if request.plot is not None:
        request.plot.write_bytes(plots.bench(rows))


def sizes(text: str) -> list[int]:
    """`4k,32k` -> [4096, 32768].

    Raises:
        UserError: something else than whole numbers above 0, with or without a k.
    """
    found = [re.fullmatch(r"([1-9]\d*)(k?)", part.strip().lower()) for part in text.split(",")]
    if not all(found):
        raise UserError(
            f"{text!r}: expected numbers above 0, separated by commas, such as 4k,32k or 1,8"
        )
    return [int(match[1]) * (1024 if match[2] else 1) for match in found if match]


def models(request: Request) -> dict[str, LT2Config]:
    """Configs of the teacher and of the student beside it.

    Raises:
        UserError: neither or both of a model and a shape, or a pattern that does not fit.
    """
    from ltconvert.cli_inspect import read_config
    from ltconvert.convert.students.lt2 import LT2Config
    from ltconvert.convert.teachers.shapes import shape_spec
    from ltconvert.distill.evaluation.decode_models import student_config

    if (request.reference is None) == (request.shape is None):
        raise UserError("give a model, or --shape with the name of one, and not both")
    if request.shape is not None:
        config = LT2Config.from_spec(shape_spec(request.shape))
    else:
        config, provenance = read_config(student_folder(str(request.reference)), None)
        converted = set(config.mixers) != {"full"} or config.dreamer is not None
        asked = request.recipe or request.mixers or request.full
        if converted and asked:
            raise UserError(
                f"{request.reference} is a student, with its own mixers and full layers; "
                "leave out --recipe, --mixers and --full"
            )
        # A student of full layers can be a teacher, too.
        if converted or (own_teacher(provenance) and not asked):
            return {"teacher": _teacher_of(config, provenance), "student": config}
    mixers = request.mixers.split(",") if request.mixers else []
    settings = _settings(request)
    if settings.kind == "dreamer" and settings.pool_schedule:
        output.print_note("the student has its whole pools, as before the stage shrink")
    student = student_config(config.spec(), settings, [m.strip() for m in mixers])
    return {"teacher": LT2Config.from_spec(config.spec()), "student": student}


def _teacher_of(config: LT2Config, provenance: Mapping[str, Any]) -> LT2Config:
    """The teacher that a student was made from; where it is not there, what stands for it."""
    from ltconvert.cli_inspect import read_config
    from ltconvert.convert.students.dreamer.taken_over import taken_over
    from ltconvert.convert.students.lt2 import LT2Config

    name, why = own_teacher(provenance), "the student records no teacher"
    if name is not None:
        try:
            return read_config(name, provenance["teacher"].get("revision"))[0]
        except UserError as error:
            why = f"the teacher that the student records cannot be read ({error})"
    output.print_note(f"{why}; the row of the teacher is the student's shape with full layers")
    alike = {} if config.dreamer is None else taken_over(config)
    return LT2Config.from_spec(config.spec(), **alike)


def _settings(request: Request) -> StudentSettings:
    """The recipe's student, with `--full` in its place."""
    from ltconvert import recipes

    overrides = [] if request.full is None else [f"student.full_layers={request.full}"]
    return recipes.resolve(request.recipe or "hybrid25", overrides=overrides).student


def _facts(config: LT2Config) -> dict[str, Any]:
    return {"loops": config.num_loops, "mixers": config.mixers, "family": config.family}


def _cells(row: dict[str, Any]) -> list[str]:
    from ltconvert.distill.reporting.tables import percent, size

    start = [row["model"], row["path"], str(row["batch"]), f"{row['context']:,}"]
    cache, limit = size(row["cache_bytes"]), f"{row['roofline_tokens_per_second']:,.1f}"
    if "error" in row:
        return [*start, row["error"], "-", cache, "-", limit, "-"]
    peak = "-" if row["peak_bytes"] is None else size(row["peak_bytes"])
    speed, time = f"{row['tokens_per_second']:,.1f}", f"{row['ms_per_step']:.3f}"
    return [*start, speed, time, cache, peak, limit, percent(row["roofline_share"])]
