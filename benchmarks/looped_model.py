"""A looped teacher of Ouro's architecture, untrained: its sizes, its start, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ltconvert.convert.checkpoint import replace_folder
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.ouro import (
    ENDOFTEXT,
    FAMILIES,
    FAMILY_NAME,
    IM_END,
    published_config,
    read_ouro,
)
from ltconvert.convert.teachers.source import resolve
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError

HEAD_WIDTH = 64
MLP_SHARE = 8 / 3  # of the hidden width: a gated MLP then has twice the weights of the attention
MAX_POSITIONS = 8192  # stated in the config; more than the model has seen
ROPE_THETA = 10_000.0  # Ouro's 1,000,000 is for far longer rows than a small budget pays for


def read_tokenizer(reference: str) -> Any:
    """The tokenizer of a teacher, or of a folder that has nothing else.

    Raises:
        UserError: there is none, or its special ids are not those that a reader of Ouro assumes.
    """
    tokenizer = resolve(reference).tokenizer()
    if tokenizer is None:
        raise UserError(f"--tokenizer {reference}: there is no tokenizer in it; give another one")
    vocabulary = tokenizer.get_vocab()
    for token, number in (("<|endoftext|>", ENDOFTEXT), ("<|im_end|>", IM_END)):
        if vocabulary.get(token) != number:
            raise UserError(
                f"--tokenizer {reference}: {token} is {vocabulary.get(token)}, Ouro's layout needs "
                f"{number}; give a tokenizer of SmolLM2's kind (smollm2-135m)"
            )
    return tokenizer


def looped_spec(
    tokenizer: Any, *, layers: int, heads: int, loops: int, mlp: int | None
) -> TeacherSpec:
    """Ouro's architecture at these sizes, as its published config would be read.

    The head is not tied to the embedding, as in the published models.

    Args:
        heads: of 64 channels; their number gives the hidden width.
        mlp: width inside an MLP; None: 8/3 of the hidden width, rounded up to whole 128.
    """
    width = heads * HEAD_WIDTH
    return read_ouro(
        {
            "model_type": FAMILY_NAME,
            "vocab_size": max(tokenizer.get_vocab().values()) + 1,
            "hidden_size": width,
            "intermediate_size": mlp or -(-round(MLP_SHARE * width) // 128) * 128,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": HEAD_WIDTH,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": ROPE_THETA,
            "total_ut_steps": loops,
            "bos_token_id": ENDOFTEXT,
            "eos_token_id": ENDOFTEXT,
            "pad_token_id": ENDOFTEXT,
        }
    )


@torch.no_grad()
def new_model(spec: TeacherSpec, seed: int) -> LT2ForCausalLM:
    """A model in fp32 on the CPU, ready to be trained; the same one for the same seed.

    What a branch adds passes a norm (a sandwich), so it is that norm's weight which says how much.
    At 1 the first loop would add up 2 N unit vectors and bury the tokens that it began with: the
    weights start at 1 / sqrt(2 N), and the embedding at unit size.
    """
    torch.manual_seed(seed)
    model = LT2ForCausalLM(LT2Config.from_spec(spec))
    nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for norm in (layer.post_mixer_norm, layer.post_mlp_norm):
            nn.init.constant_(norm.weight, (2 * spec.num_layers) ** -0.5)
    gate = model.model.exit_gate
    assert gate is not None
    nn.init.zeros_(gate.weight)  # nothing trains it
    return model


def at_loops(model: LT2ForCausalLM, loops: int) -> LT2ForCausalLM:
    """The same weights, run so many times; nothing is copied."""
    mixers = ["full"] * len(model.model.layers)
    return build_student(model, mixers, {"loops": loops}, share=True).eval()


def save_teacher(model: LT2ForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the published layout of Ouro, in fp32, with the tokenizer; whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    publish = FAMILIES[FAMILY_NAME].publish
    tensors = {
        publish(name): value.detach().float().cpu().contiguous()
        for name, value in model.named_parameters()
    }
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = published_config(model.config.spec())
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer.save_pretrained(partial)
    replace_folder(partial, folder)
