"""`ltconvert inspect`: layer map, parameters and cache cost of a teacher or a student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_generate import student_folder
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.students.lt2 import LT2Config

CACHE_BYTES_PER_VALUE = 2  # keys and values in bf16
STATE_BYTES_PER_VALUE = 4  # recurrent states are kept in fp32


def examine(reference: str, revision: str | None = None) -> dict[str, Any]:
    """Facts of a teacher reference or a student folder, without loading weights."""
    config, facts = _read(student_folder(reference), revision)
    layers = [_layer(config, layer) for layer in range(config.num_layers)]
    visits = _visits(config)
    return {
        "reference": reference,
        "family": config.family,
        "layers": config.num_layers,
        "loops": config.num_loops,
        "hidden": config.hidden_size,
        "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value",
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context_tokens": config.max_position_embeddings,
        "parameters": _parameters(config),
        "cache_bytes_per_token": sum(
            row["cache_bytes_per_token"] * visits[row["layer"]] for row in layers
        ),
        "cache_bytes_fixed": sum(row["cache_bytes_fixed"] * visits[row["layer"]] for row in layers),
        "layer_map": layers,
        "source": facts,
    }


def show(document: dict[str, Any], *, verbose: bool) -> None:
    """Print the facts and the layer map; runs of equal layers take one row unless verbose."""
    facts = {name: value for name, value in document.items() if name not in ("layer_map", "source")}
    facts["parameters"] = output.human_count(facts["parameters"])
    for name in ("cache_bytes_per_token", "cache_bytes_fixed"):
        facts[name] = output.human_bytes(facts[name])
    output.print_facts(str(facts.pop("reference")), facts)
    columns = ("layers", "mixer", "window", "cache a token", "fixed cache")
    rows = []
    for first, last, layer in _runs(document["layer_map"], merge=not verbose):
        rows.append(
            (
                f"{first}" if first == last else f"{first} to {last}",
                layer["mixer"],
                layer["window"],
                output.human_bytes(layer["cache_bytes_per_token"]),
                output.human_bytes(layer["cache_bytes_fixed"]),
            )
        )
    output.print_table("", columns, rows)


def _runs(layers: list[dict[str, Any]], *, merge: bool) -> list[tuple[int, int, dict[str, Any]]]:
    """(first, last, facts) of neighbouring layers that are alike."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for layer in layers:
        alike = {name: value for name, value in layer.items() if name != "layer"}
        if merge and runs and runs[-1][2] == alike:
            runs[-1] = (runs[-1][0], layer["layer"], alike)
        else:
            runs.append((layer["layer"], layer["layer"], alike))
    return runs


def _read(reference: str, revision: str | None) -> tuple[LT2Config, dict[str, Any]]:
    """The config of `reference` and what else is known of it."""
    from ltconvert.convert.checkpoint import read_provenance
    from ltconvert.convert.students.lt2 import LT2Config
    from ltconvert.convert.teachers.load import describe_teacher

    path = Path(reference) / "config.json"
    if path.is_file():
        try:
            model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError):
            raise UserError(f"{path} is not a JSON object: the folder is damaged") from None
        if model_type == LT2Config.model_type:
            return LT2Config.from_pretrained(reference), read_provenance(reference)
    spec, facts = describe_teacher(reference, revision=revision)
    return LT2Config.from_spec(spec), dict(facts)


def _layer(config: LT2Config, layer: int) -> dict[str, Any]:
    """Mixer, window and cache cost of one physical layer, one visit."""
    assert config.mixers is not None
    kind, window = config.mixers[layer], config.window(layer)
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * CACHE_BYTES_PER_VALUE
    growing = fixed = 0
    if kind == "gdn":
        width = config.num_attention_heads * config.head_dim
        fixed = width * config.head_dim * STATE_BYTES_PER_VALUE
        fixed += 3 * width * ((config.conv_size or 1) - 1) * CACHE_BYTES_PER_VALUE
        window = None
    elif window is not None:
        fixed = window * keys_and_values
    else:
        growing = keys_and_values
    return {
        "layer": layer,
        "mixer": kind,
        "window": window,
        "cache_bytes_per_token": growing,
        "cache_bytes_fixed": fixed,
    }


def _visits(config: LT2Config) -> list[int]:
    """How often each physical layer runs; every visit has a cache of its own."""
    visits = [0] * config.num_layers
    for step in config.schedule():
        visits[step.layer] += 1
    return visits


def _parameters(config: LT2Config) -> int:
    """Parameters of the model, tied ones counted once; nothing is allocated."""
    import torch

    from ltconvert.convert.students.lt2 import LT2ForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LT2ForCausalLM(config).parameters())
