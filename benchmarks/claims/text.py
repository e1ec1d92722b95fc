"""Language models for the claims about text: the same rows for every variant of a seed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torch import Tensor

from ltconvert.benchmarks.claims.trials import Bench, new_model, train_model, trial_parser
from ltconvert.benchmarks.looped_model import read_tokenizer
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.distill.data import PackedStream
from ltconvert.distill.evaluation.scores import heldout_rows, heldout_scores
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.evaluation import EvalSettings
from ltconvert.recipes.stages import TrainSettings

TINY = {
    "layers": 2, "heads": 1, "mlp": 64, "loops": 2, "length": 64, "batch_tokens": 128,
    "tokens": 512, "heldout_tokens": 256,
}  # fmt: skip


def text_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """The options of trials on text."""
    parser = trial_parser(description, out)
    add = parser.add_argument
    add("--data", default="pydoc", help="as that of `ltconvert distill`")
    add("--heldout-share", type=float, default=DataSettings().heldout_share)
    add("--tokenizer", default="smollm2-135m", help="a packaged teacher, a .gguf file or a folder")
    add("--tokens", type=int, default=20_000_000, help="to train a variant on")
    add("--length", type=int, default=512, help="tokens a row")
    add("--heldout-tokens", type=int, default=131_072)
    return parser


class TextBench:
    """Tokenizer, data and held-out rows of one call."""

    def __init__(self, bench: Bench) -> None:
        options = bench.options
        self.bench = bench
        self.tokenizer = read_tokenizer(options.tokenizer)
        self.vocab = max(self.tokenizer.get_vocab().values()) + 1
        self.data = DataSettings(source=options.data, heldout_share=options.heldout_share)
        settings = EvalSettings(
            heldout_tokens=options.heldout_tokens, heldout_seq_len_tokens=options.length
        )
        self.rows = heldout_rows(self.data, self.tokenizer, settings)

    def train(
        self, config: LT2Config, seed: int, folder: Path, limit_s: float | None
    ) -> LT2ForCausalLM:
        """A model from scratch on ``--tokens``.

        Raises:
            OutOfTime: ``limit_s`` is over; the step is finished and saved.
        """
        options = self.bench.options
        model = new_model(self.bench, config, seed)
        rows = max(1, options.batch_tokens // options.length)
        stream = PackedStream(
            self.data,
            self.tokenizer,
            split="train",
            seq_len_tokens=options.length,
            rows=rows,
            seed=seed,
        )
        settings = TrainSettings(
            budget_tokens=options.tokens,
            seq_len_tokens=options.length,
            batch_tokens=rows * options.length,
            micro_batch_rows=rows,
            lr=options.lr,
            warmup_share=0.03,
            final_lr_share=0.05,
            weight_decay=0.1,
        )
        log = RunLog(folder)
        train_model(
            self.bench, model, stream, settings, folder, log=log, stage="text", seed=seed,
            limit_s=limit_s,
        )  # fmt: skip
        return model

    def loss(self, model: LT2ForCausalLM) -> float:
        """Held-out loss, nats a token."""
        scores = heldout_scores(model, None, self.rows, precision=self.bench.precision)
        return math.log(scores["teacher_ppl"])

    def whole_rows(self) -> list[Tensor]:
        """Held-out token ids [B, T], rows without padding alone.

        Raises:
            UserError: not one row is full.
        """
        full = [batch.input_ids_BT[batch.keep_BT.all(1)] for batch in self.rows]
        full = [ids_BT for ids_BT in full if len(ids_BT)]
        if not full:
            raise UserError(
                f"--data {self.bench.options.data}: the held-out text does not fill one row of "
                f"--length {self.bench.options.length}; give more text or a larger --heldout-share"
            )
        return [ids_BT.to(self.bench.device) for ids_BT in full]


def by_seed(results: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    """One number of every trial of a variant."""
    return {seed: found[name] for seed, found in results.items()}
