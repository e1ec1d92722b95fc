"""Which constants of the decode kernels are fastest on this GPU, at the shapes of Ouro-1.4B.

    python benchmarks/tune_decode.py
    python benchmarks/tune_decode.py --op gdn_step --seconds 20 --no-step
    python benchmarks/tune_decode.py --op none --set overlap.ALLOWED=False --mixer gdn_window

Every candidate is judged for parity and then timed in a CUDA graph, its kernels beginning
early; the present constants also without that. A line has the time over that of the present ones,
then microseconds a case, and their share of a copy. Whole steps of a student are timed with what
was found. Candidates are compiled beforehand, by a process a core, into Triton's cache. ``--set``
changes constants for the whole run, so nothing has to be edited. The last line says what to set.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.tune_candidates import (
    SHAPES,
    Constants,
    Group,
    applied,
    groups,
    module_of,
    moved_bytes,
    text_of,
)
from ltconvert.benchmarks.tune_steps import Steps
from ltconvert.benchmarks.tune_timing import alone, right_and_timed
from ltconvert.kernels import dispatch, overlap

SHOWN = 4  # of a group, the present constants beside them
TRIED = 3  # of the best of a group, in whole steps
COPY_BYTES = 2**31
Timed = tuple[float, dict[str, Any], list[float]]  # score, constants, microseconds a case


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is fastest; 1 where nothing is right."""
    arguments = _parse(argv)
    until, device = time.time() + arguments.seconds, torch.device(arguments.device)
    fixed = dict(_setting(text) for text in arguments.set)
    with applied(fixed), dispatch.use("triton"), torch.no_grad():
        chosen = groups([op for op in arguments.op if op != "none"], device)
        if arguments.part is not None:
            _compile(chosen, *arguments.part)
            return 0
        if device.type == "cuda":
            _compile_in_processes(chosen, arguments)
        ranked = {group.name: tune(group, device, until) for group in chosen}
        best = {name: value for found in ranked.values() for name, value in _best(found).items()}
        if not arguments.no_step and device.type == "cuda":
            steps = Steps(arguments.mixer, arguments.context, device)
            best = steps.choose(best, _alternatives(chosen, ranked), until)
    print(f"set: {text_of(fixed | best)}", flush=True)
    return 0 if all(ranked.values()) else 1


def tune(group: Group, device: torch.device, until: float) -> list[Timed]:
    """Candidates that are right, fastest first; prints the best few."""
    inputs = [[case.make(seed) for seed in range(case.sets)] for case in group.cases]
    found: list[Timed] = []
    print(f"{group.name}: {'; '.join(case.shape for case in group.cases)}", flush=True)
    for constants in group.candidates:
        if found and time.time() > until:
            print("  no time left for the others", flush=True)
            break
        try:
            with applied(constants), overlap.overlapping():
                times = [right_and_timed(*x, device) for x in zip(group.cases, inputs, strict=True)]
        except Exception as error:
            print(f"  {text_of(constants)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        score = group.score(times, found[0][2] if found else times)
        found.append((score, constants, times))
    if not found:
        return found
    shown = sorted(found, key=lambda x: x[0])[:SHOWN] + found[:1]
    times = [right_and_timed(*x, device) for x in zip(group.cases, inputs, strict=True)]
    whole = {**found[0][1], "overlap.ALLOWED": False}
    shown.append((group.score(times, found[0][2]), whole, times))
    least = [moved_bytes(sets[0]) for sets in inputs]
    rate = COPY_BYTES / timing.copy_ms(COPY_BYTES, device) if device.type == "cuda" else 1e6
    for score, constants, times in shown:
        cells = (
            f"{us:6.2f} ({size / us / 1e3:4.0f} GB/s, {size / us / rate * 1e5:3.0f} %)"
            for us, size in zip(times, least, strict=True)
        )
        print(f"  {score:.3f}: {' '.join(cells)}  {text_of(constants)}", flush=True)
    return sorted(found, key=lambda x: x[0])


def _best(found: list[Timed]) -> dict[str, Any]:
    return found[0][1] if found else {}


def _alternatives(
    chosen: list[Group], ranked: dict[str, list[Timed]]
) -> list[tuple[set[str], Constants]]:
    """What stands behind the best of each group, since kernels share the GPU in a step and not
    here; and the names of what they stand in place of."""
    found = []
    for group in chosen:
        names = {name for constants in group.candidates for name in constants}
        found += [(names, constants) for _, constants, _ in ranked[group.name][1:TRIED]]
    return found


def _compile_in_processes(chosen: list[Group], arguments: argparse.Namespace) -> None:
    count = min(arguments.jobs, sum(len(x.candidates) for x in chosen))
    words = [word for op in arguments.op for word in ("--op", op)]
    words += [word for text in arguments.set for word in ("--set", text)]
    began = time.time()
    parts = [
        subprocess.Popen([sys.executable, "-P", __file__, *words, "--part", f"{i}/{count}"])
        for i in range(count)
    ]
    for part in parts:
        part.wait()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)


def _compile(chosen: list[Group], part: int, parts: int) -> None:
    """Call a share of the candidates once; what fails shows when it is timed."""
    work = [(case, x) for group in chosen for case in group.cases for x in group.candidates]
    for case, constants in work[part::parts]:
        for early in (True, False) if not constants else (True,):
            try:
                with applied({**constants, "overlap.ALLOWED": early}), overlap.overlapping():
                    alone(case, **case.make(0))
            except Exception:
                continue


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--set {text}: expected NAME=VALUE, such as decode_linear.AHEAD=2")
    try:
        module_of(name)
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise SystemExit(f"--set {text}: {error}") from None


def _pair(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    return int(part), int(parts)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--op", action="append", choices=[*SHAPES, "none"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seconds", type=float, default=55.0, help="no candidate begins later")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--no-step", action="store_true", help="no whole steps at the end")
    parser.add_argument("--mixer", default="gdn", help="of the student's layers that are not full")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--part", type=lambda x: tuple(map(int, x.split("/"))), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args(argv)
    arguments.op = arguments.op or list(SHAPES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
