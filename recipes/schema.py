"""Settings of a whole pipeline: one frozen model a stage, one Recipe that holds them all.

A default stands here once; the CLI help, docs and README read it from here. Sizes carry their
unit in their names. Unknown keys are errors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from ltconvert.recipes.base import Settings
from ltconvert.recipes.dreamer import DreamerSettings

STAGES = (
    "loop",
    "align",
    "select",
    "logits",
    "shrink",
    "longctx",
)  # in the order in which they run
CompileSetting = Literal["auto", "off", "layers"]
Mixer = Literal[
    "gdn",
    "gdn_window",
    "kda",
    "deltanet",
    "mamba2",
    "retnet",
    "dsa",
    "nsa",
    "window",
    "moda",
    "full",
]
Method = Literal[
    "kl", "kl-fast", "kl-greedy", "kl-gates", "recall", "recall-greedy", "uniform", "list"
]


class StudentSettings(DreamerSettings):
    """What the student is: its mixer, how many layers stay full, how it loops."""

    mixer: Mixer | list[Mixer] = Field(
        "gdn", description="mixer of the converted layers; several take turns from layer to layer"
    )
    full_layers: int | float | list[int] | str = Field(
        0.25,
        description="layers kept as full attention: a share (0.25), a count (8), a list ([0, 4]), "
        "every fifth (4:1), or a count at both ends (bookend:8)",
    )
    full_mixer: Literal["full", "moda"] = Field(
        "full", description="what these are: attention, or attention that reads a depth stream"
    )
    window_tokens: PositiveInt | list[PositiveInt] = Field(
        128,
        description=(
            "window of `window`, `gdn_window` and `nsa` mixers, the token itself counted; `window`:"
            " also a list, one a loop"
        ),
    )
    top_k_tokens: int = Field(
        2048, gt=0, description="tokens that a query of a `dsa` mixer attends to"
    )
    index_heads: int = Field(
        4, gt=0, description="heads of the indexer that chooses them, as wide as the teacher's"
    )
    block_tokens: int = Field(32, gt=0, description="size of the blocks of an `nsa` mixer")
    chosen_blocks: int = Field(
        16, gt=0, description="blocks that a query of an `nsa` mixer attends to, its window aside"
    )
    depth_writers: Literal["attention", "ffn", "projected"] = Field(
        "projected",
        description="`moda`: what leaves keys and values in the depth stream: attention its own,"
        " MLPs beside it by a projection, or both by projections",
    )
    depth_slots: str = Field(
        "all",
        pattern=r"^(all|(last|every|mean):[1-9][0-9]*)$",
        description="`moda`: of which earlier layer visits: `all`, `last:8`, of every fourth"
        " (`every:4`), the means of four at a time (`mean:4`)",
    )
    depth_rope: bool = Field(
        True,
        description="`moda`: depth keys stand at the token's own position; else, as published,"
        " they have none",
    )
    depth_bias: float | None = Field(
        None, description="`moda`: where a learned bias of depth for each head starts"
    )
    depth_linear_writes: bool = Field(
        False, description="`moda` beside linear layers: their MLPs write, too"
    )
    short_conv: bool = Field(
        True, description="causal depthwise convolution on q, k, v (starts as the identity)"
    )
    conv_size: int = Field(4, ge=2, description="taps of the short convolution")
    sdpa_gate: bool = Field(False, description="output gate on full layers, neutral at the start")
    loop_residual: bool = Field(
        False, description="per-loop residual h + rho * h_in, rho = 0 at the start"
    )
    loops: int | None = Field(None, ge=1, description="loops of the core; default: the teacher's")
    prelude_layers: int | None = Field(
        None, ge=0, description="layers run once before the looped core; default: the teacher's"
    )
    coda_layers: int | None = Field(
        None, ge=0, description="layers run once after the looped core; default: the teacher's"
    )
    loop_start: Literal["stepwise", "average", "lower"] | None = Field(
        None,
        description=(
            "make a dense teacher's core run `loops` times before anything is converted; its shared"
            " matrices start from evenly spaced layers, from the mean of the layers that are tied,"
            " or from the first loop's"
        ),
    )
    loop_rank: int = Field(
        64,
        ge=0,
        description=(
            "with `loop_start`: rank of each loop's own correction of every matrix, from the SVD of"
            " what tying changes; exact from the hidden width on"
        ),
    )
    loop_calibration_tokens: int = Field(
        8192,
        ge=0,
        description=(
            "with `loop_start`: tokens of text on whose inputs the corrections are the best of"
            " their rank; 0: on all inputs alike"
        ),
    )

    drop_layers: int | float | list[int] = Field(
        0,
        description="leave out layers of the teacher, and convert nothing: a share, a count (those"
        " whose loss alone costs least KL), or a list",
    )
    drop_calibration_tokens: int = Field(
        16_384, gt=0, description="with `drop_layers`: tokens of text on which that is measured"
    )

    @property
    def kinds(self) -> list[Mixer]:
        """The mixers of converted layers, each once or, where they take turns, in their order."""
        return self.mixer if isinstance(self.mixer, list) else [self.mixer]

    @property
    def shrinks(self) -> bool:
        """Whether it has pools that get smaller."""
        return self.kind == "dreamer" and bool(self.pool_schedule)

    @property
    def converts(self) -> bool:
        """Whether a mixer stands for the teacher's attention, and does not merely start as it."""
        return not set(self.kinds) <= {"full", "moda"}

    @property
    def exact_tokens(self) -> tuple[str, int]:
        """Up to how many tokens the student is the teacher, and the settings that say so; 0: none.

        That of the least exact mixer.
        """
        return min((self._exact(kind) for kind in self.kinds), key=lambda found: found[1])

    def _exact(self, kind: Mixer) -> tuple[str, int]:
        windows = self.window_tokens
        least = windows if isinstance(windows, int) else min(windows)
        if kind in ("window", "gdn_window"):
            return "student.window_tokens", least
        if kind == "dsa":
            return "student.top_k_tokens", self.top_k_tokens
        if kind == "nsa":
            tokens = least + self.block_tokens * self.chosen_blocks
            return "student.window_tokens + block_tokens * chosen_blocks", tokens
        return "", 0

    def full(self, num_layers: int) -> int | float | list[int]:
        """``full_layers`` with patterns written out as lists; not held against ``num_layers``."""
        if isinstance(self.full_layers, str):
            return full_by_pattern(self.full_layers, num_layers)
        return self.full_layers

    def mixers(self, full: Collection[int], num_layers: int) -> list[str]:
        """The mixer of every physical layer."""
        kinds = self.kinds
        return [self.full_mixer if i in full else kinds[i % len(kinds)] for i in range(num_layers)]

    @field_validator("mixer")
    @classmethod
    def _mixer(cls, value: Mixer | list[Mixer]) -> Mixer | list[Mixer]:
        if value == []:
            raise ValueError("name at least one mixer")
        return value

    @field_validator("full_layers")
    @classmethod
    def _full_layers(cls, value: int | float | list[int] | str) -> int | float | list[int] | str:
        """A share lies in [0, 1], a count is not negative, a list names each layer once."""
        if isinstance(value, str):
            full_by_pattern(value, 1)
            return value
        if isinstance(value, list):
            if len(set(value)) != len(value) or any(layer < 0 for layer in value):
                raise ValueError("a list of layers names each once, counted from 0")
            return sorted(value)
        if value < 0 or (isinstance(value, float) and value > 1):
            raise ValueError("expected a share in [0, 1], a count, or a list of layers")
        return value

    @model_validator(mode="after")
    def _moda_leaves_nothing_to_choose(self) -> Self:
        """All its layers have full attention: a number of full layers would mean nothing."""
        if self.mixer == "moda" and isinstance(self.full_layers, int | float) and self.full_layers:
            raise ValueError(
                f"with student.mixer moda, student.full_layers {self.full_layers} would choose"
                " nothing: set it to 0, or list the layers that do not read depth"
            )
        return self

    @model_validator(mode="after")
    def _dropping_converts_nothing(self) -> Self:
        """A shorter teacher is a yardstick, and looping or converting it would be another one."""
        dropped = self.drop_layers
        if isinstance(dropped, int | float) and (
            dropped < 0 or (isinstance(dropped, float) and dropped >= 1)
        ):
            raise ValueError(
                f"student.drop_layers is {dropped}; expected a share in [0, 1), a count, or a list"
            )
        if isinstance(dropped, list) and len(set(dropped)) != len(dropped):
            raise ValueError(f"student.drop_layers names each layer once, got {dropped}")
        converts = self.kinds != ["full"] or self.kind != "lt2" or self.loop_start is not None
        if dropped and converts:
            raise ValueError(
                "student.drop_layers shortens the teacher and converts nothing: set student.mixer"
                " to full, and leave out student.loop_start and student.kind"
            )
        return self

    @model_validator(mode="after")
    def _dreamers_attention_is_full(self) -> Self:
        """Its one layer has no place for another mixer, a gate, or loops of its own."""
        if self.kind == "dreamer":
            wanted = {"mixer": "full", "sdpa_gate": False, "loop_start": None}
            for name, value in wanted.items():
                if (given := getattr(self, name)) != value:
                    raise ValueError(
                        f"student.kind dreamer needs student.{name} {value}, got {given}"
                    )
        return self

    @model_validator(mode="after")
    def _tying_needs_loops(self) -> Self:
        """How often the core of a dense teacher runs cannot be read off the teacher."""
        if self.loop_start is not None and (self.loops or 1) < 2:
            raise ValueError(
                f"student.loop_start {self.loop_start} needs student.loops of 2 or more, "
                f"got {self.loops}"
            )
        return self


def full_by_pattern(pattern: str, num_layers: int) -> list[int]:
    """Full layers of ``a:b``, b after every a others, or ``bookend:n``, n at both ends together.

    The first end gets one more where n is odd.

    Raises:
        ValueError: words of another form.
    """
    name, _, size = pattern.partition(":")
    if not size.isdecimal() or not (name == "bookend" or name.isdecimal()):
        raise ValueError(f"expected a:b (4:1) or bookend:n (bookend:8), got {pattern!r}")
    if name == "bookend":
        ends = min(int(size), num_layers)
        front = -(-ends // 2)
        return [*range(front), *range(num_layers - ends + front, num_layers)]
    others = int(name)
    if others + int(size) == 0:
        raise ValueError("0:0 names no layer")
    return [i for i in range(num_layers) if i % (others + int(size)) >= others]


class DataSettings(Settings):
    """Where documents come from and how they are split."""

    source: str = Field(
        "pydoc",
        description="`pydoc`, a file or folder (jsonl, parquet, txt; gz, xz, zst), or a hub id",
    )
    text_field: str = Field("text", description="field that holds the text")
    messages_field: str = Field(
        "messages", description="field that holds a chat; used when present"
    )
    hub_config: str | None = Field(None, description="configuration name of a hub data set")
    hub_split: str = Field("train", description="split of a hub data set")
    heldout_share: float = Field(
        0.05, gt=0, lt=1, description="share of documents never trained on"
    )
    shuffle_seed: int = Field(0, description="order of the documents")


class TrainSettings(Settings):
    """What every training stage shares."""

    enabled: bool = Field(True, description="run this stage")
    budget_tokens: int = Field(gt=0, description="tokens this stage trains on")
    seq_len_tokens: int = Field(gt=0, description="length of a packed row")
    batch_tokens: int = Field(gt=0, description="tokens an optimiser step")
    micro_batch_rows: int | None = Field(
        None, gt=0, description="rows a forward pass; default: as many as fit and pay"
    )
    lr: float = Field(gt=0, description="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "cosine", description="after the warm-up"
    )
    warmup_share: float = Field(0.02, ge=0, lt=1, description="share of steps of linear warm-up")
    final_lr_share: float = Field(0.1, ge=0, le=1, description="last learning rate over peak")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2")
    choice_weight: float = Field(
        1.0, ge=0, description="`dsa`: weight of the KL of the indexer to the attention"
    )
    clip_norm: float = Field(1.0, gt=0, description="gradient norm limit")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass"
    )
    checkpoint_minutes: float = Field(
        10.0, gt=0, description="longest training time a killed run can lose"
    )

    @model_validator(mode="after")
    def _batch_holds_a_micro_batch(self) -> Self:
        """An optimiser step is at least one forward pass."""
        least = self.rows_at_once * self.seq_len_tokens
        if self.batch_tokens < least:
            raise ValueError(
                f"batch_tokens {self.batch_tokens} is less than one forward pass of"
                f" micro_batch_rows {self.rows_at_once} x seq_len_tokens {self.seq_len_tokens}"
                f" = {least}; raise it or lower one of them"
            )
        return self

    @property
    def rows_at_once(self) -> int:
        """Rows a forward pass; 1 where nobody has chosen."""
        return self.micro_batch_rows or 1


class AlignSettings(TrainSettings):
    """Stage `align`: mixers learn the teacher's contribution to the residual stream."""

    budget_tokens: int = Field(100_000_000, gt=0)
    seq_len_tokens: int = Field(512, gt=0)
    batch_tokens: int = Field(49_152, gt=0)
    lr: float = Field(1e-3, gt=0)
    calibrate: bool = Field(
        True, description="start output norms at the scale of the teacher's attention outputs"
    )
    layers_at_once: int | None = Field(
        None,
        gt=0,
        description=(
            "train so many layers a pass over the data: less memory, one pass a group; default: all"
        ),
    )


class SelectSettings(Settings):
    """Stage `select`: which physical layers stay full attention."""

    enabled: bool = Field(True, description="run this stage")
    method: Method = Field("kl-fast", description="how layers are ranked")
    direction: Literal["restore", "remove", "both"] = Field(
        "remove",
        description=(
            "kl-fast: restore one layer in the linear student, remove one from the teacher,"
            " or the mean rank of both"
        ),
    )
    eval_tokens: int = Field(
        65_536, gt=0, description="kl-fast, kl-greedy: held-in tokens a score is measured on"
    )
    seq_len_tokens: int = Field(512, gt=0, description="length of a row")
    train_tokens: int = Field(
        2_000_000,
        gt=0,
        description="kl: tokens of short distillation a layer; kl-gates: in all",
    )
    recall_examples: int = Field(
        64, gt=0, description="recall, recall-greedy: synthetic retrieval examples"
    )
    stable_rounds: int = Field(
        3, gt=0, description="stop when the chosen set has not changed for so many batches"
    )


class LogitsSettings(TrainSettings):
    """Stage `logits`: all parameters learn the teacher's next-token distribution."""

    budget_tokens: int = Field(600_000_000, gt=0)
    seq_len_tokens: int = Field(4096, gt=0)
    batch_tokens: int = Field(131_072, gt=0)
    lr: float = Field(1e-5, gt=0, description="peak learning rate of everything but mixers")
    mixer_lr: float = Field(1e-4, gt=0, description="peak learning rate of mixers")
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward", description="direction of the KL"
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="weight of the teacher in the JSD mixture")
    temperature: float = Field(1.0, gt=0, description="softmax temperature of both models")
    kl_weight: float = Field(1.0, ge=0, description="weight of the divergence from the teacher")
    ce_weight: float = Field(0.0, ge=0, description="weight of next-token cross-entropy")
    loop_warmup_share: float = Field(
        0.1, ge=0, le=1, description="looped teachers: share of steps with the KL of every loop"
    )
    depth_warmup_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="`moda`: share of steps in which depth is merged in, from nothing to wholly",
    )
    release_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="`dreamer`: share of steps in which routing goes from the teacher's layers to"
        " what is learned",
    )
    balance_rate: float = Field(
        1e-3, ge=0, description="`dreamer`: what an expert's balancing bias moves a step"
    )


class LoopSettings(LogitsSettings):
    """Stage `loop`: a dense teacher whose layers were tied learns its logits, before conversion."""

    budget_tokens: int = Field(300_000_000, gt=0)
    seq_len_tokens: int = Field(2048, gt=0)
    batch_tokens: int = Field(65_536, gt=0)
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    loop_warmup_share: float = Field(0.0, ge=0, le=1)
    depth_warmup_share: float = Field(0.0, ge=0, le=1)
    release_share: float = Field(0.0, ge=0, le=1)


class ShrinkSettings(LogitsSettings):
    """Stage `shrink`: pools of a Dreamer get smaller, and what is left learns after each step."""

    budget_tokens: int = Field(200_000_000, gt=0, description="tokens of all steps together")
    batch_tokens: int = Field(65_536, gt=0)
    lr: float = Field(5e-5, gt=0, description="peak learning rate of everything but what is new")
    usage_tokens: int = Field(
        65_536, gt=0, description="training tokens on which use is measured before each step"
    )
    damage_tokens: int = Field(
        8192, gt=0, description="with `student.pool_rank` damage: tokens on which that is measured"
    )
    loop_warmup_share: float = Field(0.0, ge=0, le=1)
    depth_warmup_share: float = Field(0.0, ge=0, le=1)
    release_share: float = Field(0.0, ge=0, le=1)

    def of_one_step(self, steps: int) -> Self:
        """Settings of one of so many steps, which share the budget evenly."""
        budget = max(self.budget_tokens // steps, self.batch_tokens)
        return self.model_copy(update={"budget_tokens": budget})


class LongctxSettings(LogitsSettings):
    """Stage `longctx`: longer rows, cross-entropy and optional KL."""

    budget_tokens: int = Field(100_000_000, gt=0)
    seq_len_tokens: int = Field(16_384, gt=0)
    kl_weight: float = Field(0.5, ge=0)
    ce_weight: float = Field(0.5, ge=0, description="weight of next-token cross-entropy")
    loop_warmup_share: float = Field(0.0, ge=0, le=1)
    depth_warmup_share: float = Field(0.0, ge=0, le=1)
    release_share: float = Field(0.0, ge=0, le=1)


class EvalSettings(Settings):
    """What is measured after every stage and at the end."""

    heldout_tokens: int = Field(
        65_536, gt=0, description="held-out tokens for KL and perplexity after every stage"
    )
    heldout_seq_len_tokens: int = Field(1024, gt=0, description="length of a held-out row")
    recall_lengths_tokens: list[PositiveInt] = Field(
        [1024, 2048, 4096], description="context lengths of the synthetic recall"
    )
    recall_examples: int = Field(32, gt=0, description="examples a length")
    generation_prompts: int = Field(
        8, ge=0, description="held-out prompts continued by teacher and student"
    )
    generation_tokens: int = Field(48, gt=0, description="new tokens a prompt")
    decode_contexts_tokens: list[PositiveInt] = Field(
        [1024, 4096], description="contexts at which decode speed and cache size are measured"
    )
    loop_cache: Literal["own", "last"] = Field(
        "own",
        description="looped models: `last` also measures decoding in which loops share keys",
    )
    exit_thresholds: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [], description="looped models: also measure decoding that leaves loops at these"
    )
    tasks: list[str] = Field(["ltconvert_offline"], description="lm-eval task names")
    task_limit: int | None = Field(None, gt=0, description="documents a task")


class RuntimeSettings(Settings):
    """How fast a run is on its machine; no result depends on it beyond rounding."""

    compile: CompileSetting = Field(
        "auto",
        description=(
            "compile the layers of training steps: `layers`, `off`, or `auto`: on a GPU when"
            " enough steps are left to make up for it"
        ),
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML 1.1 reads `off` as false."""
        return "off" if value is False else value


class Recipe(Settings):
    """A whole conversion."""

    name: str = Field(description="name of the recipe")
    description: str = Field("", description="what it is for")
    seed: int = Field(0, description="seed of new weights, batch order and sampling")
    student: StudentSettings = StudentSettings()
    data: DataSettings = DataSettings()
    loop: LoopSettings = LoopSettings()
    align: AlignSettings = AlignSettings()
    select: SelectSettings = SelectSettings()
    logits: LogitsSettings = LogitsSettings()
    shrink: ShrinkSettings = ShrinkSettings()
    longctx: LongctxSettings = LongctxSettings()
    eval: EvalSettings = EvalSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    @property
    def stages(self) -> list[str]:
        """Stages that run, in order; what is not tied needs no loops learnt, and a student with
        nothing converted is not aligned.
        """
        wanted = [stage for stage in STAGES if getattr(self, stage).enabled]
        idle = [] if self.student.converts else ["align", "select"]
        idle += [] if self.student.loop_start is not None else ["loop"]
        idle += [] if self.student.shrinks else ["shrink"]
        return [stage for stage in wanted if stage not in idle]

    @model_validator(mode="after")
    def _rows_reach_beyond_the_window(self) -> Self:
        """Where rows are no longer than what is exact nothing is there to learn or to measure."""
        name, exact = self.student.exact_tokens
        for stage in self.stages if exact else ():
            settings = getattr(self, stage)
            if stage == "loop":  # all layers are full then
                continue
            idle = stage == "select" and settings.method in ("uniform", "list")
            # An indexer learns from all the attention there is, chosen or not.
            idle |= stage == "align" and self.student.kinds == ["dsa"]
            if settings.seq_len_tokens <= exact and not idle:
                raise ValueError(
                    f"{stage}.seq_len_tokens {settings.seq_len_tokens} shows nothing outside"
                    f" {name} {exact}; make the rows longer or that smaller"
                )
        return self

    @model_validator(mode="after")
    def _pools_shrink_once_routing_is_learned(self) -> Self:
        """While a depth has its layer, nothing of it can leave."""
        if "shrink" in self.stages and not self.logits.enabled:
            raise ValueError(
                "the stage shrink needs routing that the stage logits has released; set"
                " logits.enabled=true, or leave out student.pool_schedule"
            )
        return self

    @model_validator(mode="after")
    def _list_method_has_a_list(self) -> Self:
        """`select.method: list` takes the layers from `student.full_layers`."""
        if self.select.method == "list" and not isinstance(self.student.full_layers, list):
            raise ValueError(
                "select.method list needs the layers themselves: student.full_layers=[0,4,8]"
            )
        return self
