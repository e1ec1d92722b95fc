"""How far a dense teacher's looped form is from it before any training, by start and rank.

    python benchmarks/loop_start.py --teacher smollm2-135m --prelude 2 --coda 2 --calibration 2048

prints a Markdown table: KL to the teacher on held-out text, for every start of the tied matrices
and every rank of the loops' own corrections.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch

from ltconvert import recipes
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import load_teacher
from ltconvert.convert.tying import STARTS, tie_layers
from ltconvert.distill.data import PackedStream
from ltconvert.distill.evaluation.scores import heldout_rows, heldout_scores
from ltconvert.distill.input_squares import input_squares

RANKS = (0, 16, 64, 256)


def cut(model: LT2ForCausalLM, rank: int) -> None:
    """Keep corrections up to a rank: factors come by falling singular value, so it is a slice."""
    for module in model.modules():
        if isinstance(module, Linear) and module.rank > rank:
            if rank:
                module.lora_a = torch.nn.Parameter(module.lora_a[:, :rank], requires_grad=False)
                module.lora_b = torch.nn.Parameter(module.lora_b[:, :, :rank], requires_grad=False)
            else:
                del module.lora_a, module.lora_b
            module.rank = rank


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024, help="held-out tokens, rows of 256")
    parser.add_argument(
        "--calibration", type=int, default=0, help="training tokens, rows of 256; 0: plain SVD"
    )
    for name, default in (("loops", 2), ("prelude", 2), ("coda", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    teacher, recipe = load_teacher(options.teacher), recipes.resolve("loop")
    settings = {"heldout_tokens": options.tokens, "heldout_seq_len_tokens": 256}
    rows = heldout_rows(recipe.data, teacher.tokenizer, recipe.eval.model_copy(update=settings))
    squares = None
    if options.calibration:
        text = PackedStream(
            recipe.data, teacher.tokenizer, split="train", seq_len_tokens=256, rows=1
        )  # fmt: skip
        core = range(options.prelude, teacher.spec.num_layers - options.coda)
        squares = input_squares(teacher.model, islice(text, options.calibration // 256), core)
    full = teacher.spec.hidden_size
    parameters: dict[int, int] = {}
    found: dict[str, dict[int, float]] = {start: {} for start in STARTS}
    for start, kls in found.items():
        model = tie_layers(
            teacher.model, loops=options.loops, prelude=options.prelude, coda=options.coda,
            start=start, rank=full, squares=squares,
        )  # fmt: skip
        for rank in sorted({rank for rank in RANKS if rank < full} | {full}, reverse=True):
            cut(model, rank)
            parameters[rank] = sum(p.numel() for p in model.parameters())
            kls[rank] = heldout_scores(teacher.model, model, rows, precision="fp32")["kl"]
    print(f"| rank | parameters | {' | '.join(found)} |")
    print("|---" * (len(found) + 2) + "|")
    for rank in sorted(parameters):
        name = f"{rank} (full)" if rank == full else str(rank)
        cells = ["< 1e-6" if kls[rank] < 1e-6 else f"{kls[rank]:.2f}" for kls in found.values()]
        print(f"| {name} | {parameters[rank] / 1e6:.1f} M | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
