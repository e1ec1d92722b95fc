"""The tables of a selection study, of one seed or as the mean over several."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ltconvert.distill.data import as_recorded
from ltconvert.distill.run_identity import first_difference
from ltconvert.errors import UserError

STUDY_FILE = "study.json"
STAGES = ("select", "logits")
STAGES_OF_ROWS = ("align", "logits", "longctx")
Case = dict[str, Any]


def read_studies(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The studies in these folders.

    Raises:
        UserError: there is none, or two differ in more than the seed, or not even in that.
    """
    studies = []
    for folder in folders:
        path = folder / STUDY_FILE
        if not path.is_file():
            raise UserError(f"--combine {folder}: no {STUDY_FILE} in it; name the --out of a study")
        studies.append(json.loads(path.read_text(encoding="utf-8")))
    seeds = [study["settings"]["recipe"].pop("seed") for study in studies]
    recipes = [study["settings"]["recipe"] for study in studies]
    for recipe in recipes:  # rows at a time are the free memory's business
        for stage in STAGES_OF_ROWS:
            recipe.get(stage, {}).pop("micro_batch_rows", None)
        recipe["data"] = as_recorded(recipe.get("data", {}), recipes[0].get("data"))
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--combine: the studies' seeds are {seeds}; name each seed once")
    for folder, study in zip(folders, studies, strict=True):
        difference = first_difference(studies[0]["settings"], study["settings"])
        if difference is not None:
            name, here, there = difference
            raise UserError(
                f"--combine: {name} is {here} in {folders[0]} and {there} in {folder}; "
                "only the seed may differ"
            )
    return studies


def show(studies: Sequence[dict[str, Any]]) -> list[str]:
    """All tables, as lines of Markdown."""
    groups = by_case(studies)
    if not groups:
        raise UserError("--combine: no case has run in all studies; give them one of the same")
    shares = sorted({share for _, share in groups})
    lines = [*_base(studies), "", *results(groups)]
    for share in shares:
        lines += ["", *overlap({m: cases for (m, s), cases in groups.items() if s == share}, share)]
    return lines


def by_case(studies: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[Case]]:
    """The cases that every study has, one a study, by method and share."""
    groups: dict[tuple[str, float], list[Case]] = {}
    for case in itertools.chain.from_iterable(study["cases"] for study in studies):
        groups.setdefault((case["method"], case["share"]), []).append(case)
    return {key: cases for key, cases in groups.items() if len(cases) == len(studies)}


def jaccard(one: Iterable[int], two: Iterable[int]) -> float:
    """Shared layers over layers of either."""
    first, second = set(one), set(two)
    return len(first & second) / len(first | second)


def results(groups: dict[tuple[str, float], list[Case]]) -> list[str]:
    """A row a case: KL and recall after `select` and after `logits`, what choosing took, the set.

    Means over seeds with their standard error; of several sets the layers in all of them.
    """
    lengths = next(iter(groups.values()))[0]["after"]["select"]["recall"]
    names = ["method", "full"]
    names += [f"KL, {stage}" for stage in STAGES]
    names += [f"needle {int(n):,}, {stage}" for n in lengths for stage in STAGES]
    lines = _head([*names, "tokens read", "trained", "seconds", "layers"])
    for (method, share), cases in sorted(groups.items(), key=lambda item: item[0][1]):
        after = [case["after"] for case in cases]
        row = [method, f"{share:.1%} ({len(cases[0]['layers'])})"]
        row += [_mean([a[stage]["kl"] for a in after], ".4f") for stage in STAGES]
        row += [
            _mean([a[stage]["recall"][n]["accuracy"] for a in after], ".2f")
            for n in lengths
            for stage in STAGES
        ]
        lines.append(_row([*row, *_cost(cases), _layers(cases)]))
    if any(case["chosen_for"] != case["share"] for cases in groups.values() for case in cases):
        lines += ["", 'In the rows with "first of" the set is the beginning of that row\'s order.']
    return lines


def overlap(groups: dict[str, list[Case]], share: float) -> list[str]:
    """Jaccard index of the sets of two methods, mean over seeds; of one method, between seeds."""
    lines = _head([f"overlap at {share:.1%}", *groups])
    for method, cases in groups.items():
        row = []
        for other in groups.values():
            pairs = zip(cases, other, strict=True)
            if other is cases:
                pairs = itertools.combinations(cases, 2)
            found = [jaccard(one["layers"], two["layers"]) for one, two in pairs]
            row.append(f"{statistics.mean(found):.2f}" if found else "")
        lines.append(_row([method, *row]))
    return lines


def _base(studies: Sequence[dict[str, Any]]) -> list[str]:
    """What all cases begin with."""
    teacher = studies[0]["settings"]["teacher"]["name"]
    kls = {
        stage: _mean([s["after"][stage]["kl"] for s in studies], ".4f")
        for stage in ("start", "align")
    }
    recalls = {
        f"{int(n):,}": _mean([s["teacher"]["recall"][n]["accuracy"] for s in studies], ".2f")
        for n in studies[0]["teacher"]["recall"]
    }
    needles = ", ".join(f"{recall} at {length}" for length, recall in recalls.items())
    return [
        f"{teacher}, {len(studies)} seed(s). No layer full: KL {kls['start']} at the start, "
        f"{kls['align']} aligned. Teacher's needle: {needles} tokens."
    ]


def _cost(cases: Sequence[Case]) -> list[str]:
    if cases[0]["chosen_for"] != cases[0]["share"]:
        return [f"first of {cases[0]['chosen_for']:.1%}", "", ""]
    names = ("forward_tokens", "trained_tokens", "seconds")
    forms = (",.0f", ",.0f", ".1f")
    return [
        _mean([case["cost"][name] for case in cases], form)
        for name, form in zip(names, forms, strict=True)
    ]


def _layers(cases: Sequence[Case]) -> str:
    shared = set.intersection(*(set(case["layers"]) for case in cases))
    listed = ", ".join(map(str, sorted(shared))) or "none"
    return listed if len(cases) == 1 else f"in all: {listed}"


def _mean(values: Sequence[float], form: str) -> str:
    """The mean, and its standard error where there are several values."""
    text = format(statistics.mean(values), form)
    if len(values) == 1:
        return text
    return f"{text} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form)}"


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), "|---" * len(names) + "|"]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
