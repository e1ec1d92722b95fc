"""How far a Dreamer is from its teacher right after its pools were cut, before any training.

    python benchmarks/pool_cuts.py --teacher smollm2-135m --schedules 0.75 0.5 0.9,0.8,0.75

prints a Markdown table: KL to the teacher on held-out text after the last step of each schedule,
entries judged anew before every step, and of the teacher without as many layers. Routing is learned
wholly (r = 1), as the recipe `dreamer-half` sets it up.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ltconvert import recipes
from ltconvert.convert.dropping import drop_layers
from ltconvert.convert.students.dreamer.shrink import choose, likeness, pool_sizes, shrink
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.convert.transfer import build_student, student_options
from ltconvert.distill.damage import damage
from ltconvert.distill.data import Batch, PackedStream
from ltconvert.distill.evaluation.scores import heldout_rows, heldout_scores
from ltconvert.distill.pool_damage import pool_damage
from ltconvert.recipes.student import StudentSettings

Worth = tuple[Tensor, Tensor]


def dreamer_of(teacher: Teacher, student: StudentSettings) -> LT2ForCausalLM:
    """Before any training, its routing learned wholly.

    Routers begin with equal logits for the slices of a neighbour. Which of equal ones is chosen
    hangs on the length of what is sorted, and would drown what doing without one costs. Training
    parts them; here a little noise does.
    """
    made = student_options(teacher.spec, student.model_dump())
    model = build_student(teacher.model, ["full"] * teacher.spec.num_layers, made)
    layer, generator = model.model.dreamer, torch.Generator().manual_seed(0)
    layer.set_release(1.0)
    for router in (layer.attention_router, layer.expert_router):
        logits_DE = router.depth_logits
        logits_DE.data += 1e-3 * torch.randn(logits_DE.shape, generator=generator)
    return model


def judge(model: LT2ForCausalLM, rows: Sequence[Batch]) -> Worth:
    """What the entries of both pools are worth."""
    layer = model.model.dreamer
    routers = layer.attention_router, layer.expert_router
    attention, experts = (pool_damage(model, router, rows) for router in routers)
    return attention, experts


def _judged(model: LT2ForCausalLM, rows: Sequence[Batch], cache: Path | None) -> Worth:
    if cache is not None and cache.exists():
        found: Worth = torch.load(cache)
        return found
    worth = judge(model, rows)
    if cache is not None:
        torch.save(worth, cache)
    return worth


def cut(model: LT2ForCausalLM, worth: Worth, share: float, layers: int, skip: bool) -> None:
    """Drop what is worth least of both pools."""
    layer = model.model.dreamer
    sizes = pool_sizes(layer.config, layers, share)
    pools = layer.attention, layer.experts
    cuts = [
        choose(torch.zeros(1, len(worth_E)), likeness(pool), keep, worth_E=worth_E)
        for pool, keep, worth_E in zip(pools, sizes, worth, strict=True)
    ]
    shrink(model, *cuts, skip=skip)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024, help="held-out tokens, rows of 256")
    parser.add_argument("--judge", type=int, default=256, help="training tokens, rows of 256")
    parser.add_argument("--cache", type=Path, help="file of what judging the whole pools gave")
    parser.add_argument("--schedules", nargs="+", default=["0.75", "0.5"])
    parser.add_argument(
        "--skip", action="store_true", help="skip branches of which nothing is left"
    )
    options = parser.parse_args()
    teacher, recipe = load_teacher(options.teacher), recipes.resolve("dreamer-half")
    settings = {"heldout_tokens": options.tokens, "heldout_seq_len_tokens": 256}
    heldout = heldout_rows(recipe.data, teacher.tokenizer, recipe.eval.model_copy(update=settings))
    text = PackedStream(recipe.data, teacher.tokenizer, split="train", seq_len_tokens=256, rows=1)
    rows, layers = list(islice(text, options.judge // 256)), teacher.spec.num_layers
    start = dreamer_of(teacher, recipe.student)

    def kl(model: LT2ForCausalLM) -> float:
        found: float = heldout_scores(teacher.model, model, heldout, precision="fp32")["kl"]
        return found

    print(f"not cut: {kl(start):.4f}", flush=True)
    first, costs = _judged(start, rows, options.cache), torch.tensor(damage(teacher.model, rows))
    print("| shares | attention, experts | KL | as many layers dropped |\n|---|---|---|---|")
    for schedule in options.schedules:
        model, worth = copy.deepcopy(start), first
        for step, share in enumerate(map(float, schedule.split(","))):
            worth = judge(model, rows) if step else first
            cut(model, worth, share, layers, options.skip)
        pools = model.model.dreamer.config
        gone = costs.argsort(stable=True)[: layers - pools.entries].tolist()
        plain = kl(drop_layers(teacher.model, gone))
        sizes = f"{pools.entries}, {pools.experts}"
        if options.skip:
            sizes += (
                f"; {len(pools.skipped_attention)}, {len(pools.skipped_experts)} depths skipped"
            )
        print(f"| {schedule} | {sizes} | {kl(model):.3f} | {plain:.3f} |", flush=True)


if __name__ == "__main__":
    main()
