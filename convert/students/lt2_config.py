"""Config of LT2 models: a teacher's architecture and what makes the student."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, field, fields
from typing import Any

from transformers.configuration_utils import ALLOWED_LAYER_TYPES, PreTrainedConfig

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.students.depth_plan import DepthPlan, depth_plan
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.loop import Step, at_depth, make_schedule
from ltconvert.convert.students.shim import add_shim
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

# transformers renamed it after 5.17
INDEXED_TYPE = (
    "indexed_attention"
    if "indexed_attention" in ALLOWED_LAYER_TYPES
    else "deepseek_sparse_attention"
)
BLOCKS_TYPE = "compressed_sparse_attention"


class LT2Config(PreTrainedConfig):
    """A TeacherSpec's fields under their own names, and what makes the student.

    ``num_layers`` counts physical layers. ``num_hidden_layers`` and ``layer_types`` count and name
    the slots of the cache (a looped layer has one a loop), as generic tools size caches by them.

    Attributes:
        mixers: the mixer of each physical layer, see ``ltconvert.convert.mixers.MIXERS``.
        window_tokens: window of ``window``, ``gdn_window`` and ``nsa`` mixers; of ``window`` also a
            list, one a loop (before the loops the first one holds, behind them the last one).
        conv_size: taps of the short convolution of linear mixers; None for none.
        top_k_tokens, index_heads: tokens that a ``dsa`` mixer chooses, and heads that choose them.
        block_tokens, chosen_blocks: tokens of a block of an ``nsa`` mixer, and how many it chooses.
        sdpa_gate: output gate on full layers.
        loop_residual: learned per-loop, per-channel residual ``rho_t * h_in``.
        depth_writers, depth_slots, depth_linear_writes: what is in the depth stream of ``moda``
            mixers, see ``depth_plan``.
        depth_rope, depth_bias: how they read it, see ``MixtureOfDepths``.
        dreamer: what a ``DreamerConfig`` takes, where one layer stands in place of all; None else.
        depths: how often a Dreamer's layer runs, see ``dreamer.depths``; None: as it was made.
    """

    model_type = "lt2"
    mixers: list[str] = field(default_factory=list)
    prelude_layers: int = 0
    coda_layers: int = 0
    tied_rank: int | None = None
    window_tokens: int | list[int] = 128
    conv_size: int | None = 4
    top_k_tokens: int = 2048
    index_heads: int = 4
    block_tokens: int = 32
    chosen_blocks: int = 16
    sdpa_gate: bool = False
    loop_residual: bool = False
    depth_writers: str = "projected"
    depth_slots: str = "all"
    depth_rope: bool = True
    depth_bias: float | None = None
    depth_linear_writes: bool = False
    dreamer: dict[str, Any] | None = None
    depths: int | None = None
    num_hidden_layers: int = 0
    layer_types: list[str] = field(default_factory=list)
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not hasattr(self, "num_layers"):
            return  # transformers builds an empty config to find out its defaults
        self.set_mixers(self.mixers or ["full"] * self.num_layers)

    def set_mixers(self, mixers: Sequence[str]) -> None:
        """Name the mixer of every physical layer and derive the slots of the cache from it.

        Where the teacher has a window, `nsa` leaves its attention as it is: `full`.

        Raises:
            ValueError: not one mixer a layer, or windows that these mixers or loops do not have.
        """
        if len(mixers) != self.num_layers:
            raise ValueError(f"{len(mixers)} mixers for {self.num_layers} layers; give one a layer")
        # An own window is as small as what `nsa` would make of it: it stays.
        windowed = [window is not None for window in self.layer_windows]
        self.mixers = [
            "full" if kind == "nsa" and own else kind
            for kind, own in zip(mixers, windowed, strict=True)
        ]
        self._check_windows()
        self.layer_types = [self._layer_type(step.layer) for step in self.schedule()]
        self.num_hidden_layers = len(self.layer_types)

    @classmethod
    def from_spec(
        cls,
        spec: TeacherSpec,
        mixers: Sequence[str] | None = None,
        *,
        loops: int | None = None,
        short_conv: bool = True,
        conv_size: int | None = 4,
        **options: Any,
    ) -> LT2Config:
        """The config of a teacher (``mixers`` left out) or of a student of that architecture."""
        given = asdict(spec) | options
        if loops is not None:
            given["num_loops"] = loops
        return cls(
            **given,
            mixers=list(mixers or ()),
            conv_size=conv_size if short_conv else None,
            architectures=["LT2ForCausalLM"],
        )

    def spec(self) -> TeacherSpec:
        """The architecture without the student's own parts."""
        values = {
            f.name: getattr(self, f.name) for f in fields(TeacherSpec) if hasattr(self, f.name)
        }
        for name in ("layer_rope", "layer_windows"):
            values[name] = tuple(values[name])
        return TeacherSpec(**values)

    def dreamer_config(self) -> DreamerConfig | None:
        """The pools of a Dreamer; None where layers follow each other."""
        return None if self.dreamer is None else DreamerConfig(**self.dreamer)

    def attends(self, slot: int) -> bool:
        """Whether a visit has attention; depths of a Dreamer may go without."""
        skipped = (self.dreamer or {}).get("skipped_attention", ())
        return min(slot, len(self.made_schedule()) - 1) not in skipped

    def schedule(self) -> tuple[Step, ...]:
        """Visits of the physical layers in execution order."""
        steps = self.made_schedule()
        return steps if self.depths is None else at_depth(steps, self.depths)

    def made_schedule(self) -> tuple[Step, ...]:
        """The visits that the model was made for."""
        return make_schedule(self.num_layers, self.num_loops, self.prelude_layers, self.coda_layers)

    def depth_plan(self) -> DepthPlan | None:
        """The depth stream of a pass; None where no layer reads one.

        Raises:
            ValueError: ``depth_writers`` or ``depth_slots`` is not known.
        """
        return depth_plan(
            self.schedule(),
            self.mixers,
            writers=self.depth_writers,
            pattern=self.depth_slots,
            linear_writes=self.depth_linear_writes,
        )

    def window(self, layer: int, loop: int = 0) -> int | None:
        """Sliding window in tokens of a visit of a layer, None where it sees everything."""
        own: int | None = self.layer_windows[layer]
        if self.mixers[layer] not in ("window", "gdn_window"):
            return own
        wanted = self.window_tokens
        tokens = wanted if isinstance(wanted, int) else wanted[loop]
        return min(tokens, own or tokens)

    @property
    def sliding_window(self) -> int | None:
        """The widest window of all visits, None without one; generic tools size caches by it."""
        windows = [self.window(step.layer, step.loop) for step in self.schedule()]
        return max((window for window in windows if window is not None), default=None)

    @sliding_window.setter
    def sliding_window(self, value: int | None) -> None:
        """It follows from the mixers, as the number of slots does: what is given is left out."""

    def attended(self, layer: int) -> int | None:
        """Tokens that a query of a physical layer attends to, where it chooses them among all."""
        if self.mixers[layer] == "dsa":
            return self.top_k_tokens
        if self.mixers[layer] == "nsa":
            assert isinstance(self.window_tokens, int)
            return self.window_tokens + self.block_tokens * self.chosen_blocks
        return None

    def _check_windows(self) -> None:
        if isinstance(self.window_tokens, int):
            return
        windows = len(self.window_tokens)
        if windows != self.num_loops:
            raise UserError(
                f"window_tokens has {windows} windows for {self.num_loops} loops; "
                "give one a loop, or one number for all"
            )
        for kind in sorted({"gdn_window", "nsa"} & set(self.mixers)):
            raise UserError(
                f"window_tokens is a list, and what stands beside the window in {kind} mixers is "
                "made for one window in all loops; give one number, or use window mixers"
            )

    def _layer_type(self, layer: int) -> str:
        mixer = MIXERS.get(self.mixers[layer])  # an unknown one is refused when it is made
        if mixer is not None and mixer.keeps_state:
            return "hybrid_sliding" if mixer.keeps_keys else "linear_attention"
        if self.mixers[layer] == "dsa":
            return INDEXED_TYPE
        if self.mixers[layer] == "nsa":
            return BLOCKS_TYPE
        return "full_attention" if self.window(layer) is None else "sliding_attention"

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write config.json and the module that it names, whoever saves the model."""
        add_shim(self, save_directory)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: saved folders point at the installed package, no source is copied."""
