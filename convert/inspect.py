"""What a teacher or student consists of: layer map, parameters, cache size; without weights."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from ltconvert.convert.mixers import MIXERS
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.depth import depth_ropes
from ltconvert.convert.students.dreamer import facts as dreamer
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM, LT2Model


@dataclass(frozen=True)
class LayerFacts:
    """One physical layer.

    Attributes:
        mixer: one of ``MIXERS``.
        windows: tokens that its attention sees in each visit (the token itself counted), None for
            all, or of mixers without keys; 0 in visits of a Dreamer that skip attention.
        attended: tokens that a query attends to at most, where it chooses them among all.
        choosing_width: multiplications that looking at one token costs a query that chooses.
        rope: name of its positions, None for none.
        visits: how often a forward pass runs it; each visit has a cache of its own. 0 behind the
            last depth of a Dreamer that runs at fewer than it was made for.
        parameters, mixer_parameters: of the layer, and of its mixer alone.
        own_parameters, mixer_own_parameters: of these, what is one loop's own, all loops together.
        aligned_parameters: of its mixer, those that the stage `align` trains.
        cache_bytes_per_token: over all visits, growing with every token.
        cache_tokens: tokens after which the cache of each visit stops growing, None where it never
            does.
        state_bytes: over all visits, whatever the context (recurrent state, convolution history).
        depth_slots: of the depth stream, that a visit reads on average.
        rows: vectors that stand for a token in its products, at most; above 1 in a Dreamer.

    A Dreamer has one layer: here are what its depths use of it, by the teacher's layers whose
    places they take.
    """

    layer: int
    mixer: str
    windows: tuple[int | None, ...]
    attended: int | None
    choosing_width: float
    rope: str | None
    visits: int
    parameters: int
    mixer_parameters: int
    own_parameters: int
    mixer_own_parameters: int
    aligned_parameters: int
    cache_bytes_per_token: int
    cache_tokens: tuple[int | None, ...]
    state_bytes: int
    depth_slots: float
    rows: int = 1

    @property
    def visited(self) -> tuple[int, int]:
        """Parameters that one visit uses, of the layer and of its mixer."""
        visits = max(1, self.visits)
        others = visits - 1
        return (
            self.parameters - self.own_parameters * others // visits,
            self.mixer_parameters - self.mixer_own_parameters * others // visits,
        )

    def cache_bytes(self, context_tokens: int) -> int:
        """Cache of one sequence of so many tokens."""
        limits = (context_tokens if limit is None else limit for limit in self.cache_tokens)
        kept = sum(min(context_tokens, limit) for limit in limits)
        return kept * self.cache_bytes_per_token // max(1, self.visits) + self.state_bytes

    @property
    def grows(self) -> bool:
        """Whether every further token takes memory; so it is in all visits or in none."""
        return None in self.cache_tokens

    @property
    def constant_bytes(self) -> int:
        """What a long sequence's cache holds whatever its length: state and full windows."""
        return self.cache_bytes(0 if self.grows else sys.maxsize)


@dataclass(frozen=True)
class ModelFacts:
    """A whole model.

    Attributes:
        parameters: tied ones once.
        embedding_parameters, head_parameters: the head's are 0 when it is the embedding.
        depth_width: values a token in the depth stream of a whole pass.
    """

    family: str
    loops: int
    layers: tuple[LayerFacts, ...]
    parameters: int
    embedding_parameters: int
    head_parameters: int
    depth_width: int

    @property
    def own_parameters(self) -> int:
        """What is one loop's own, all loops together."""
        return sum(layer.own_parameters for layer in self.layers)

    @property
    def cache_bytes_per_token(self) -> int:
        """What every further token of a long sequence adds."""
        return sum(x.cache_bytes_per_token for x in self.layers if x.grows)

    @property
    def constant_bytes(self) -> int:
        """What a long sequence's cache holds whatever its length: states and full windows."""
        return sum(x.constant_bytes for x in self.layers)

    def cache_bytes(self, context_tokens: int) -> int:
        """Cache of one sequence of so many tokens."""
        return sum(layer.cache_bytes(context_tokens) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sums included."""
        return asdict(self) | {
            "own_parameters": self.own_parameters,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "constant_bytes": self.constant_bytes,
        }


def model_facts(config: LT2Config, cache_dtype: torch.dtype = torch.bfloat16) -> ModelFacts:
    """Facts of a teacher (``LT2Config.from_spec(spec)``) or of a student.

    Args:
        cache_dtype: of keys, values and convolution histories; recurrent states are fp32 always.
    """
    with torch.device("meta"):
        model = LT2ForCausalLM(config)
    model.tie_weights()
    loops: list[list[int]] = [[] for _ in range(config.num_layers)]
    for step in model.model.schedule:
        loops[step.layer].append(step.loop)
    embedding = model.model.embed_tokens.weight.numel()
    tied = config.tie_word_embeddings
    return ModelFacts(
        family=config.family,
        loops=config.num_loops,
        layers=tuple(
            _layer_facts(config, model.model, layer, loops[layer], cache_dtype.itemsize)
            for layer in range(config.num_layers)
        ),
        parameters=count(model) - (model.lm_head.weight.numel() if tied else 0),
        embedding_parameters=embedding,
        head_parameters=0 if tied else model.lm_head.weight.numel(),
        depth_width=_depth_width(model.model),
    )


def _depth_width(model: LT2Model) -> int:
    """Keys and values of all slots, once for each kind of positions."""
    if model.dreamer is not None:
        return dreamer.depth_width(model.dreamer)
    if model.depth_plan is None:
        return 0
    width = model.spec.num_key_value_heads * model.spec.head_dim
    return model.depth_plan.slots * len(depth_ropes(model)) * 2 * width


def count(module: nn.Module) -> int:
    """Values in all parameters, tied ones once a name."""
    return sum(
        parameter.numel() for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def count_own(module: nn.Module) -> int:
    """Values that one loop has for itself, all loops together."""
    total = 0
    for part in module.modules():
        if isinstance(part, Linear) and part.loops > 1:
            total += sum(p.numel() for name, p in part.named_parameters() if name != "weight")
        elif isinstance(part, RMSNorm) and part.weight.dim() > 1:
            total += part.weight.numel()
    return total


def _layer_facts(
    config: LT2Config, model: LT2Model, layer: int, loops: list[int], itemsize: int
) -> LayerFacts:
    """Facts of a layer that is visited in those loops."""
    kind, visits = config.mixers[layer], len(loops)
    slots = [slot for slot, step in enumerate(config.schedule()) if step.layer == layer]
    attends = [config.attends(slot) for slot in slots]
    windows = [config.window(layer, loop) for loop in loops]
    windows = [w if there else 0 for w, there in zip(windows, attends, strict=True)]
    per_token, state = _cache(config, layer, itemsize)
    keeps_keys = MIXERS[kind].keeps_keys
    # The next token sees itself and window - 1 before it; `dsa` keeps what it may choose.
    limits = [None if w is None or kind == "dsa" else max(0, w - 1) for w in windows]
    return LayerFacts(
        **_weights(model, layer, slots),
        layer=layer,
        mixer=kind,
        windows=tuple(windows) if keeps_keys else (None,) * visits,
        attended=config.attended(layer),
        choosing_width=_choosing_width(config, layer),
        rope=config.layer_rope[layer] if MIXERS[kind].uses_rope else None,
        visits=visits,
        cache_bytes_per_token=visits * per_token,
        cache_tokens=tuple(limits) if keeps_keys else (0,) * visits,
        state_bytes=sum(attends) * state,
        depth_slots=_depth_slots(config, model, layer),
    )


def _weights(model: LT2Model, layer: int, slots: list[int]) -> dict[str, int]:
    """What a layer holds, or what a Dreamer uses in its place."""
    if model.dreamer is not None:
        active, of_attention = dreamer.active_parameters(model.dreamer, slots)
        none = dict.fromkeys(("own_parameters", "mixer_own_parameters", "aligned_parameters"), 0)
        used = {"parameters": active, "mixer_parameters": of_attention}
        return none | used | {"rows": dreamer.routed_rows(model.dreamer)}
    block = model.layers[layer]
    return {
        "parameters": count(block),
        "mixer_parameters": count(block.mixer),
        "own_parameters": count_own(block),
        "mixer_own_parameters": count_own(block.mixer),
        "aligned_parameters": sum(p.numel() for p in block.mixer.aligned_parameters()),
    }


def _depth_slots(config: LT2Config, model: LT2Model, layer: int) -> float:
    """Slots that a visit of a layer reads on average."""
    if model.dreamer is not None:
        return dreamer.mean_depth_keys(model.dreamer)
    plan = config.depth_plan()
    if plan is None:
        return 0.0
    steps = zip(config.schedule(), plan.visits, strict=True)
    return mean(visit.stop - visit.first for step, visit in steps if step.layer == layer)


def _cache(config: LT2Config, layer: int, itemsize: int) -> tuple[int, int]:
    """One visit's bytes a token, and bytes whatever the length."""
    width = config.num_attention_heads * config.head_dim
    heads, state = config.num_key_value_heads, 0
    mixer = MIXERS[config.mixers[layer]]
    if mixer.keeps_state:
        history = 3 * width * ((config.conv_size or 1) - 1) * itemsize
        heads = config.num_attention_heads
        state = width * config.head_dim * torch.float32.itemsize + history
    if not mixer.keeps_keys:
        return 0, state
    per_token = 2 * heads * config.head_dim * itemsize
    if config.mixers[layer] == "dsa":
        per_token += config.head_dim * itemsize  # the indexer's key
    if config.mixers[layer] == "nsa":
        state = per_token  # the slot that is nobody's
        per_token += per_token // config.block_tokens
    return per_token, state


def _choosing_width(config: LT2Config, layer: int) -> float:
    """Multiplications a query and token: an indexer's heads, or the compressed keys and values."""
    if config.attended(layer) is None:
        return 0.0
    if config.mixers and config.mixers[layer] == "dsa":
        return float(config.index_heads * config.head_dim)
    return 3.0 * config.num_attention_heads * config.head_dim / config.block_tokens
