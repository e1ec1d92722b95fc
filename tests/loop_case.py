"""Looped models while decoding, as they should be: mixers run uncached over all they ever read."""

from __future__ import annotations

from typing import Any

import torch
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.students.lt2 import LT2ForCausalLM

MIXERS = {
    "full": ["full", "full", "full"],
    "window": ["window", "window", "window"],
    "gdn": ["gdn", "gdn", "gdn"],
    "gdn_window": ["gdn_window", "gdn", "gdn_window"],
    "delta": ["kda", "deltanet", "kda"],
    "decay": ["retnet", "retnet", "mamba2"],
    "dsa": ["dsa", "dsa", "dsa"],
    "nsa": ["nsa", "nsa", "nsa"],
    "hybrid": ["gdn", "full", "window"],
}
SMALL = {"window_tokens": 4, "top_k_tokens": 4, "block_tokens": 2, "chosen_blocks": 2}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"prelude_layers": 1, "coda_layers": 1},
    {"sdpa_gate": True, "loop_residual": True},
    {"short_conv": False},
    {"window_tokens": 1},
]
PROMPT, NEW, ROWS = 5, 8, 2
SAMPLING = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def looped(mixers: str, family: str = "ouro", loops: int = 4, **options: Any) -> LT2ForCausalLM:
    rank = options.pop("tied_rank", None)
    spec = tiny_spec(family, num_loops=loops, exit_gate=True, tied_rank=rank)
    return tiny_model(spec, MIXERS[mixers], **(SMALL | options)).double()


@torch.no_grad()
def naive(
    model: LT2ForCausalLM,
    ids_BT: torch.Tensor,
    threshold: float = 2.0,
    *,
    last_of_full: bool = False,
) -> tuple[torch.Tensor, list[int]]:
    """Logits [B, T, V] and loops a token; no caches: each visit keeps the inputs of its mixer.

    Args:
        threshold: of the exit probability, for tokens behind the prompt.
        last_of_full: behind the prompt, full layers look at what their last loop read.
    """
    inner, config = model.model, model.config
    core = range(config.prelude_layers, config.num_layers - config.coda_layers)
    read: list[list[torch.Tensor]] = [[] for _ in inner.schedule]
    last_slot = {step.layer: step.slot for step in inner.schedule}
    logits, loops = [], []
    for t in range(ids_BT.shape[1]):
        context = inner.context(inner.embed(ids_BT[:, : t + 1]))
        h = loop_in = inner.embed(ids_BT[:, t : t + 1])
        stay, exit_loop, last = torch.ones(len(ids_BT)), None, {}
        for step in inner.schedule:
            layer = inner.layers[step.layer]
            if exit_loop is not None and step.layer in core:
                read[step.slot].append(last[step.layer])
                continue
            loop_in = h if step.opens_loop else loop_in
            last[step.layer] = layer.mixer_input(h)
            before = read[step.slot]
            if last_of_full and layer.mixer.kind == "full" and t >= PROMPT:
                before = read[last_slot[step.layer]][:t]
            mixed = layer.mixer(torch.cat([*before, last[step.layer]], dim=1), context)[:, -1:]
            read[step.slot].append(last[step.layer])
            h = h + layer.mixer_contribution(mixed)
            h = h + layer.mlp_branch(h)
            if step.closes_loop:
                if inner.loop_residual is not None:
                    h = h + inner.loop_residual[step.loop] * loop_in
                normed = inner.norm(h)
                stay = stay * (1 - torch.sigmoid(inner.exit_gate(normed))[:, 0, 0])
                if t >= PROMPT and bool((1 - stay >= threshold).all()):
                    exit_loop = step.loop
                ends = exit_loop is not None or step.loop == inner.spec.num_loops - 1
                if inner.spec.loop_norm == "every" or (ends and not config.coda_layers):
                    h = normed
        logits.append(model.logits(inner.norm(h) if config.coda_layers else h))
        loops.append(inner.spec.num_loops if exit_loop is None else exit_loop + 1)
    return torch.cat(logits, dim=1), loops


@torch.no_grad()
def decoded(
    model: LT2ForCausalLM,
    ids_BT: torch.Tensor,
    threshold: float | None = None,
    loop_cache: str | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """The same with a cache, token by token behind the prompt."""
    cache = model.new_cache(loop_cache)
    pieces = ids_BT.split([PROMPT] + [1] * (ids_BT.shape[1] - PROMPT), dim=1)
    outputs = [model(piece, cache=cache, exit_threshold=threshold) for piece in pieces]
    loops = [len(output.loop_states) for output in outputs[1:]]
    if threshold is not None:
        assert (cache.steps, cache.loops) == (len(loops), sum(loops))
    assert all(o.exit_logits.shape[-1] == len(o.loop_states) for o in outputs)
    return torch.cat([output.logits for output in outputs], dim=1), loops


def padded() -> dict[str, torch.Tensor]:
    """Prompts of 11, 3 and 7 tokens, padded at the left."""
    ids, mask = torch.zeros(2, 3, 11, dtype=torch.long)
    for row, length in enumerate((11, 3, 7)):
        ids[row, -length:], mask[row, -length:] = tokens(1, length, seed=length), 1
    return {"input_ids": ids, "attention_mask": mask}
