"""Speed of the kernels against what else computes the same, and against what the machine allows.

    python benchmarks/run.py [--op linear_kl --op delta_rule] [--quick] [--json FILE]

One table: time of ours, floor, peers (packages that are installed), memory and target. Each op runs
in a process of its own that begins with an empty cache of compiled kernels, so that the seconds of
its first call are those of a fresh machine; all times of a row come from one process. A row whose
parity is red shows no speed, and the exit code is 1. Progress goes to stderr as it is made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from ltconvert.benchmarks.case import Case, Options, Scale
from ltconvert.benchmarks.cases import OPS
from ltconvert.benchmarks.harness import measure, reason
from ltconvert.benchmarks.rows import Row, brief, render

GRACE_SECONDS = 90.0  # ours only, once the time for peers is over
LINE = "ROW "
Measure = Callable[[str, argparse.Namespace, float], Iterator[Row]]


def main(argv: Sequence[str] | None = None, measure_op: Measure | None = None) -> int:
    """Print the table; 1 when parity is red or an op failed."""
    arguments = _parse(argv)
    if arguments.measure is not None:
        _child(arguments)
        return 0
    until = time.time() + 60.0 * arguments.minutes
    rows: list[Row] = []
    for op in arguments.op or OPS:
        _say(f"{op}")
        for row in (measure_op or _in_a_process)(op, arguments, until):
            if row.bad:
                _say(f"  {brief(row)}")
            rows.append(row)
    print(describe(arguments.device))
    print(render(rows), flush=True)
    if arguments.json:
        report = {"machine": describe(arguments.device), "rows": [row.to_dict() for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    bad = [row for row in rows if row.bad]
    if bad:
        _say(f"{len(bad)} of {len(rows)} rows have red parity or failed")
    return 1 if bad or not rows else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=OPS, help="may be repeated; all if none")
    parser.add_argument("--quick", action="store_true", help="one shape an op, shorter timing")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="limit of a peer's phase")
    parser.add_argument("--minutes", type=float, default=4.0, help="then peers are skipped")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--backend", default="triton" if gpu else "reference")
    parser.add_argument("--measure", choices=OPS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _in_a_process(op: str, arguments: argparse.Namespace, until: float) -> Iterator[Row]:
    """Rows of an op as its process hands them over; its death is a row."""
    command = [sys.executable, __file__, "--measure", op, "--until", str(until)]
    command += ["--device", arguments.device, "--backend", arguments.backend]
    command += ["--peer-seconds", str(arguments.peer_seconds)]
    command += ["--quick"] * arguments.quick + ["--no-peers"] * arguments.no_peers
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        limit = max(until - time.time(), 0.0) + GRACE_SECONDS
        child = subprocess.Popen(
            ["timeout", f"{limit:.0f}", *command],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        with child:
            for line in child.stdout:
                if line.startswith(LINE):
                    yield Row.from_dict(json.loads(line.removeprefix(LINE)))
        if child.returncode:
            late = child.returncode == 124
            why = f"took over {limit:.0f} s" if late else f"exit code {child.returncode}"
            yield Row(op, "the rest", "", failed=why)


def _child(arguments: argparse.Namespace) -> None:
    """Measure one op; rows go to stdout as JSON lines."""
    device = torch.device(arguments.device)
    scale: Scale = "quick" if arguments.quick else "full"
    if device.type == "cpu":
        scale = "tiny"
    options = Options(
        device,
        arguments.backend,
        peers=not arguments.no_peers,
        peer_seconds=arguments.peer_seconds,
        until=arguments.until,
        rep_ms=30 if arguments.quick else 100,
    )
    for row in _rows(arguments.measure, scale, options):
        print(LINE + json.dumps(row.to_dict()), flush=True)


def _rows(op: str, scale: Scale, options: Options) -> Iterator[Row]:
    try:
        module = importlib.import_module(f"ltconvert.benchmarks.cases.{op}")
        found: list[Case] = module.cases(scale, options.device)
    except Exception as error:
        yield Row(op, "", "", failed=reason(error))
        return
    for case in found:
        yield from measure(case, options)


def describe(device: str) -> str:
    """Machine and versions, one line."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU (tiny shapes)"
    versions = []
    for package in ("triton", "fla-core", "liger-kernel", "tilelang"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{name}, torch {torch.__version__}, {', '.join(versions)}\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
