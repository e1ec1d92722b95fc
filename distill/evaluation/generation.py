"""Generation compared with the teacher's, decode speed, and what a cache takes.

Shape letters: B prompts, P prompt tokens, G generated tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import autocast

WARM_UP_STEPS = 2


def prompts_from(batches: Sequence[Batch], count: int, length: int) -> Tensor:
    """The first ``length`` tokens of held-out documents, [B <= count, P]; one prompt a document."""
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
    rows = [
        _compare(teacher, student, prompt_P[None], new_tokens, precision)
        for prompt_P in prompts_BP.to(teacher.device)
    ]
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


def _compare(
    teacher: Any, student: Any, prompt_1P: Tensor, new_tokens: int, precision: str
) -> dict[str, Any]:
    target, own = (_continue(model, prompt_1P, new_tokens, precision) for model in (teacher, student))
    equal = [a == b for a, b in zip(target, own, strict=False)]
    longest = max(len(target), len(own), 1)
    whole_1T = torch.cat([prompt_1P[0], prompt_1P.new_tensor(target)])[None]
    with autocast(prompt_1P.device, precision):
        logits = student(input_ids=whole_1T, logits_to_keep=len(target) + 1, use_cache=False).logits
    choice_G = logits[0, :-1].argmax(-1).tolist()
    followed = [a == b for a, b in zip(target, choice_G, strict=True)]
    return {
        "prompt": prompt_1P[0].tolist(),
        "teacher": target,
        "student": own,
        "common_prefix": equal.index(False) if False in equal else len(equal),
        "equal_share": sum(equal) / longest,
        "followed_share": sum(followed) / max(len(followed), 1),
    }


def _continue(model: Any, prompt_1P: Tensor, new_tokens: int, precision: str) -> list[int]:
    """Greedy tokens up to and including the first end token."""
    with autocast(prompt_1P.device, precision):
        out = model.generate(
            input_ids=prompt_1P,
            attention_mask=torch.ones_like(prompt_1P),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
        )
    return out[0, prompt_1P.shape[1] :].tolist()


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
    limit = getattr(model.config, "max_position_embeddings", None)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for context in contexts:
        if limit is not None and context + steps + WARM_UP_STEPS > limit:
            continue
        ids_1T = torch.randint(0, model.config.vocab_size, (1, context), generator=generator)
        seconds, cache_bytes = _time_steps(model, ids_1T.to(model.device), steps, precision)
        found.append(
            {
                "context": context,
                "ms_per_token": 1000 * seconds,
                "tokens_per_second": 1 / seconds,
                "cache_bytes": cache_bytes,
            }
        )
    return found


def _time_steps(model: Any, ids_1T: Tensor, steps: int, precision: str) -> tuple[float, int]:
    """``(median seconds a step, bytes of the cache after the context)``."""
    times = []
    with autocast(ids_1T.device, precision):
        cache = model(input_ids=ids_1T, use_cache=True, logits_to_keep=1).past_key_values
        size = cache_bytes(cache)
        token_11 = ids_1T[:, -1:]
        for _ in range(WARM_UP_STEPS + steps):
            _synchronise(ids_1T.device)
            began = time.perf_counter()
            output = model(input_ids=token_11, past_key_values=cache, use_cache=True)
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
