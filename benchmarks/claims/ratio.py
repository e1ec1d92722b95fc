"""Which ratio of full attention to Gated DeltaNet is best, looped and trained from scratch?

    python benchmarks/claims/ratio.py --data text.jsonl.xz --minutes 30

Every ratio has the same number of parameters and sees the same tokens. Measured are the held-out
loss and recall: a number hidden in text, the share of exact answers and nats an answer token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ltconvert.benchmarks.claims.common import (
    Finding,
    compare,
    equal_config,
    ratio_mixers,
    shown,
    table,
)
from ltconvert.benchmarks.claims.text import TINY, TextBench, by_seed, text_parser
from ltconvert.benchmarks.claims.trials import Bench, launch, run_trials
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.evaluation.recall import recall_scores
from ltconvert.errors import UserError

FULL, HYBRID, LINEAR = "1:0", "1:4", "0:1"
_TINY = TINY | {"layers": 5, "recall_lengths": [320], "recall_examples": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """See ``trials.launch``."""
    parser = text_parser(__doc__, "ratio")
    add = parser.add_argument
    add("--ratios", dest="variants", nargs="+", default=[FULL, HYBRID, LINEAR], help="full:gdn")
    add("--recall-lengths", type=int, nargs="+", default=[256, 512], help="tokens")
    add("--recall-examples", type=int, default=64, help="a length")
    return launch(parser, run, _TINY, arguments)


def run(bench: Bench) -> None:
    """All trials that are left, then the tables."""
    options = bench.options
    mixers = {name: ratio_mixers(*_read_ratio(name), options.layers) for name in options.variants}
    text = TextBench(bench)

    def measure(name: str, seed: int, folder: Path, limit_s: float | None) -> dict[str, Any]:
        config = equal_config(options, text.vocab, mixers[name], options.loops)
        model = text.train(config, seed, folder, limit_s)
        size = model_facts(config).parameters
        return {"parameters": size, "loss": text.loss(model), **recall(text, model)}

    results = run_trials(bench, options.variants, measure)
    rows = []
    for name, of_seed in results.items():
        size = next((found["parameters"] for found in of_seed.values()), "-")
        numbers = [list(by_seed(of_seed, x).values()) for x in ("loss", "accuracy", "nll")]
        rows.append([name, size, len(of_seed), *map(shown, numbers)])
    head = ["full : gdn", "parameters", "seeds", "held-out loss", "recall", "nats an answer token"]
    for line in table(head, rows):
        bench.log.say(line)
    bench.conclude(findings(results))


def recall(text: TextBench, model: LT2ForCausalLM) -> dict[str, float]:
    """``accuracy`` and ``nll`` of a hidden number, means over the lengths."""
    options = text.bench.options
    found = recall_scores(
        model,
        text.tokenizer,
        options.recall_lengths,
        options.recall_examples,
        kinds=["needle"],
        precision=text.bench.precision,
    )["needle"]
    return {x: sum(of[x] for of in found.values()) / len(found) for x in ("accuracy", "nll")}


def findings(results: dict[str, dict[int, Any]]) -> list[Finding]:
    """The paper's claims, as far as ratios for them were run."""
    claims = (
        ("1:4 is better than full attention alone", FULL, HYBRID, "loss"),
        ("1:4 is better than Gated DeltaNet alone", LINEAR, HYBRID, "loss"),
        ("full attention recalls better than Gated DeltaNet alone", LINEAR, FULL, "nll"),
    )
    units = {"loss": "held-out loss, nats a token", "nll": "nats an answer token"}
    return [
        compare(
            claim,
            by_seed(results[worse], number),
            by_seed(results[better], number),
            f"{units[number]}, {worse} - {better}",
        )
        for claim, worse, better, number in claims
        if worse in results and better in results
    ]


def _read_ratio(name: str) -> tuple[int, int]:
    full, _, linear = name.partition(":")
    if not (full.isdecimal() and linear.isdecimal()):
        raise UserError(f"--ratios {name}: expected full:gdn in whole numbers, such as 1:4")
    return int(full), int(linear)


if __name__ == "__main__":
    sys.exit(main())
