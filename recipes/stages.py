"""Settings of the stages: what every training stage shares, then each as it differs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ltconvert.recipes.base import Settings

# In the order in which they run.
STAGES = ("loop", "align", "select", "logits", "shrink", "longctx")
Method = Literal[
    "kl", "kl-fast", "kl-greedy", "kl-gates", "recall", "recall-greedy", "uniform", "list"
]


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
        True,
        description="start output norms, half-lives and the share of a window from what the"
        " teacher's attention does",
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
        65_536,
        gt=0,
        description="with `student.pool_rank` use or `student.pool_cut` merge: training tokens on"
        " which use is measured before each step",
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
