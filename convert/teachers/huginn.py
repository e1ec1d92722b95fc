"""Huginn (``huginn_raven``): prelude, a core that runs ``mean_recurrence`` times, coda.

Recurrent depth after Geiping et al. (arXiv 2502.05171). Two norms a branch, the second on the sum
of stream and branch; the final norm stands before and behind the coda. Every loop reads the
prelude's output through an adapter, and the first begins at random, see ``students/injection.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt

from torch import Tensor

from ltconvert.convert.teachers.family import Config, Family, need, undo_interleave
from ltconvert.convert.teachers.rope_config import ONE_ROPE
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

FAMILY_NAME = "huginn"
LAYER_NAMES = {
    "attn.q": "mixer.q_proj",
    "attn.k": "mixer.k_proj",
    "attn.v": "mixer.v_proj",
    "attn.proj": "mixer.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
    "norm_1": "pre_mixer_norm",
    "norm_2": "post_mixer_norm",
    "norm_3": "pre_mlp_norm",
    "norm_4": "post_mlp_norm",
}
TOP_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.adapter": "model.injection.adapter",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_PARTS = ("prelude", "core_block", "coda")
_SIZES = ("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
_LAYER = re.compile(rf"transformer\.({'|'.join(_PARTS)})\.(\d+)\.(.+)")
# Settings of the published code of which only this value is computed here.
_AS_PUBLISHED = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
    "bias": False,
    "test_time_noise": 0,
}


def read_huginn(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``huginn_raven`` config; ``mean_recurrence`` is the number of loops.

    Raises:
        UserError: an option that is not computed here, or a part without a layer.
    """
    heads, width = need(config, "n_heads"), need(config, "n_embd")
    for name, value in {**_AS_PUBLISHED, "num_key_value_heads": heads}.items():
        if config.get(name, value) != value:
            raise UserError(
                f"{name} of this huginn_raven config is {config[name]!r}; only {value!r}, as in "
                "huginn-0125, is supported"
            )
    sizes = _sizes(config)
    layers, head_dim = sum(sizes), width // heads
    start = config.get("init_values") or {}
    return TeacherSpec(
        family=FAMILY_NAME,
        vocab_size=need(config, "vocab_size"),
        hidden_size=width,
        intermediate_size=need(config, "intermediate_size"),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=config.get("block_size", 4096),
        rms_norm_eps=config.get("norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        rope={ONE_ROPE: {"rope_type": "default", "rope_theta": config.get("rope_base", 50_000)}},
        layer_rope=(ONE_ROPE,) * layers,
        layer_windows=(None,) * layers,
        num_loops=config.get("mean_recurrence", 32),
        prelude_layers=sizes[0],
        coda_layers=sizes[2],
        norm_layout="outer",
        loop_norm="core",
        qkv_bias=bool(config.get("qk_bias", True)),
        embedding_scale=start.get("embed_scale", sqrt(width)),
        initial_state_std=start.get("std", sqrt(2 / (5 * width))),
        tie_word_embeddings=bool(config.get("tie_embeddings", True)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )


def unfuse(config: Config, published: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A stored tensor under names that count layers through, one matrix each.

    RoPE turns neighbouring channels of q and k; their rows are put in the order that turns halves.
    The biases of q and k have none for v beside them: it becomes 0.
    """
    if published == "freqs_cis":  # follows from the config
        return
    match = _LAYER.fullmatch(published)
    if match is None:
        yield published, value
        return
    part, index, module = match.groups()
    layer = sum(_sizes(config)[: _PARTS.index(part)]) + int(index)
    for name, tensor in _pieces(need(config, "n_heads"), module, value):
        yield f"model.layers.{layer}.{name}", tensor


def _pieces(heads: int, module: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if module == "attn.Wqkv.weight":
        q, k, v = value.chunk(3)
        yield "attn.q.weight", undo_interleave(q, heads)
        yield "attn.k.weight", undo_interleave(k, heads)
        yield "attn.v.weight", v
    elif module == "attn.qk_bias":
        for name, bias in zip("qk", value, strict=True):
            yield f"attn.{name}.bias", undo_interleave(bias.flatten(), heads)
        yield "attn.v.bias", value.new_zeros(value[0].numel())
    elif module == "mlp.fc.weight":
        gate, up = value.chunk(2)
        yield "mlp.gate.weight", gate
        yield "mlp.up.weight", up
    else:
        yield module, value


def _sizes(config: Config) -> tuple[int, int, int]:
    """Layers of prelude, core and coda."""
    prelude, core, coda = (need(config, name) for name in _SIZES)
    if min(prelude, core, coda) < 1:
        raise UserError(f"{', '.join(_SIZES)} are {prelude}, {core}, {coda}; each must be above 0")
    return prelude, core, coda


FAMILIES = {"huginn_raven": Family(FAMILY_NAME, read_huginn, LAYER_NAMES, TOP_NAMES, unfuse=unfuse)}
