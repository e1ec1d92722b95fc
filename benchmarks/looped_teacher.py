"""Train a small looped teacher from scratch, for conversions where no published one can be had.

    python benchmarks/looped_teacher.py --data text.jsonl.xz --out runs/looped
    ltconvert distill --teacher runs/looped/teacher --recipe hybrid25 --data text.jsonl.xz

Ouro's architecture (sandwich norms, the final norm after every loop) at a small size, with the
tokenizer of another teacher; next-token cross-entropy after every loop, all loops weighing the
same, so that it is of use at fewer loops too. The same command goes on after it was killed, or
stopped by ``--minutes``. ``OUT/teacher`` has the published layout; at the end held-out loss and
recall are shown at every number of loops (``OUT/scores.json``). Several GPUs: through torchrun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ltconvert.benchmarks.looped_model import looped_spec, new_model, read_tokenizer, save_teacher
from ltconvert.benchmarks.looped_objective import LoopedObjective
from ltconvert.benchmarks.looped_scores import score, table
from ltconvert.cli_session import INTERRUPTED, Session, prepare
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.data import PackedStream, as_recorded, data_identity
from ltconvert.distill.evaluation.scores import heldout_rows
from ltconvert.distill.interrupt import OutOfTime, Stopped
from ltconvert.distill.processes import is_main_process, join_processes, wait_for_everyone
from ltconvert.distill.records import write_json
from ltconvert.distill.run_identity import NEUTRAL, claim_for
from ltconvert.distill.run_lock import working_in
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.trainer import train
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.evaluation import EvalSettings
from ltconvert.recipes.runtime import RuntimeSettings
from ltconvert.recipes.stages import TrainSettings

STAGE, TEACHER_FOLDER, SCORES_FILE = "looped", "teacher", "scores.json"


def main(arguments: list[str] | None = None) -> int:
    """0 when trained or out of time, 2 after a mistake of the user's, 130 after a signal."""
    options = _parser().parse_args(arguments)
    session = Session(options.device, options.precision, "auto", False, False, False)
    prepare(session)
    try:
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
    """Train, save and score; goes on from what ``--out`` holds."""
    device = session.device()
    join_processes(device)
    (precision, _), log = session.precision(device, options.out), RunLog(options.out)
    tokenizer = read_tokenizer(options.tokenizer)
    data = DataSettings(source=options.data, heldout_share=options.heldout_share)
    spec = looped_spec(
        tokenizer,
        layers=options.layers,
        heads=options.heads,
        loops=options.loops,
        mlp=options.mlp,
    )
    model = new_model(spec, options.seed).to(device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    log.say(f"{size:.1f} M parameters, {spec.num_layers} layers, {spec.num_loops} loops, {device}")
    _train(model, tokenizer, data, options, precision, log, device)
    if is_main_process():
        save_teacher(model, tokenizer, options.out / TEACHER_FOLDER)
        log.say(f"saved in {options.out / TEACHER_FOLDER}")
        settings = EvalSettings(
            heldout_tokens=options.heldout_tokens, heldout_seq_len_tokens=options.length
        )
        rows = heldout_rows(data, tokenizer, settings)
        recall = options.recall_lengths, options.recall_examples
        scores = score(model, tokenizer, rows, *recall, precision=precision)
        write_json(options.out / SCORES_FILE, scores)
        for line in table(scores):
            log.say(line)
    wait_for_everyone()


def _train(
    model: LT2ForCausalLM,
    tokenizer: Any,
    data: DataSettings,
    options: argparse.Namespace,
    precision: str,
    log: RunLog,
    device: torch.device,
) -> None:
    """All steps, or those that there is time for; the model is then frozen and in eval mode."""
    settings = _settings(options)
    _claim(options, model.model.spec, data, settings, precision)
    stream = PackedStream(
        data,
        tokenizer,
        split="train",
        seq_len_tokens=settings.seq_len_tokens,
        rows=options.rows,
        seed=options.seed,
    )
    objective = LoopedObjective(model, settings.lr, every_loop=options.loss == "mean")
    try:
        train(
            objective,
            stream,
            settings,
            stage=STAGE,
            stage_dir=options.out,
            log=log,
            precision=precision,
            device=device,
            seed=options.seed,
            runtime=RuntimeSettings(compile=options.compile),
            limit_s=None if options.minutes is None else 60 * options.minutes,
        )
    except OutOfTime as stopped:
        log.say(str(stopped))
    model.eval().requires_grad_(False)


def _settings(options: argparse.Namespace) -> TrainSettings:
    return TrainSettings(
        budget_tokens=options.tokens,
        seq_len_tokens=options.length,
        batch_tokens=max(options.batch_tokens, options.rows * options.length),
        micro_batch_rows=options.rows,
        lr=options.lr,
        warmup_share=0.03,
        final_lr_share=0.05,
        weight_decay=0.1,
        checkpoint_minutes=2,
    )


def _claim(
    options: argparse.Namespace,
    spec: TeacherSpec,
    data: DataSettings,
    settings: TrainSettings,
    precision: str,
) -> None:
    """Note what the run is in an empty folder; refuse one that holds another run."""
    training = {k: v for k, v in settings.model_dump(mode="json").items() if k not in NEUTRAL}

    def identity(then: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "precision": precision,
            "seed": options.seed,
            "loss": options.loss,
            "model": asdict(spec),
            "data": as_recorded(data_identity(data), then["data"] if then else None),
            "train": training,
        }

    claim_for(options.out, STAGE, identity)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokenizer", default="smollm2-135m", help="a packaged teacher, a .gguf file or a folder")
    add("--data", default="pydoc", help="as that of `ltconvert distill`")
    add("--heldout-share", type=float, default=DataSettings().heldout_share)
    add("--out", type=Path, default=Path("runs/looped"))
    add("--tokens", type=int, default=100_000_000, help="to train on")
    add("--minutes", type=float, help="stop training cleanly after so many; save and score")
    add("--loss", default="mean", choices=("mean", "last"), help="over loops, or of the last")
    add("--layers", type=int, default=8)
    add("--heads", type=int, default=6, help="of 64 channels each: the hidden width")
    add("--mlp", type=int, help="width inside the MLP; default: 8/3 of the hidden width")
    add("--loops", type=int, default=4)
    add("--length", type=int, default=2048, help="tokens a row")
    add("--rows", type=int, default=16, help="rows a forward pass")
    add("--batch-tokens", type=int, default=65_536, help="tokens a step")
    add("--lr", type=float, default=1.5e-3, help="peak learning rate")
    add("--compile", default="auto", choices=("auto", "off", "layers"))
    add("--heldout-tokens", type=int, default=65_536)
    add("--recall-lengths", type=int, nargs="+", default=[256, 512, 1024])
    add("--recall-examples", type=int, default=32, help="a kind and length")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
