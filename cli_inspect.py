"""`ltconvert inspect`: layer map, parameters and cache cost of a teacher or a student."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltconvert import cli_output as output
from ltconvert.cli_models import student_folder
from ltconvert.distill.reporting.tables import size
from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.inspect import LayerFacts, ModelFacts
    from ltconvert.convert.students.lt2 import LT2Config

CONTEXTS_TOKENS = (4096, 32_768, 131_072)


def run(reference: str, revision: str | None, *, as_json: bool, verbose: bool) -> None:
    """Print what a teacher reference, a student or a run folder holds; no weights are read."""
    from ltconvert.convert.inspect import model_facts

    config, source = read_config(student_folder(reference), revision)
    facts = model_facts(config)
    caches = {tokens: facts.cache_bytes(tokens) for tokens in CONTEXTS_TOKENS}
    if as_json:
        document = {"reference": reference} | facts.to_dict()
        output.print_json(document | {"cache_bytes": caches, "source": source})
        return
    output.print_facts(reference, _summary(config) | _pools(config))
    sizes = {
        "parameters": output.human_count(facts.parameters),
        **_own_tensors(config, facts),
        "cache a token": size(facts.cache_bytes_per_token),
        "cache at any length": size(facts.constant_bytes),
    }
    for tokens, count in caches.items():
        sizes[f"cache of {tokens:,} tokens"] = size(count)
    output.print_facts("size (keys and values in bf16, states in fp32)", sizes)
    columns = (
        "layers",
        "mixer",
        "window",
        "positions",
        "visits",
        "parameters",
        "cache a token",
        "at any length",
    )
    output.print_table("", columns, _rows(facts.layers, merge=not verbose))


def read_config(reference: str, revision: str | None) -> tuple[LT2Config, dict[str, Any]]:
    """The config of a student folder or a teacher reference, and where it comes from."""
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
    spec, source = describe_teacher(reference, revision=revision)
    return LT2Config.from_spec(spec), dict(source)


def _own_tensors(config: LT2Config, facts: ModelFacts) -> dict[str, Any]:
    """What the loops of a core do not share, where that is not nothing."""
    if config.tied_rank is None:
        return {}
    own = output.human_count(facts.own_parameters)
    return {"of these, single loops' own": f"{own}, corrections of rank {config.tied_rank}"}


def _pools(config: LT2Config) -> dict[str, Any]:
    """What a Dreamer has in place of layers."""
    pools = config.dreamer_config()
    if pools is None:
        return {}
    return {
        "attention projections": f"{pools.entries}, {pools.top_entries} a token and depth",
        "experts": f"{pools.experts}, {pools.top_experts} a token and depth",
        "depths without attention": ", ".join(map(str, pools.skipped_attention)) or "none",
        "depths without experts": ", ".join(map(str, pools.skipped_experts)) or "none",
        "parameters of a layer below": "those that a token uses in its place",
    }


def _summary(config: LT2Config) -> dict[str, Any]:
    return {
        "family": config.family,
        "layers": config.num_layers,
        "loops": config.num_loops,
        "prelude, coda layers": f"{config.prelude_layers}, {config.coda_layers}",
        "hidden, MLP width": f"{config.hidden_size}, {config.intermediate_size}",
        "query, key/value heads": f"{config.num_attention_heads}, {config.num_key_value_heads}",
        "head width": config.head_dim,
        "vocabulary": config.vocab_size,
        "context tokens": config.max_position_embeddings,
    }


def _rows(layers: tuple[LayerFacts, ...], *, merge: bool) -> Iterator[tuple[Any, ...]]:
    """One row a layer; neighbours that are alike share one if `merge`."""
    first = 0
    for layer in layers:
        following = layers[layer.layer + 1] if layer.layer + 1 < len(layers) else None
        if merge and following is not None and _cells(following) == _cells(layer):
            continue
        name = f"{first}" if first == layer.layer else f"{first} to {layer.layer}"
        yield name, *_cells(layer)
        first = layer.layer + 1


def _cells(layer: LayerFacts) -> tuple[Any, ...]:
    windows = list(dict.fromkeys(layer.windows))
    return (
        "none" if windows == [0] else layer.mixer,  # a depth of a Dreamer that goes without
        windows[0] if len(windows) == 1 else ", ".join(str(window) for window in windows),
        layer.rope,
        layer.visits,
        output.human_count(layer.parameters),
        size(layer.cache_bytes_per_token if layer.grows else 0),
        size(layer.constant_bytes),
    )
