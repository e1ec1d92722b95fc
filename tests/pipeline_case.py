"""A whole conversion at toy size, and a driver that kills it again and again with SIGKILL.

    python pipeline_case.py CASE_FOLDER RUN_DIR [KILL ...]

runs the conversion in a child process for each KILL, checks that the child died of SIGKILL, and at
last once undisturbed. KILL is ``STAGE:STEP`` (when that step's metrics are noted), or
``put:NAME:N`` (instead of the process's N-th rename of a file or folder to NAME).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.distill import pipeline
from ltconvert.distill.runlog import RunLog
from ltconvert.recipes.schema import Recipe

WORDS = "the a cat dog house river sees runs takes under over green old seven and then so"


def make_case(folder: Path, tokenizer: Any, family: str = "llama") -> None:
    """Save a tiny random teacher and a text of its own language."""
    from helpers import tiny_model, tiny_spec

    model = tiny_model(tiny_spec(family, **({"num_loops": 2} if family == "ouro" else {})))
    save_student(model, tokenizer, folder / "teacher", {})
    draw = random.Random(0)
    documents = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) for _ in range(80))
    lines = (json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text("\n".join(lines))


def make_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    """All stages, a few steps each; ``sections`` are laid over it."""
    train = {"batch_tokens": 64, "seq_len_tokens": 32, "micro_batch_rows": 1, "budget_tokens": 512}
    plain: dict[str, Any] = {
        "name": "toy",
        "student": {"full_layers": 1},
        "data": {"source": str(folder / "text.jsonl"), "heldout_share": 0.2},
        "loop": train | {"lr": 3e-3},
        "align": train,
        "select": {"method": "kl-fast", "eval_tokens": 128, "seq_len_tokens": 32},
        "logits": train | {"lr": 1e-3, "mixer_lr": 3e-3},
        "shrink": train | {"usage_tokens": 64, "damage_tokens": 32, "lr": 1e-3, "mixer_lr": 3e-3},
        "longctx": train | {"seq_len_tokens": 64, "lr": 1e-3, "mixer_lr": 1e-3},
        "eval": {"heldout_tokens": 256, "heldout_seq_len_tokens": 64},
    }
    for name, section in sections.items():
        plain[name] = plain.get(name, {}) | section
    return Recipe.model_validate(plain)


def convert(teacher: Teacher, folder: Path, run_dir: Path, **sections: dict[str, Any]) -> Any:
    """The pipeline on the toy case, CPU, fp32."""
    recipe = make_recipe(folder, **sections)
    return pipeline.run(recipe, teacher, run_dir, RunLog(run_dir), precision="fp32")


def kill_at(point: str) -> None:
    """Arrange for this process to be killed without warning."""
    kind, *rest = point.split(":")
    if kind == "put":
        _kill_at_rename(rest[0], int(rest[1]))
        return
    noted = RunLog.metrics

    def metrics(self: RunLog, name: str, step: int, values: Any) -> None:
        noted(self, name, step, values)
        if (name.split()[0], step) == (kind, int(rest[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.metrics = metrics


def _kill_at_rename(target: str, number: int) -> None:
    calls = 0
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def counted(source: Any, to: Any, real: Any = real, **options: Any) -> None:
            nonlocal calls
            calls += Path(to).name == target
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, to, **options)

        setattr(os, name, counted)


def main(folder: Path, run_dir: Path, points: list[str]) -> int:
    """Run, be killed at each point, run to the end; 1 when a child ends otherwise than foretold."""
    sections = json.loads(os.environ.get("CASE_SECTIONS", "{}"))
    for point in points:
        child = os.fork()  # before any torch computation: no threads to lose
        if child == 0:
            kill_at(point)
            convert(load_teacher(str(folder / "teacher")), folder, run_dir, **sections)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            print(f"at {point}: the child ended with status {status}", file=sys.stderr)
            return 1
    convert(load_teacher(str(folder / "teacher")), folder, run_dir, **sections)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
