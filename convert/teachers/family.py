"""What a family is, and what the readers of published configs share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

Config = dict[str, Any]

ATTENTION_NAMES = {
    f"self_attn.{part}": f"mixer.{part}"
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
MLP_NAMES = {f"mlp.{part}": f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
TOP_NAMES = {name: name for name in ("model.embed_tokens", "model.norm", "lm_head")}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# Frequencies that older checkpoints store although they follow from the config.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Family:
    """A published checkpoint format.

    Attributes:
        name: the module that defines it, e.g. ``"llama"``.
        read_spec: published config (a parsed config.json) -> TeacherSpec.
        layer_names: module names inside ``model.layers.{i}.``, published -> canonical.
        top_names: module names outside the layers, published -> canonical.
        unfuse: of a format that lays tensors together or names layers in other ways: (config,
            published name, tensor) -> names as ``layer_names`` has them, with their tensors.
    """

    name: str
    read_spec: Callable[[Config], TeacherSpec]
    layer_names: dict[str, str]
    top_names: dict[str, str]
    unfuse: Callable[[Config, str, Tensor], Iterable[tuple[str, Tensor]]] | None = None

    def read(self, config: Config, published: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A stored tensor by its canonical name, or the tensors that it holds.

        Raises:
            UserError: the family has no such tensor.
        """
        parts = (
            [(published, value)] if self.unfuse is None else self.unfuse(config, published, value)
        )
        for name, part in parts:
            if (canonical := self.rename(name)) is not None:
                yield canonical, part

    def rename(self, published: str) -> str | None:
        """The canonical name of a published tensor; None for one that the config determines.

        Raises:
            UserError: the family has no such tensor.
        """
        if _DERIVED.fullmatch(published):
            return None
        name = _translate(published, self.layer_names, self.top_names)
        if name is None:
            raise UserError(
                f"tensor {published!r} is not part of the {self.name} format: "
                "the checkpoint belongs to another model or has an adapter in it"
            )
        return name

    def publish(self, canonical: str) -> str:
        """The published name of a canonical tensor: the inverse of ``rename``."""
        back = ({v: k for k, v in names.items()} for names in (self.layer_names, self.top_names))
        name = _translate(canonical, *back)
        if name is None:
            raise UserError(f"tensor {canonical!r} has no place in the {self.name} format")
        return name


def pre_norm_names() -> dict[str, str]:
    """Layer names of the families with one norm before each branch (llama and its kin)."""
    return {
        **ATTENTION_NAMES,
        **MLP_NAMES,
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "pre_mlp_norm",
    }


def need(config: Config, key: str) -> Any:
    """``config[key]``.

    Raises:
        UserError: the key is absent or null.
    """
    if config.get(key) is None:
        raise UserError(f"config.json of this {config.get('model_type')} model lacks {key!r}")
    return config[key]


def common_fields(config: Config, family: str, *, max_positions: int) -> dict[str, Any]:
    """The TeacherSpec fields that every family publishes under the same names.

    Args:
        max_positions: the family's own default of ``max_position_embeddings``.
    """
    heads, hidden = need(config, "num_attention_heads"), need(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "family": family,
        "vocab_size": need(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": need(config, "intermediate_size"),
        "num_layers": need(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "max_position_embeddings": config.get("max_position_embeddings") or max_positions,
        "rms_norm_eps": need({"rms_norm_eps": 1e-6, **config}, "rms_norm_eps"),
        "hidden_act": config.get("hidden_act") or "silu",
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
    }


def undo_interleave(value: Tensor, heads: int) -> Tensor:
    """Rows (first, second, first, second, ...) of each head -> all first, then all second.

    So that RoPE, which turns neighbours in one convention and halves in the other, turns the same
    pairs; q.k does not depend on the order of channels.
    """
    rows_HFP = value.unflatten(0, (heads, -1, 2))
    return rows_HFP.transpose(1, 2).reshape(value.shape).contiguous()


def windows(layer_types: list[str], sliding_window: int | None) -> tuple[int | None, ...]:
    """The window of each layer, from transformers' names of layer types.

    Raises:
        UserError: a type other than full or sliding attention, or the latter without a window.
    """
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(
            f"layer_types has {', '.join(sorted(unknown))}; "
            "supported: full_attention, sliding_attention"
        )
    if sliding_window is None and "sliding_attention" in layer_types:
        raise UserError(
            "layer_types has sliding_attention, and sliding_window is null or switched off; set "
            "the window, or make those layers full_attention"
        )
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in layer_types)


def _translate(name: str, layer_names: dict[str, str], top_names: dict[str, str]) -> str | None:
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, module, kind = match.groups()
        if module not in layer_names:
            return None
        return f"model.layers.{layer}.{layer_names[module]}.{kind}"
    module, _, kind = name.rpartition(".")
    if module not in top_names or kind not in ("weight", "bias"):
        return None
    return f"{top_names[module]}.{kind}"
