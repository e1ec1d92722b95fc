"""What settings of a recipe need to have an effect: the table behind `recipes.idle`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltconvert.recipes.keys import sections
from ltconvert.recipes.mixers import LINEAR
from ltconvert.recipes.schema import Recipe

Acts = Callable[[Recipe, int | None], bool]


@dataclass(frozen=True)
class Rule:
    """What some settings need for any of them to have an effect.

    Attributes:
        keys: dotted.
        acts: whether they have one, by the recipe and the teacher's loops (None: not known).
        needs: what would give them one, in words.
    """

    keys: tuple[str, ...]
    acts: Acts
    needs: str


def _mixers(recipe: Recipe) -> set[str]:
    """Mixers of all layers; none in a Dreamer, whose attention is its own."""
    student = recipe.student
    if student.kind == "dreamer":
        return set()
    return {*student.kinds, *([student.full_mixer] if student.full_layers not in (0, []) else [])}


def _has(*kinds: str) -> Acts:
    return lambda recipe, _: not _mixers(recipe).isdisjoint(kinds)


def _runs(stage: str) -> Acts:
    return lambda recipe, _: stage in recipe.stages


def _is_dreamer(recipe: Recipe, _: int | None) -> bool:
    return recipe.student.kind == "dreamer"


def _learns_at_mixer_lr(recipe: Recipe, _: int | None) -> bool:
    student = recipe.student
    return student.converts or student.kind == "dreamer" or "moda" in _mixers(recipe)


def _student_loops(recipe: Recipe, teacher_loops: int | None) -> bool:
    """True as well where the teacher is not known."""
    return teacher_loops is None or (recipe.student.loops or teacher_loops) > 1


def _loops_alike(recipe: Recipe, teacher_loops: int | None) -> bool:
    """Teacher and student have the same loops, more than one."""
    if teacher_loops is None:
        return True
    return teacher_loops > 1 and recipe.student.loops in (None, teacher_loops)


def _of(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def rules() -> Iterator[Rule]:
    """All, in the order in which they are told: the first that a setting fails."""
    yield from _stage_rules()
    yield from _dreamer_rules()
    yield from _mixer_rules()
    yield from _loop_rules()
    yield from _data_rules()


def _stage_rules() -> Iterator[Rule]:
    """Stages that do not run, then what a stage that runs makes no use of."""
    wanted = {
        "loop": "a dense teacher that student.loop_start ties",
        "align": "a student.mixer that stands for the teacher's attention, such as gdn",
        "select": "a student.mixer that stands for the teacher's attention, such as gdn",
        "shrink": "student.kind=dreamer with a student.pool_schedule",
    }
    for stage, needs in wanted.items():
        fields = [name for name in sections()[stage].model_fields if name != "enabled"]
        yield Rule(_of(stage, *fields), _runs(stage), needs)
    shares = ("choice_weight", "mixer_lr", "depth_warmup_share", "release_share", "balance_rate")
    for name in (*shares, "loop_warmup_share"):
        needs = f"a converted student, and here all layers are full: set logits.{name}"
        yield Rule((f"loop.{name}",), lambda *_: False, needs)
    for stage in ("loop", "logits", "shrink", "longctx"):
        yield from _logits_rules(stage)
    yield Rule(("align.choice_weight",), _has("dsa"), "student.mixer=dsa")
    yield Rule(("align.calibrate",), _has(*LINEAR), f"a mixer with a state ({', '.join(LINEAR)})")
    yield Rule(
        _of("select", "method", "direction", "train_tokens", "recall_examples"),
        lambda r, _: r.select.method == "list" or not isinstance(r.student.full_layers, list),
        "student.full_layers as a share or a count: a list leaves nothing to choose",
    )
    for name, methods in {
        "direction": ("kl-fast",),
        "train_tokens": ("kl", "kl-gates"),
        "recall_examples": ("recall", "recall-greedy"),
    }.items():
        needs = f"select.method {' or '.join(methods)}"
        yield Rule((f"select.{name}",), _method(*methods), needs)
    yield Rule(
        ("shrink.damage_tokens",),
        lambda r, _: r.student.pool_rank == "damage",
        "student.pool_rank=damage",
    )
    yield Rule(
        ("shrink.usage_tokens",),
        lambda r, _: r.student.pool_rank == "use" or r.student.pool_cut == "merge",
        "student.pool_rank=use or student.pool_cut=merge",
    )


def _method(*methods: str) -> Acts:
    return lambda recipe, _: recipe.select.method in methods


def _logits_rules(stage: str) -> Iterator[Rule]:
    """Of a stage that learns logits."""

    def settings(recipe: Recipe) -> Any:
        return getattr(recipe, stage)

    yield Rule(
        _of(stage, "divergence", "temperature"),
        lambda r, _: settings(r).kl_weight > 0,
        f"{stage}.kl_weight above 0",
    )
    yield Rule(
        (f"{stage}.jsd_beta",),
        lambda r, _: settings(r).divergence == "jsd",
        f"{stage}.divergence=jsd",
    )
    yield Rule((f"{stage}.choice_weight",), _has("dsa"), "student.mixer=dsa")
    yield Rule(
        (f"{stage}.mixer_lr",),
        _learns_at_mixer_lr,
        f"something that the teacher does not have; all of this student trains at {stage}.lr",
    )
    yield Rule((f"{stage}.depth_warmup_share",), _has("moda"), "student.mixer=moda")
    yield Rule(_of(stage, "release_share", "balance_rate"), _is_dreamer, "student.kind=dreamer")
    yield Rule(
        (f"{stage}.loop_warmup_share",), _loops_alike, "a looped teacher and a student of its loops"
    )


def _dreamer_rules() -> Iterator[Rule]:
    names = ("slices", "top_entries", "top_experts", "depth_heads", "shared_size", "parallel",
             "stream_norm", "select_by")  # fmt: skip
    yield Rule(_of("student", *names), _is_dreamer, "student.kind=dreamer")
    yield Rule(
        ("student.full_layers",),
        lambda r, _: r.student.kind == "lt2" or r.student.full_layers == 1.0,
        "student.kind=lt2: a Dreamer has one layer, with its teacher's mixer",
    )
    needs = "student.kind=dreamer and shrink.enabled=true"
    yield Rule(("student.pool_schedule",), _runs("shrink"), needs)
    needs = "student.kind=dreamer with a student.pool_schedule"
    yield Rule(
        _of("student", "pool_cut", "pool_rank", "pool_skip", "top_schedule"), _runs("shrink"), needs
    )
    # Merged entries leave no nulls, and nothing empty.
    yield Rule(
        ("student.pool_skip",), lambda r, _: r.student.pool_cut == "drop", "student.pool_cut=drop"
    )


def _mixer_rules() -> Iterator[Rule]:
    def student(names: str, kinds: tuple[str, ...]) -> Rule:
        needs = f"student.mixer={kinds[0]}"
        if len(kinds) > 1:
            needs = f"one of these as student.mixer: {', '.join(kinds)}"
        return Rule(_of("student", *names.split()), _has(*kinds), needs)

    yield student("window_tokens", ("window", "gdn_window", "nsa"))
    yield student("top_k_tokens index_heads", ("dsa",))
    yield student("block_tokens chosen_blocks", ("nsa",))
    yield student("depth_writers depth_slots depth_rope depth_bias depth_linear_writes", ("moda",))
    yield student("short_conv conv_size", LINEAR)
    yield Rule(("student.conv_size",), lambda r, _: r.student.short_conv, "student.short_conv=true")
    yield Rule(
        ("student.depth_linear_writes",),
        lambda r, _: len(_mixers(r)) > 1,
        "other mixers beside moda",
    )
    yield Rule(
        ("student.sdpa_gate",), _has("full", "moda"), "full layers: student.full_layers above 0"
    )
    yield Rule(("student.full_mixer",), _has("moda"), "student.full_layers above 0")
    yield Rule(
        ("student.full_layers",),
        lambda r, _: r.student.full_layers == 1.0 or set(r.student.kinds) != {"full"},
        "a student.mixer for the other layers, such as gdn: here all are full",
    )


def _loop_rules() -> Iterator[Rule]:
    yield Rule(
        _of("student", "loop_rank", "loop_calibration_tokens"),
        lambda r, _: r.student.loop_start is not None,
        "a dense teacher that student.loop_start ties",
    )
    yield Rule(
        ("student.loop_calibration_tokens",),
        lambda r, _: r.student.loop_rank > 0,
        "student.loop_rank above 0",
    )
    yield Rule(
        _of("student", "prelude_layers", "coda_layers"), _student_loops, "a student that loops"
    )
    yield Rule(
        ("student.drop_calibration_tokens",),
        lambda r, _: bool(r.student.drop_layers) and not isinstance(r.student.drop_layers, list),
        "student.drop_layers as a share or a count",
    )


def _data_rules() -> Iterator[Rule]:
    def is_text(recipe: Recipe, _: int | None) -> bool:
        return recipe.data.source != "pydoc"

    def is_hub(recipe: Recipe, _: int | None) -> bool:
        return is_text(recipe, _) and not Path(recipe.data.source).expanduser().exists()

    yield Rule(_of("data", "text_field", "messages_field"), is_text, "files or a hub data set")
    yield Rule(_of("data", "hub_config", "hub_split"), is_hub, "a hub id as data.source")
    yield Rule(
        ("eval.generation_tokens",),
        lambda r, _: r.eval.generation_prompts > 0,
        "eval.generation_prompts above 0",
    )
    yield Rule(("eval.task_limit",), lambda r, _: bool(r.eval.tasks), "eval.tasks")
