"""Writes a transformers model as GGUF, with llama.cpp's own conventions for q, k and norms."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = {"gemma3_text": "gemma3"}
_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PLAIN = {"post_attention_layernorm": "ffn_norm"}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    quantise: bool = False,
    extra_tensors: dict[str, np.ndarray] | None = None,
    settings: dict[str, bool | int | float | list[bool]] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file; returns the fp32 values of the quantised tensors by GGUF name."""
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // 4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2" and config.final_logit_softcapping != 30.0:  # else as the first files
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (settings or {}).items():
        adders.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    quantised = _add_tensors(writer, model, arch, quantise)
    for name, value in (extra_tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return quantised


def _add_tensors(
    writer: gguf.GGUFWriter, model: PreTrainedModel, arch: str, quantise: bool
) -> dict[str, np.ndarray]:
    quantised = {}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy().copy()
        module, _, suffix = name.rpartition(".")
        if arch.startswith("gemma") and module.endswith("norm"):
            value = value + 1
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = (
                model.config.num_attention_heads
                if module.endswith("q_proj")
                else model.config.num_key_value_heads
            )
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        target = f"{_rename(module, arch)}.{suffix}"
        if quantise and target.endswith("ffn_gate.weight"):
            packed = gguf.quantize(value, kind)
            quantised[target] = gguf.dequantize(packed, kind)
            writer.add_tensor(target, packed, raw_dtype=kind)
        else:
            writer.add_tensor(target, value)
    return quantised


def _rename(module: str, arch: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in top:
        return top[module]
    _, _, layer, inner = module.split(".", 3)
    names = {**_MODULES, **(_GEMMA if arch.startswith("gemma") else _PLAIN)}
    return f"blk.{layer}.{names[inner]}"


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.all_special_tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([control if token in special else normal for token, _ in vocab])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    # Twice, which is the same merges: transformers 5.17 takes a list of one for a word.
    writer.add_token_merges([" ".join(pair) for pair in merges] * 2)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
