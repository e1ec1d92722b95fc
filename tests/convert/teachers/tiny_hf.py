"""Tiny random models of transformers' own classes, the oracles of the parity tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_hf(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model with weights so large that a wrong formula shows in the logits."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    config._attn_implementation = "eager"  # the only one that applies Gemma's score cap
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scatter(model)
    return model


def scatter(model: torch.nn.Module) -> None:
    """Random weights, norms and biases included; logits come out with a spread of several units."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)


def random_ids(rows: int = 2, length: int = 40) -> torch.Tensor:
    """Token ids [rows, length] without the padding id 0."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))
