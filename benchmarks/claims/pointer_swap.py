"""Up to how many pointers can a model follow swaps and recall the values? Looped or not, by mixer.

    python benchmarks/claims/pointer_swap.py --minutes 30

The task is in ``pointer_task.py``, how it is climbed in ``pointer_climb.py``. All variants have as
many parameters, the same steps and the same rule: phases of ``--phase-steps``, after which a
variant that is right on 90 % of the held-out questions goes one rung up, to one more swap among 4
pointers or, from n = 4 on, to n swaps among more pointers. What counts is the largest n passed with
n swaps; rungs with fewer swaps only lead there. ``--minutes`` is shared out evenly over the trials
that are left; a trial that needs more counts once a further call of the same command has finished
it. Two variants in ten minutes, on one GPU, from one seed:

    python benchmarks/claims/pointer_swap.py --variants full-looped hybrid-looped --seeds 0 \
        --minutes 10
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
from ltconvert.benchmarks.claims.pointer_climb import Climb
from ltconvert.benchmarks.claims.pointer_task import ladder
from ltconvert.benchmarks.claims.trials import Bench, launch, run_trials, trial_parser

VARIANTS = {  # (full, linear) layers of a ratio, looped or not
    "full-looped": ((1, 0), True),
    "hybrid-looped": ((1, 4), True),
    "gdn-looped": ((0, 1), True),
    "full-once": ((1, 0), False),
    "hybrid-once": ((1, 4), False),
    "gdn-once": ((0, 1), False),
}
TINY = {
    "heads": 1, "mlp": 64, "loops": 2, "batch_tokens": 256, "smallest": 2, "largest": 4,
    "steps": 10, "phase_steps": 2, "examples": 16,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """See ``trials.launch``."""
    parser = trial_parser(__doc__, "pointer_swap")
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--smallest", type=int, default=4, help="pointers to begin with")
    add("--largest", type=int, default=32, help="to end with; names there are; paper: 128")
    add("--steps", type=int, default=2000, help="optimiser steps of a trial")
    add("--phase-steps", type=int, default=50, help="steps before the next look at held-out rows")
    add("--pass-accuracy", type=float, default=0.9)
    add("--examples", type=int, default=512, help="held-out rows of each size")
    return launch(parser, run, TINY, arguments)


def run(bench: Bench) -> None:
    """All trials that are left, then the tables."""
    options, names = bench.options, bench.options.variants
    tasks = ladder(options.largest, options.smallest, options.largest)

    def measure(name: str, seed: int, folder: Path, limit_s: float | None) -> dict[str, Any]:
        ratio, looped = VARIANTS[name]
        mixers = ratio_mixers(*ratio, options.layers)
        config = equal_config(options, tasks[0].vocab, mixers, options.loops if looped else 1)
        return Climb(bench, config, tasks, seed, folder).climb(limit_s)

    results = run_trials(bench, names, measure)
    rows = []
    for name in names:
        of_seed = results[name]
        if not of_seed:
            rows.append([name, "-", "-", "-", "not finished"])
            continue
        first = next(iter(of_seed.values()))
        largest = [str(found["largest"]) for found in of_seed.values()]
        last = [found["history"][-1]["accuracy"] for found in of_seed.values()]
        rows.append(
            [name, first["parameters"], first["visits"], ", ".join(largest), shown(last, 2)]
        )
    head = ["variant", "parameters", "visits", "largest n by seed", "accuracy of the last phase"]
    for line in table(head, rows):
        bench.log.say(line)
    bench.conclude(findings(results))


def findings(results: dict[str, dict[int, Any]]) -> list[Finding]:
    """The paper's claims, as far as variants for them were run; compared is how many n were passed.

    The published hybrids of that comparison are linear and sparse; here they are full and linear.
    """
    claims = {
        "a looped hybrid gets further than looped full attention (published: n = 128 against 64)": (
            "hybrid-looped", "full-looped",
        ),
        "looping takes Gated DeltaNet further": ("gdn-looped", "gdn-once"),
        "looping takes the hybrid further": ("hybrid-looped", "hybrid-once"),
        "looping takes full attention further": ("full-looped", "full-once"),
    }  # fmt: skip
    passed = {
        name: {seed: found["sizes"] for seed, found in of_seed.items()}
        for name, of_seed in results.items()
    }
    return [
        compare(claim, passed[one], passed[other], "sizes of n passed")
        for claim, (one, other) in claims.items()
        if one in passed and other in passed
    ]


if __name__ == "__main__":
    sys.exit(main())
