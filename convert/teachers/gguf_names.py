"""What llama.cpp's metadata keys and tensor names mean in the terms of a published config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ltconvert.convert.teachers.family import Config, undo_interleave
from ltconvert.convert.teachers.gguf_file import GGUFFile
from ltconvert.errors import UserError

# llama.cpp's architecture -> model_type of the published config
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
_LAYER_MODULES = {
    "attn_norm": "pre_mixer_norm",
    "post_attention_norm": "post_mixer_norm",
    "ffn_norm": "pre_mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "attn_q_norm": "mixer.q_norm",
    "attn_k_norm": "mixer.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# The sizes whose attention scale is hidden / heads and not head_dim (llama.cpp decides likewise).
_ODD_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
# Keys that change what a model computes, and the values of them that are computed here.
_AS_COMPUTED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def read_config(file: GGUFFile) -> Config:
    """The published config that the metadata stand for.

    Raises:
        UserError: an architecture that is not among ARCHITECTURES, scaled RoPE frequencies, or a
            setting that is not computed here.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{file.path.name}: GGUF architecture {arch!r} is not supported as a teacher; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in file.tensors:
        raise UserError(
            f"{file.path.name} stores scaled RoPE frequencies (rope_freqs); "
            "give the original checkpoint folder or hub id instead"
        )

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    _check_settings(file.path.name, value)
    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length") or value("rope.dimension_count")
    config = {
        "model_type": ARCHITECTURES[arch],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon", 1e-6), 9),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": _rope_scaling(value),
        "partial_rotary_factor": _rotated(value, head_dim),
        **_ids(file.metadata),
    }
    if arch.startswith("gemma"):
        config |= _of_gemma(arch, value, head_dim)
    if window := value("attention.sliding_window"):
        config["sliding_window"] = window
        config["model_type"] = "mistral" if arch == "llama" else config["model_type"]
    return config


def _check_settings(name: str, value: Callable[..., Any]) -> None:
    for key, computed in _AS_COMPUTED.items():
        if value(key, computed[0]) not in computed:
            raise UserError(
                f"{name} has {key} = {value(key)}, which is not computed here; give the original "
                "checkpoint folder or hub id instead"
            )


def _of_gemma(arch: str, value: Callable[..., Any], head_dim: int) -> Config:
    """What Gemma's configs have beside all others'."""
    odd = value("block_count") == _ODD_SCALE_LAYERS[arch]
    scale = value("embedding_length") // value("attention.head_count") if odd else head_dim
    # The first files of Gemma 2 name no caps and have them all the same.
    score_cap, logit_cap = (50.0, 30.0) if arch == "gemma2" else (None, None)
    return {
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": value("attn_logit_softcapping", score_cap),
        "final_logit_softcapping": value("final_logit_softcapping", logit_cap),
        "rope_local_base_freq": value("rope.freq_base_swa"),
        **_window_pattern(value("attention.sliding_window_pattern")),
    }


def tensors(file: GGUFFile, config: Config) -> Iterator[tuple[str, Tensor]]:
    """``(canonical name, fp32 tensor)`` of each tensor, as the published checkpoint has them.

    Undone: llama.cpp interleaves the rotated halves of q and k in ``llama`` files and stores
    Gemma's norm weights with the 1 added.

    Raises:
        UserError: a tensor with an unknown name.
    """
    is_llama = config["model_type"] in ("llama", "mistral")
    is_gemma = config["model_type"].startswith("gemma")
    for published in file.tensors:
        name = canonical_name(published)
        value = file.read(published)
        if is_llama and ".mixer.q_proj." in name:
            value = undo_interleave(value, config["num_attention_heads"])
        elif is_llama and ".mixer.k_proj." in name:
            value = undo_interleave(value, config["num_key_value_heads"])
        elif is_gemma and name.endswith("norm.weight"):
            value = value - 1.0
        yield name, value


def canonical_name(published: str) -> str:
    """The canonical name of a GGUF tensor.

    Raises:
        UserError: none is known.
    """
    module, _, kind = published.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if layer and layer[2] in _LAYER_MODULES:
        return f"model.layers.{layer[1]}.{_LAYER_MODULES[layer[2]]}.{kind}"
    if module in _TOP_MODULES:
        return f"{_TOP_MODULES[module]}.{kind}"
    raise UserError(f"GGUF tensor {published!r} is not part of any supported family")


def _rope_scaling(value: Any) -> dict[str, Any] | None:
    kind = value("rope.scaling.type")
    factor = value("rope.scaling.factor")
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
    }


def _window_pattern(pattern: Any) -> dict[str, Any]:
    """Which layers have windows: all but every n-th one, or one truth value a layer."""
    if pattern is None:
        return {}
    if isinstance(pattern, int):
        return {"sliding_window_pattern": pattern}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[bool(windowed)] for windowed in pattern]}


def _rotated(value: Any, head_dim: int | None) -> float | None:
    rotated = value("rope.dimension_count")
    return None if not rotated or not head_dim else rotated / head_dim


def _ids(metadata: dict[str, Any]) -> dict[str, int | None]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in names.items()
    }
