"""Independent Huginn and Nanbeige: plain functions over dicts of tensors with the published names.

Written from the descriptions of the architectures, and sharing no code with ltconvert. Huginn turns
neighbouring channels as complex numbers; Nanbeige turns halves and shares keys among query heads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]

HUGINN: dict[str, Any] = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "n_embd": 5280,
    "n_heads": 55,
    "n_layers": 8,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 32,
    "intermediate_size": 17_920,
    "vocab_size": 65_536,
    "block_size": 4096,
    "norm_eps": 1e-6,
    "rope_base": 50_000,
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
}
NANBEIGE: dict[str, Any] = {
    "model_type": "nanbeige",
    "architectures": ["NanbeigeForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 10_752,
    "num_hidden_layers": 22,
    "num_loops": 2,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 166_144,
    "max_position_embeddings": 262_144,
    "rope_theta": 70_000_000.0,
    "rms_norm_eps": 1e-5,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "loop_share_kv": False,
    "emb_neighbor_num": None,
}
TINY_HUGINN = HUGINN | {
    "n_embd": 32, "n_heads": 4, "intermediate_size": 48, "vocab_size": 97, "block_size": 64,
    "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1,
}  # fmt: skip
TINY_NANBEIGE = NANBEIGE | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 97,
}  # fmt: skip


def huginn_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all tensors; the head is stored although it is tied."""
    width, inner, vocab = (config[k] for k in ("n_embd", "intermediate_size", "vocab_size"))
    heads, block = config["n_heads"], config["block_size"]
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, width),
        "transformer.adapter.weight": (width, 2 * width),
        "transformer.ln_f.weight": (width,),
        "lm_head.weight": (vocab, width),
        "freqs_cis": (1, block, 1, width // heads // 2, 2),
    }
    for at in huginn_layers(config):
        found[f"{at}.attn.Wqkv.weight"] = (3 * width, width)
        found[f"{at}.attn.qk_bias"] = (2, 1, heads, width // heads)
        found[f"{at}.attn.proj.weight"] = (width, width)
        found[f"{at}.mlp.fc.weight"] = (2 * inner, width)
        found[f"{at}.mlp.proj.weight"] = (width, inner)
        found |= {f"{at}.norm_{i}.weight": (width,) for i in (1, 2, 3, 4)}
    return found


def huginn_layers(config: dict[str, Any], *parts: str) -> list[str]:
    sizes = {
        "prelude": "n_layers_in_prelude",
        "core_block": "n_layers_in_recurrent_block",
        "coda": "n_layers_in_coda",
    }
    return [f"transformer.{p}.{i}" for p in parts or sizes for i in range(config[sizes[p]])]


def nanbeige_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all tensors."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found[f"{at}.self_attn.q_proj.weight"] = (q, hidden)
        found[f"{at}.self_attn.k_proj.weight"] = (kv, hidden)
        found[f"{at}.self_attn.v_proj.weight"] = (kv, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, q)
        found[f"{at}.mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.up_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        found[f"{at}.input_layernorm.weight"] = (hidden,)
        found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    return found


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Weights:
    """A random checkpoint in the published format."""
    huginn = config["model_type"] == "huginn_raven"
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in (huginn_shapes if huginn else nanbeige_shapes)(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name or "ln_f" in name
        weights[name] = 1 + 0.3 * noise if is_norm else noise / shape[-1] ** 0.5
    if huginn:
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def huginn(
    w: Weights, config: dict[str, Any], ids: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Logits [B, T, V] for a given first state [T, C], after config["mean_recurrence"] loops."""
    scale = math.sqrt(config["n_embd"])
    e = scale * w["transformer.wte.weight"][ids]
    for at in huginn_layers(config, "prelude"):
        e = _huginn_layer(w, config, at, e)
    x = state.expand_as(e)
    for _ in range(config["mean_recurrence"]):
        x = torch.cat((x, e), -1) @ w["transformer.adapter.weight"].T
        for at in huginn_layers(config, "core_block"):
            x = _huginn_layer(w, config, at, x)
    x = _norm(x, w["transformer.ln_f.weight"], config["norm_eps"])
    for at in huginn_layers(config, "coda"):
        x = _huginn_layer(w, config, at, x)
    x = _norm(x, w["transformer.ln_f.weight"], config["norm_eps"])
    return x @ w["lm_head.weight"].T


def nanbeige(w: Weights, config: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V]."""
    eps, loops = config["rms_norm_eps"], config["num_loops"]
    x = w["model.embed_tokens.weight"][ids]
    for loop in range(loops):
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + _nanbeige_attention(
                w, config, at + "self_attn.", _norm(x, w[at + "input_layernorm.weight"], eps)
            )
            y = _norm(x, w[at + "post_attention_layernorm.weight"], eps)
            gate, up = (y @ w[at + f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
        if loop == loops - 1 or not config["skip_loop_final_norm"]:
            x = _norm(x, w["model.norm.weight"], eps)
    return x @ w["lm_head.weight"].T


def _huginn_layer(w: Weights, config: dict[str, Any], at: str, x: torch.Tensor) -> torch.Tensor:
    norms = [w[f"{at}.norm_{i}.weight"] for i in (1, 2, 3, 4)]
    eps = config["norm_eps"]
    attended = _huginn_attention(w, config, at + ".attn.", _norm(x, norms[0], eps))
    x = _norm(attended + x, norms[1], eps)
    gate, up = (_norm(x, norms[2], eps) @ w[f"{at}.mlp.fc.weight"].T).chunk(2, -1)
    inner = (gate * torch.sigmoid(gate) * up) @ w[f"{at}.mlp.proj.weight"].T
    return _norm(inner + x, norms[3], eps)


def _huginn_attention(w: Weights, config: dict[str, Any], at: str, x: torch.Tensor) -> torch.Tensor:
    width, heads = config["n_embd"], config["n_heads"]
    dim = width // heads
    rate = config["rope_base"] ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones(1), torch.arange(x.shape[1])[:, None] * rate)
    outputs = []
    for head in range(heads):
        q, k, v = (
            x @ w[at + "Wqkv.weight"][i * width + head * dim : i * width + (head + 1) * dim].T
            for i in range(3)
        )
        biased = (y + bias[0, head] for y, bias in zip((q, k), w[at + "qk_bias"], strict=True))
        q, k = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn for y in biased)
        q, k = (torch.view_as_real(y).flatten(-2) for y in (q, k))
        outputs.append(_attend(q, k, v))
    return torch.cat(outputs, -1) @ w[at + "proj.weight"].T


def _nanbeige_attention(
    w: Weights, config: dict[str, Any], at: str, x: torch.Tensor
) -> torch.Tensor:
    dim, heads = config["head_dim"], config["num_attention_heads"]
    group = heads // config["num_key_value_heads"]
    angle = torch.arange(x.shape[1])[:, None] * config["rope_theta"] ** (
        -torch.arange(dim // 2) / (dim // 2)
    )
    outputs = []
    for head in range(heads):
        at_head = {"q": head, "k": head // group, "v": head // group}
        q, k, v = (
            x @ w[at + f"{name}_proj.weight"][i * dim : (i + 1) * dim].T
            for name, i in at_head.items()
        )
        outputs.append(_attend(_turn(q, angle), _turn(k, angle), v))
    return torch.cat(outputs, -1) @ w[at + "o_proj.weight"].T


def _turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~causal, -math.inf).softmax(-1) @ v


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
