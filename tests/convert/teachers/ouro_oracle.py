"""An independent Ouro: plain functions over a dict of tensors with the published names.

Written from the description of the architecture alone and shares no code with ltconvert:
four RMSNorms a layer inside the residual branches, ``model.norm`` after every loop (its output
feeds the next loop, the gate and the head), the same positions in every loop, logits of the last.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]

# The published config of the 1.4B model.
OURO_1_4B = {
    "architectures": ["OuroForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
    },
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "early_exit_threshold": 1.0,
    "eos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 49152,
}


def tiny_config(loops: int) -> dict[str, Any]:
    """The published fields at toy size."""
    return {
        **OURO_1_4B,
        "head_dim": 12,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * 3,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "total_ut_steps": loops,
        "vocab_size": 97,
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of all tensors."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found[layer + "self_attn.q_proj.weight"] = (q, hidden)
        found[layer + "self_attn.k_proj.weight"] = (kv, hidden)
        found[layer + "self_attn.v_proj.weight"] = (kv, hidden)
        found[layer + "self_attn.o_proj.weight"] = (hidden, q)
        found[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        found[layer + "mlp.up_proj.weight"] = (inner, hidden)
        found[layer + "mlp.down_proj.weight"] = (hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[layer + norm + ".weight"] = (hidden,)
            found[layer + norm + "_2.weight"] = (hidden,)
    return found


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> Weights:
    """A random checkpoint in the published format: config.json and model.safetensors."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if "norm" in name else 1.5 * noise / shape[-1] ** 0.5
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def forward(
    weights: Weights, config: dict[str, Any], ids: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Logits [B, T, V], the normed states after each loop, exit probabilities [B, T, loops]."""
    x = weights["model.embed_tokens.weight"][ids]
    states, gates = [], []
    for _ in range(config["total_ut_steps"]):
        for i in range(config["num_hidden_layers"]):
            x = _layer(weights, config, f"model.layers.{i}.", x)
        x = _norm(x, weights["model.norm.weight"], config)
        states.append(x)
        gates.append(
            x @ weights["model.early_exit_gate.weight"].T + weights["model.early_exit_gate.bias"]
        )
    return x @ weights["lm_head.weight"].T, states, _exit_probabilities(gates)


def _layer(w: Weights, config: dict[str, Any], at: str, x: torch.Tensor) -> torch.Tensor:
    branch = _norm(x, w[at + "input_layernorm.weight"], config)
    branch = _attention(w, config, at + "self_attn.", branch)
    x = x + _norm(branch, w[at + "input_layernorm_2.weight"], config)
    branch = _norm(x, w[at + "post_attention_layernorm.weight"], config)
    gate, up = (branch @ w[at + f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    branch = (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return x + _norm(branch, w[at + "post_attention_layernorm_2.weight"], config)


def _norm(x: torch.Tensor, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"])


def _attention(w: Weights, config: dict[str, Any], at: str, x: torch.Tensor) -> torch.Tensor:
    heads, dim = config["num_attention_heads"], config["head_dim"]
    outputs = []
    length = x.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for head in range(heads):
        rows = slice(head * dim, (head + 1) * dim)
        q, k, v = (x @ w[at + f"{part}_proj.weight"][rows].T for part in "qkv")
        q, k = _rotate(q, config["rope_theta"]), _rotate(k, config["rope_theta"])
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        outputs.append(scores.masked_fill(~causal, -math.inf).softmax(-1) @ v)
    return torch.cat(outputs, -1) @ w[at + "o_proj.weight"].T


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate channel j with channel j + dim / 2 by position * theta^(-2j / dim)."""
    half = x.shape[-1] // 2
    rate = theta ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[1])[:, None] * rate
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def _exit_probabilities(gates: list[torch.Tensor]) -> torch.Tensor:
    """p_t = lambda_t * prod_{j<t} (1 - lambda_j); the last loop takes the remainder."""
    remaining, found = torch.ones_like(gates[0]), []
    for gate in gates[:-1]:
        leave = torch.sigmoid(gate)
        found.append(remaining * leave)
        remaining = remaining * (1 - leave)
    return torch.cat([*found, remaining], dim=-1)
