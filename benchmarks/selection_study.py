"""Which layers should stay full? The ways to choose them, side by side on one aligned student.

    python benchmarks/selection_study.py --data text.jsonl.xz --seed 0 --out runs/which-0
    python benchmarks/selection_study.py --combine runs/which-0 runs/which-1

The student is aligned once; every case (a method at a share of full layers) begins with hard links
to it and goes through `select` and a small `logits`, the same rows in the same order. Measured are
the KL on held-out text and the recall of a needle, after both. Most methods give an order of all
layers and are asked once, for the largest share; a smaller share takes the first of that order
(``selection_cases.first_of`` holds it to that). The same command goes on after it was killed, and
does what further ``--methods`` and ``--shares`` ask for. ``OUT/study.json`` has everything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ltconvert import recipes
from ltconvert.benchmarks.selection_cases import Study, measure, scores_of
from ltconvert.benchmarks.selection_table import STUDY_FILE, read_studies, show
from ltconvert.cli_session import INTERRUPTED, Session, prepare
from ltconvert.convert.teachers.load import describe_teacher, load_teacher
from ltconvert.distill.data import as_recorded, data_identity
from ltconvert.distill.interrupt import Stopped
from ltconvert.distill.lineage import START
from ltconvert.distill.plan import plan
from ltconvert.distill.planning.rows import recorded_rows, with_rows
from ltconvert.distill.records import versions, write_json
from ltconvert.distill.run_identity import RUN_FILE, claim_for, teacher_identity
from ltconvert.distill.run_lock import working_in
from ltconvert.distill.selection.ranking import count_full_layers
from ltconvert.errors import UserError

METHODS = ("uniform", "kl", "kl-fast", "kl-greedy", "kl-gates", "recall", "recall-greedy")
DIRECTIONS = ("kl-fast:remove", "kl-fast:restore", "kl-fast:both")  # kl-fast is the recipe's own
# What selecting and scoring may take where the recipe is meant for whole conversions.
SMALL = {
    "select": {"eval_tokens": 16_384, "train_tokens": 65_536, "stable_rounds": 1},
    "eval": {
        "heldout_tokens": 32_768,
        "recall_lengths_tokens": [1024, 2048],
        "recall_examples": 64,
    },
    "longctx": {"enabled": False},
}


def main(arguments: list[str] | None = None) -> int:
    """0 when all cases are measured, 2 after a mistake of the user's, 130 after a signal."""
    options = _parser().parse_args(arguments)
    session = Session(options.device, options.precision, "auto", False, False, False)
    prepare(session)
    try:
        if options.combine:
            print("\n".join(show(read_studies(options.combine))))
            return 0
        with working_in(options.out):
            run(options, session)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, session: Session) -> None:
    """All cases that are not measured yet; then the table."""
    study = _begin(options, session)
    off = {"enabled": False}
    nothing_full = {"student": {"full_layers": 0}, "select": off, "logits": off}
    aligned = study.run(recipes.adjust(study.recipe, options=nothing_full), study.base)
    teacher_file = study.out / "teacher.json"
    if not teacher_file.exists():
        write_json(teacher_file, {"recall": study.recall(study.teacher.model)})
    document = {
        "settings": json.loads((study.out / RUN_FILE).read_text()),
        "device": _name(study.device),
        "versions": versions(),
        "teacher": json.loads(teacher_file.read_text()),
        "after": {name: scores_of(aligned.records[name]) for name in (START, "align")},
    }
    for method in options.methods:
        for share in sorted(options.shares, reverse=True):
            measure(study, method, share, max(options.shares))
            finished = sorted((study.out / "cases").glob("*.json"))
            document["cases"] = [json.loads(path.read_text()) for path in finished]
            write_json(study.out / STUDY_FILE, document)
    print("\n".join(show([document])))


def _begin(options: argparse.Namespace, session: Session) -> Study:
    """Refuse what does not fit, load the teacher, claim the folder."""
    device = session.device()
    own = {"seed": options.seed, "data": {"source": options.data}}
    budgets = {"align": options.align_tokens, "logits": options.logits_tokens}
    budget = {stage: {"budget_tokens": tokens} for stage, tokens in budgets.items()}
    recipe = recipes.resolve(options.recipe, options=SMALL | own | budget, overrides=options.set)
    recipe = recipes.adjust(recipe, options={"student": {"full_layers": max(options.shares)}})
    base = options.out / "aligned"
    precision, _ = session.precision(device, base)
    rows = recorded_rows(recipe, base)
    if not rows:
        spec, _ = describe_teacher(options.teacher)
        rows = plan(recipe, spec, device, precision, run_dir=options.out).micro_batch_rows
    teacher = load_teacher(options.teacher, device=device)
    if count_full_layers(max(options.shares), teacher.spec.num_layers) == teacher.spec.num_layers:
        raise UserError(f"--shares {max(options.shares)}: that is every layer; give less")
    study = Study(with_rows(recipe, rows), teacher, options.out, precision)
    claim_for(options.out, "study", partial(_identity, study))
    return study


def _identity(study: Study, then: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that the cases share and that their figures depend on; ``then``: as noted before."""
    recipe = study.recipe.model_dump(mode="json", exclude={"runtime"})
    recipe["data"] = as_recorded(
        data_identity(study.recipe.data), then["recipe"]["data"] if then else None
    )
    del recipe["student"]["full_layers"], recipe["select"]["method"]
    teacher = teacher_identity(study.teacher, then["teacher"] if then else None)
    return {"teacher": teacher, "precision": study.precision, "recipe": recipe}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share of the layers between 0 and 1")
    return share


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--teacher", default="smollm2-135m")
    add("--recipe", default="hybrid25", help="its mixer, rates and rows are those of the study")
    add("--data", default="pydoc", help="as that of `ltconvert distill`")
    add("--out", type=Path, default=Path("runs/selection-study"))
    add("--align-tokens", type=int, default=4_000_000)
    add("--logits-tokens", type=int, default=2_000_000, help="a case")
    add("--methods", nargs="+", default=METHODS, choices=(*METHODS, *DIRECTIONS), metavar="METHOD")
    add("--shares", nargs="+", type=_share, default=[0.125, 0.25], metavar="SHARE")
    add("--seed", type=int, default=0, help="of new weights, rows and examples")
    add(
        "--set", action="append", default=[], metavar="A.B=C", help="as that of `ltconvert distill`"
    )
    add(
        "--combine", nargs="+", type=Path, metavar="OUT", help="only show the mean of these studies"
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
