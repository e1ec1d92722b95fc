"""Trials of the claims that need training: one variant from one seed each, within a given time.

A trial's result is a file in its own folder, so that the same command goes on after it was killed
or ran out of ``--minutes``, and further ``--seeds`` and variants can be asked for later.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ltconvert.benchmarks.claims.common import Finding, claims_table
from ltconvert.benchmarks.looped_objective import LoopedObjective
from ltconvert.cli_session import INTERRUPTED, Session, prepare
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.distill.data import as_recorded, data_identity
from ltconvert.distill.interrupt import OutOfTime, Stopped
from ltconvert.distill.objective import Stream
from ltconvert.distill.records import write_json
from ltconvert.distill.resume import CHECKPOINT
from ltconvert.distill.run_identity import claim_for
from ltconvert.distill.run_lock import working_in
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.trainer import train
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.runtime import RuntimeSettings
from ltconvert.recipes.stages import TrainSettings

RESULT_FILE, CLAIMS_FILE = "result.json", "claims.json"
_NOT_IDENTITY = ("out", "seeds", "minutes", "device", "variants")  # may change from call to call


@dataclass(frozen=True)
class Bench:
    """What one call of a script has: its options, where it runs, and its log."""

    options: argparse.Namespace
    device: torch.device
    precision: str
    log: RunLog

    def conclude(self, findings: Sequence[Finding]) -> None:
        """Print the claims, and keep them."""
        write_json(self.options.out / CLAIMS_FILE, {"claims": [asdict(x) for x in findings]})
        for line in claims_table(findings):
            self.log.say(line)


def new_model(bench: Bench, config: LT2Config, seed: int) -> LT2ForCausalLM:
    """A model in fp32 on the bench's device, the same one for the same seed."""
    torch.manual_seed(seed)
    return LT2ForCausalLM(config).to(bench.device)


def train_model(
    bench: Bench,
    model: LT2ForCausalLM,
    stream: Stream,
    settings: TrainSettings,
    folder: Path,
    *,
    log: RunLog,
    stage: str,
    seed: int,
    limit_s: float | None,
) -> None:
    """The package's training loop on the loss of the last loop; goes on from ``folder/checkpoint``.

    Raises:
        OutOfTime: ``limit_s`` is over; the step is finished and saved.
    """
    objective = LoopedObjective(model, settings.lr, every_loop=False)
    with closing(log):
        train(
            objective,
            stream,
            settings,
            stage=stage,
            stage_dir=folder,
            log=log,
            precision=bench.precision,
            device=bench.device,
            seed=seed,
            runtime=RuntimeSettings(compile=bench.options.compile),
            limit_s=limit_s,
        )
    model.eval()


Measure = Callable[[str, int, Path, float | None], Mapping[str, Any]]


def run_trials(bench: Bench, names: Sequence[str], measure: Measure) -> dict[str, dict[int, Any]]:
    """``{name: {seed: result}}`` of the trials that are finished, once the time is over.

    Args:
        measure: ``(name, seed, folder, seconds that it has or None) -> result``, raises OutOfTime.
    """
    options = bench.options
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    folders = {
        (name, seed): options.out / f"{name.replace(':', '-')}-seed{seed}"
        for seed in options.seeds
        for name in names
    }
    left = [pair for pair, folder in folders.items() if not (folder / RESULT_FILE).exists()]
    for index, (name, seed) in enumerate(left):
        share = None if end is None else max(0.0, end - time.monotonic()) / (len(left) - index)
        bench.log.say(f"{name}, seed {seed} ({index + 1} of {len(left)} to do)")
        folder = folders[name, seed]
        try:
            found = measure(name, seed, folder, share)
        except OutOfTime as stopped:
            bench.log.say(str(stopped))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT_FILE, found)
        for weights in list(folder.rglob(CHECKPOINT)):
            shutil.rmtree(weights)
    results: dict[str, dict[int, Any]] = {name: {} for name in names}
    for (name, seed), folder in folders.items():
        if (folder / RESULT_FILE).exists():
            results[name][seed] = json.loads((folder / RESULT_FILE).read_text())
    return results


def trial_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Options that every script which trains has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/claims") / out)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add(
        "--minutes", type=float, help="for all trials that are left; the rest waits for a next call"
    )
    add("--tiny", action="store_true", help="seconds on a CPU; shows that it runs, no more")
    add("--layers", type=int, default=5)
    add("--heads", type=int, default=4, help="of 64 channels each: the hidden width")
    add("--mlp", type=int, default=768, help="width inside an MLP beside full attention alone")
    add("--loops", type=int, default=4)
    add("--batch-tokens", type=int, default=32_768, help="tokens a step")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--compile", default="auto", choices=("auto", "off", "layers"))
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    return parser


def launch(
    parser: argparse.ArgumentParser,
    run: Callable[[Bench], None],
    tiny: Mapping[str, Any],
    arguments: Sequence[str] | None,
) -> int:
    """0 when done or out of time, 2 after a mistake of the user's, 130 after a signal.

    Args:
        tiny: defaults under ``--tiny``; what is given on the command line stays.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--tiny" in given:
        out = parser.get_default("out")
        small = {"out": out.with_name(f"{out.name}-tiny"), "device": "cpu", "precision": "fp32"}
        parser.set_defaults(**small, **tiny)
    options = parser.parse_args(given)
    session = Session(options.device, options.precision, "auto", False, False, False)
    prepare(session)
    try:
        with working_in(options.out):
            run(_begin(options, session))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _begin(options: argparse.Namespace, session: Session) -> Bench:
    """Claim the folder of an empty ``--out``; refuse one that holds other trials."""
    device = session.device()
    precision, _ = session.precision(device, options.out)
    asked = {k: v for k, v in vars(options).items() if k not in _NOT_IDENTITY}

    def identity(then: Mapping[str, Any] | None) -> dict[str, Any]:
        known = {**asked, "precision": precision}
        if "data" in asked:
            known["data"] = _text(options.data, (then or {}).get("data"))
        return known

    claim_for(options.out, "trials", identity)
    return Bench(options, device, precision, RunLog(None))


def _text(source: str, then: Mapping[str, Any] | str | None) -> Mapping[str, Any] | str:
    """What tells a text from another one; trials of earlier versions noted its name alone."""
    if isinstance(then, str):
        return source
    return as_recorded(data_identity(DataSettings(source=source)), then)
