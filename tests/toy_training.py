"""A toy stage for the trainer's tests; run as a script it is a process that can be killed.

`python toy_training.py FOLDER [key=value ...]` trains in FOLDER and writes final.pt. Keys: rows,
accumulation, dropout, every (steps between checkpoints), die_at (SIGKILL in the middle of that step
of this process), die_saving (SIGKILL in the middle of writing the n-th checkpoint), stop_at
(SIGTERM to itself in that step).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.distill import resume
from ltconvert.distill.data import Batch, PackedStream
from ltconvert.distill.interrupt import Stopped
from ltconvert.distill.processes import rank_and_world
from ltconvert.distill.runlog import RunLog
from ltconvert.distill.trainer import TrainResult, train
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.stages import TrainSettings

SEQ, VOCAB, WIDTH = 13, 97, 11


class ToyModel(nn.Module):
    """Next-token prediction from the token alone; one frozen part, one tied part, dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        h_BTC = torch.tanh(self.hidden(self.embed(ids_BT)) + self.frozen(self.embed(ids_BT)))
        return self.head(self.dropout(h_BTC))


class ToyObjective:
    """Cross-entropy, plus a second, local backward pass on the embedding."""

    def __init__(self, module: nn.Module, before: Callable[[int], None] | None = None) -> None:
        self.module = module
        self.calls = 0
        self.progress: list[float] = []
        self._before = before

    def parameter_groups(self) -> list[dict[str, Any]]:
        fast = list(self.module.hidden.parameters())
        return [
            {"name": "hidden", "params": fast, "lr": 3e-2},
            {"name": "embed", "params": [self.module.embed.weight], "lr": 1e-2},
        ]

    def compile_with(self, wrap: Callable[[Any], Any]) -> None:
        self.wrapped = wrap

    def work(self, progress: float) -> Hashable | None:
        return ()

    def train_step(
        self, batch: Batch, backward: Callable[[Tensor], None], progress: float
    ) -> dict[str, Tensor]:
        self.progress.append(progress)
        logits = self.module(batch.input_ids_BT).flatten(0, 1)
        # A sum over a fixed count, so that halves of a batch average to the whole.
        losses = nn.functional.cross_entropy(
            logits, batch.labels_BT.flatten(), ignore_index=-100, reduction="sum"
        )
        ce = losses / batch.labels_BT.numel()
        backward(ce)
        if self._before is not None:
            self._before(self.calls)  # gradients half there
        self.calls += 1
        local = 1e-3 * self.module.embed(batch.input_ids_BT).square().mean()
        backward(local)
        return {"loss": (ce + local).detach(), "ce": ce.detach()}


def make_settings(
    steps: int = 12, rows: int = 2, accumulation: int = 2, **changes: Any
) -> TrainSettings:
    tokens = rows * SEQ * accumulation * rank_and_world()[1]
    fields = {
        "budget_tokens": steps * tokens,
        "seq_len_tokens": SEQ,
        "batch_tokens": tokens,
        "micro_batch_rows": rows,
        "lr": 1e-2,
        "warmup_share": 0.2,
        "weight_decay": 0.01,
        **changes,
    }
    return TrainSettings(**fields)


def make_stream(tokenizer: Any, corpus: Path, rows: int = 2) -> PackedStream:
    data = DataSettings(source=str(corpus), heldout_share=0.1)
    return PackedStream(data, tokenizer, split="train", seq_len_tokens=SEQ, rows=rows)


def write_corpus(path: Path) -> Path:
    path.write_text(
        "".join(
            f'{{"text": "Line {i} says {i * i} and {"so " * (i % 9)}on."}}\n' for i in range(40)
        )
    )
    return path


def run_toy(
    folder: Path,
    tokenizer: Any,
    settings: TrainSettings,
    *,
    objective: ToyObjective | None = None,
    log: RunLog | None = None,
    precision: str = "fp32",
    dropout: float = 0.1,
    limit_s: float | None = None,
) -> tuple[ToyObjective, TrainResult]:
    if objective is None:
        torch.manual_seed(5)
        objective = ToyObjective(ToyModel(dropout))
    corpus = folder.parent / "corpus.jsonl"
    stream = make_stream(tokenizer, corpus, settings.micro_batch_rows)
    result = train(
        objective,
        stream,
        settings,
        stage="logits",
        stage_dir=folder / "stage",
        log=log or RunLog(folder),
        precision=precision,
        device="cpu",
        seed=3,
        limit_s=limit_s,
    )
    return objective, result


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_while_saving(number: int) -> None:
    """Die with the number-th checkpoint half written."""
    real, calls = resume.save_file, [0]

    def save_file(tensors: Any, path: Path) -> None:
        calls[0] += 1
        real(tensors, path)
        if calls[0] == number:
            path.write_bytes(path.read_bytes()[:-50])
            _kill()

    resume.save_file = save_file


def main(folder: Path, options: dict[str, float]) -> None:
    """One process: exit status 130 and stopped.txt when it was asked to stop."""
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)
    os.environ["LTCONVERT_CHECKPOINT_STEPS"] = str(int(options.get("every", 3)))
    folder.mkdir(exist_ok=True)
    accumulation = int(options.get("accumulation", 2))

    def before(call: int) -> None:
        if call == options.get("die_at", -1) * accumulation + accumulation - 1:
            _kill()
        if call == options.get("stop_at", -1) * accumulation:
            os.kill(os.getpid(), signal.SIGTERM)

    if "die_saving" in options:
        _kill_while_saving(int(options["die_saving"]))
    torch.manual_seed(5)
    objective = ToyObjective(ToyModel(options.get("dropout", 0.1)), before)
    settings = make_settings(rows=int(options.get("rows", 2)), accumulation=accumulation)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.parent / "tokenizer")
    try:
        run_toy(folder, tokenizer, settings, objective=objective)
    except Stopped as stopped:
        (folder / "stopped.txt").write_text(str(stopped))
        raise SystemExit(130) from None
    if rank_and_world()[0] == 0:
        torch.save(objective.module.state_dict(), folder / "final.pt")


if __name__ == "__main__":
    given = dict(argument.split("=") for argument in sys.argv[2:])
    main(Path(sys.argv[1]), {key: float(value) for key, value in given.items()})
