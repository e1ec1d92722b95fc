"""Generation compared with the teacher's, decode speed, and what a cache takes.

Shape letters: B prompts, P prompt tokens, G generated tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ltconvert.distill.data import Batch

WARM_UP_STEPS = 2


def prompts_from(batches: Sequence[Batch], count: int, length: int) -> Tensor:
    """The first ``length`` tokens of held-out documents, [B <= count, P]; one prompt a document.

    What of a document stands in a new row is one of its own.
    """
    found: list[Tensor] = []
    for batch in batches:
        for ids_T, segment_T, keep_T in zip(
            batch.input_ids_BT, batch.segment_ids_BT, batch.keep_BT, strict=True
        ):
            for segment in segment_T.unique().tolist():
                document = ids_T[(segment_T == segment) & keep_T]
                if len(document) > length and len(found) < count:
                    found.append(document[:length])
    return torch.stack(found) if found else torch.zeros(0, length, dtype=torch.int64)


@torch.inference_mode()
def generation_agreement(
    teacher: Any,
    student: Any,
    tokenizer: Any,
    prompts_BP: Tensor,
    new_tokens: int,
    *,
    precision: str = "fp32",
    num_examples: int = 3,
) -> dict[str, Any]:
    """Greedy continuations of both models side by side.

    Returns:
        ``prompts``, ``tokens`` (continued tokens a prompt at most), ``common_prefix`` (mean tokens
        before the first difference), ``equal_share`` (tokens equal at the same place, of the
        longer continuation), ``followed_share`` (tokens of the teacher's continuation that the
        student would also have chosen there), each of the last three with ``<name>_stderr`` over
        prompts, and ``examples``: prompt and both texts.
    """
    prompts_BP = prompts_BP.to(teacher.device)
    rows: list[dict[str, Any]] = []
    if len(prompts_BP):
        models = deployed(teacher, precision), deployed(student, precision)
        rows = _compare(*models, prompts_BP, new_tokens)
    result: dict[str, Any] = {"prompts": len(rows), "tokens": new_tokens}
    for name in ("common_prefix", "equal_share", "followed_share"):
        values = [row[name] for row in rows]
        result[name] = statistics.fmean(values) if values else None
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        result[f"{name}_stderr"] = spread
    result["examples"] = [
        {name: tokenizer.decode(row[name]) for name in ("prompt", "teacher", "student")}
        for row in rows[:num_examples]
    ]
    return result


def deployed(model: Any, precision: str) -> Any:
    """The model as it would serve: a copy in bf16 where that is the precision.

    Autocast would convert every weight again for each token.
    """
    if precision != "bf16" or model.dtype == torch.bfloat16:
        return model
    return copy.deepcopy(model).to(torch.bfloat16)


def _compare(
    teacher: Any, student: Any, prompts_BP: Tensor, new_tokens: int
) -> list[dict[str, Any]]:
    """One row a prompt: token ids of prompt and continuations, and how far these agree."""
    target_BG = _continue(teacher, prompts_BP, new_tokens)
    own_BG = _continue(student, prompts_BP, new_tokens)
    whole_BT = torch.cat([prompts_BP, target_BG], dim=1)
    keep = target_BG.shape[1] + 1
    logits = student(input_ids=whole_BT, logits_to_keep=keep, use_cache=False).logits
    choice_BG = logits[:, :-1].argmax(-1)
    rows = []
    for index, prompt_P in enumerate(prompts_BP):
        target, own = _until_end(target_BG[index], teacher), _until_end(own_BG[index], student)
        equal = [a == b for a, b in zip(target, own, strict=False)]
        followed = [a == b for a, b in zip(target, choice_BG[index].tolist(), strict=False)]
        rows.append(
            {
                "prompt": prompt_P.tolist(),
                "teacher": target,
                "student": own,
                "common_prefix": equal.index(False) if False in equal else len(equal),
                "equal_share": sum(equal) / max(len(target), len(own), 1),
                "followed_share": sum(followed) / max(len(followed), 1),
            }
        )
    return rows


def _continue(model: Any, prompts_BP: Tensor, new_tokens: int) -> Tensor:
    """Greedy tokens [B, G]; after an end token a row holds padding."""
    from transformers import GenerationConfig

    own, ends = model.generation_config, _ends(model)
    # Of the model's own settings only where it ends: penalties would choose other tokens.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    try:
        out = model.generate(
            input_ids=prompts_BP,
            attention_mask=torch.ones_like(prompts_BP),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
        )
    finally:
        model.generation_config = own
    return out[:, prompts_BP.shape[1] :]


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _until_end(ids_G: Tensor, model: Any) -> list[int]:
    """A continuation up to and including its first end token."""
    ids = ids_G.tolist()
    stops = [index for index, token in enumerate(ids) if token in _ends(model)]
    return ids[: stops[0] + 1] if stops else ids


@torch.inference_mode()
def decode_speed(
    model: Any,
    contexts: Sequence[int],
    *,
    steps: int = 16,
    precision: str = "fp32",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Time of one decoded token behind a context, batch 1, and the bytes of the cache then.

    Random tokens are read first (time does not depend on which), then ``steps`` tokens one by one;
    the median step counts, after a warm-up.

    Args:
        contexts: tokens read first; those beyond the model's positions are left out.

    Returns:
        One ``{"context", "ms_per_token", "tokens_per_second", "cache_bytes"}`` a context.
    """
    model = deployed(model, precision)
    limit = getattr(model.config, "max_position_embeddings", None)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for context in contexts:
        if limit is not None and context + steps + WARM_UP_STEPS > limit:
            continue
        ids_1T = torch.randint(0, model.config.vocab_size, (1, context), generator=generator)
        seconds, size = _time_steps(model, ids_1T.to(model.device), steps)
        found.append(
            {
                "context": context,
                "ms_per_token": 1000 * seconds,
                "tokens_per_second": 1 / seconds,
                "cache_bytes": size,
            }
        )
    return found


def _time_steps(model: Any, ids_1T: Tensor, steps: int) -> tuple[float, int]:
    """``(median seconds a step, bytes of the cache after the warm-up)``."""
    times, size = [], 0
    output = model(input_ids=ids_1T, use_cache=True, logits_to_keep=1)
    # transformers 5.2x renamed it.
    name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
    cache = getattr(output, name)
    token_11 = ids_1T[:, -1:]
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            size = cache_bytes(cache)
        _synchronise(ids_1T.device)
        began = time.perf_counter()
        output = model(input_ids=token_11, use_cache=True, **{name: cache})
        token_11 = output.logits[:, -1:].argmax(-1)
        _synchronise(ids_1T.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP_STEPS:]), size


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_bytes(cache: Any) -> int:
    """Bytes that the tensors of a cache hold, each storage counted once."""
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
