"""TeacherSpec: everything about a decoder's architecture that the conversion relies on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ltconvert.errors import UserError

NormLayout = Literal["pre", "post", "sandwich", "outer"]
QKNorm = Literal["head", "full"]


@dataclass(frozen=True)
class TeacherSpec:
    """The architecture of a decoder-only language model, dense (``num_loops == 1``) or looped.

    Every field is a fact read from the published config; nothing is derived from another field
    (``head_dim`` above all: it is never ``hidden_size // num_attention_heads``).

    Attributes:
        family: name of the family module that read the config, e.g. ``"llama"``.
        num_layers: physical layers N; a looped model runs all of them ``num_loops`` times.
        norm_layout: where the RMSNorms of a branch sit: ``pre`` (norm, branch, add), ``post``
            (branch, norm, add), ``sandwich`` (norm, branch, norm, add), ``outer`` (norm, branch,
            add, norm).
        prelude_layers, coda_layers: layers that run once before and after the looped core.
        tied_rank: loops of the core share matrices alone: vectors (norm gains, biases) and a
            correction of this rank to every matrix are each loop's own. None: all is shared.
        norm_offset: added to every norm weight before it multiplies (Gemma stores ``w - 1``: 1.0).
        loop_norm: ``"every"`` when the final norm closes every loop (Ouro), ``"core"`` when it
            stands before and behind the coda (Huginn), ``"last"`` otherwise.
        initial_state_std: the looped core begins with random numbers of that deviation and reads
            the prelude's output in every loop (Huginn); None: it begins with that output.
        qk_norm: RMSNorm of q and k per head, over the full projection width, or none.
        attention_scale: factor on q.k before the softmax.
        attention_softcap, final_softcap: ``c * tanh(x / c)`` on scores and on logits, or None.
        embedding_scale: factor on the token embeddings (Gemma: sqrt(hidden_size)).
        rope: parameters by RoPE name, in the form of transformers' ``rope_parameters``.
        layer_rope: for each layer the name of its RoPE, or None for a layer without positions.
        layer_windows: for each layer its sliding window in tokens (the token itself counted), or
            None.
        exit_gate: the model has a Linear(hidden, 1) that scores leaving after each loop (Ouro).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_scale: float
    rope: dict[str, dict[str, Any]]
    layer_rope: tuple[str | None, ...]
    layer_windows: tuple[int | None, ...]
    num_loops: int = 1
    prelude_layers: int = 0
    coda_layers: int = 0
    tied_rank: int | None = None
    hidden_act: str = "silu"
    norm_layout: NormLayout = "pre"
    norm_offset: float = 0.0
    loop_norm: Literal["last", "core", "every"] = "last"
    initial_state_std: float | None = None
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    exit_gate: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("layer_rope", "layer_windows"):
            given = len(getattr(self, name))
            if given != self.num_layers:
                raise UserError(
                    f"{name} has {given} entries, expected one for each of the "
                    f"{self.num_layers} layers"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key/value heads evenly"
            )
        unknown = {name for name in self.layer_rope if name is not None} - set(self.rope)
        if unknown:
            raise UserError(f"layer_rope names {sorted(unknown)}, rope defines {sorted(self.rope)}")

    def norm_closes(self, loop: int) -> bool:
        """Whether what follows a loop reads the final norm of its stream."""
        last = loop == self.num_loops - 1
        return self.loop_norm == "every" or (self.loop_norm == "core" and last)

    def own_tensors(self, layer: int) -> tuple[int, int]:
        """How many loops of a layer have tensors of their own, and the rank of corrections.

        (1, 0) for a layer that runs once, or whose loops share everything.
        """
        core = range(self.prelude_layers, self.num_layers - self.coda_layers)
        if self.tied_rank is None or layer not in core:
            return 1, 0
        return self.num_loops, self.tied_rank
