"""Settings of a whole pipeline: one frozen model a stage, one Recipe that holds them all.

A default stands here once; the CLI help, docs and README read it from here. Sizes carry their
unit in their names. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

STAGES = ("align", "select", "logits", "longctx")  # in the order in which they run
CompileSetting = Literal["auto", "off", "layers"]
Method = Literal[
    "kl", "kl-fast", "kl-greedy", "kl-gates", "recall", "recall-greedy", "uniform", "list"
]


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StudentSettings(Settings):
    """What the student is: its mixer, how many layers stay full, how it loops."""

    kind: Literal["lt2"] = Field("lt2", description="family of the student")
    mixer: Literal["gdn", "gdn_window", "window", "full"] = Field(
        "gdn", description="mixer of every converted layer"
    )
    full_layers: int | float | list[int] = Field(
        0.25,
        description="layers kept as full attention: a share (0.25), a count (8) or a list ([0, 4])",
    )
    window_tokens: int = Field(
        128,
        gt=0,
        description="window of `window` and `gdn_window` mixers, the token itself counted",
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
    prelude_layers: int = Field(0, ge=0, description="layers run once before the looped core")
    coda_layers: int = Field(0, ge=0, description="layers run once after the looped core")

    @field_validator("full_layers")
    @classmethod
    def _full_layers(cls, value: int | float | list[int]) -> int | float | list[int]:
        """A share lies in [0, 1], a count is not negative, a list names each layer once."""
        if isinstance(value, list):
            if len(set(value)) != len(value) or any(layer < 0 for layer in value):
                raise ValueError("a list of layers names each once, counted from 0")
            return sorted(value)
        if value < 0 or (isinstance(value, float) and value > 1):
            raise ValueError("expected a share in [0, 1], a count, or a list of layers")
        return value


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


class LongctxSettings(LogitsSettings):
    """Stage `longctx`: longer rows, cross-entropy and optional KL."""

    budget_tokens: int = Field(100_000_000, gt=0)
    seq_len_tokens: int = Field(16_384, gt=0)
    kl_weight: float = Field(0.5, ge=0)
    ce_weight: float = Field(0.5, ge=0, description="weight of next-token cross-entropy")
    loop_warmup_share: float = Field(0.0, ge=0, le=1)


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
    align: AlignSettings = AlignSettings()
    select: SelectSettings = SelectSettings()
    logits: LogitsSettings = LogitsSettings()
    longctx: LongctxSettings = LongctxSettings()
    eval: EvalSettings = EvalSettings()
    runtime: RuntimeSettings = RuntimeSettings()

    @property
    def stages(self) -> list[str]:
        """Stages that run, in order; a student with nothing converted is not aligned."""
        wanted = [stage for stage in STAGES if getattr(self, stage).enabled]
        converts = self.student.mixer != "full"
        return [stage for stage in wanted if converts or stage not in ("align", "select")]

    @model_validator(mode="after")
    def _rows_reach_beyond_the_window(self) -> Self:
        """Where rows are no longer than the window nothing is there to learn or to measure."""
        window = self.student.window_tokens
        if self.student.mixer not in ("window", "gdn_window"):
            return self
        for stage in self.stages:
            settings = getattr(self, stage)
            idle = stage == "select" and settings.method in ("uniform", "list")
            if settings.seq_len_tokens <= window and not idle:
                raise ValueError(
                    f"{stage}.seq_len_tokens {settings.seq_len_tokens} shows nothing outside"
                    f" student.window_tokens {window}; make the rows longer or the window smaller"
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
