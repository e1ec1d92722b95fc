"""Generation against the teacher's, decode speed and cache sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evaluation_case import BATCHES
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.distill.evaluation.generation import (
    cache_bytes,
    decode_speed,
    generation_agreement,
    prompts_from,
)


def test_prompts_are_the_beginnings_of_documents() -> None:
    prompts = prompts_from(BATCHES, 8, 5)
    batch = BATCHES[0]
    expected = [batch.input_ids_BT[0, :5], batch.input_ids_BT[0, 9:14], batch.input_ids_BT[1, :5]]
    assert prompts.tolist()[:3] == [row.tolist() for row in expected]
    assert len(prompts) == 4  # the other documents are too short
    assert prompts_from(BATCHES, 2, 5).shape == (2, 5)
    assert prompts_from(BATCHES, 2, 50).shape == (0, 50)


def test_a_model_agrees_with_itself(tiny_tokenizer: Any) -> None:
    teacher = tiny_model(tiny_spec())
    found = generation_agreement(teacher, teacher, tiny_tokenizer, tokens(3, 6), 7)
    assert found["common_prefix"] == 7 and found["prompts"] == 3
    assert found["equal_share"] == found["followed_share"] == 1.0
    assert found["equal_share_stderr"] == 0.0 and len(found["examples"]) == 3
    assert all(e["teacher"] == e["student"] != "" for e in found["examples"])


def test_a_penalty_of_the_models_own_settings_is_left_out(tiny_tokenizer: Any) -> None:
    teacher = tiny_model(tiny_spec())
    settings = teacher.generation_config
    settings.repetition_penalty, settings.max_length = 1.7, 5
    found = generation_agreement(teacher, teacher, tiny_tokenizer, tokens(3, 9), 12)
    assert found["followed_share"] == 1.0 and found["common_prefix"] == 12
    assert teacher.generation_config is settings


@torch.inference_mode()
def test_disagreement_is_counted_token_by_token(tiny_tokenizer: Any) -> None:
    spec = tiny_spec()
    teacher, student = tiny_model(spec), tiny_model(spec, ["gdn", "full", "gdn"], seed=0)
    prompts = tokens(4, 6)
    found = generation_agreement(teacher, student, tiny_tokenizer, prompts, 5)
    prefixes, equal, followed = [], [], []
    for prompt in prompts:
        texts = []
        for model in (teacher, student):
            ids = prompt.tolist()
            for _ in range(5):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            texts.append(ids[6:])
        target = texts[0]
        same = [a == b for a, b in zip(*texts, strict=True)]
        prefixes.append(same.index(False) if False in same else 5)
        equal.append(sum(same) / 5)
        whole = torch.tensor([prompt.tolist() + target])
        choice = student(input_ids=whole).logits[0, 5:-1].argmax(-1).tolist()
        followed.append(sum(a == b for a, b in zip(choice, target, strict=True)) / 5)
    assert found["common_prefix"] == pytest.approx(sum(prefixes) / 4)
    assert found["equal_share"] == pytest.approx(sum(equal) / 4)
    assert found["followed_share"] == pytest.approx(sum(followed) / 4)


def test_text_after_the_end_token_does_not_count(tiny_tokenizer: Any) -> None:
    teacher = tiny_model(tiny_spec())
    prompt = tokens(1, 6)
    first = int(teacher(input_ids=prompt).logits[0, -1].argmax())
    teacher.generation_config.eos_token_id = first
    found = generation_agreement(teacher, teacher, tiny_tokenizer, prompt, 7)
    assert found["common_prefix"] == 1 and found["equal_share"] == 1.0
    assert found["equal_share_stderr"] is None


def test_no_prompts_is_no_error(tiny_tokenizer: Any) -> None:
    teacher = tiny_model(tiny_spec())
    found = generation_agreement(teacher, teacher, tiny_tokenizer, tokens(0, 6), 7)
    assert found["prompts"] == 0 and found["equal_share"] is None and found["examples"] == []


def test_cache_bytes_are_counted_from_the_architecture() -> None:
    spec = tiny_spec()  # 2 kv heads of 12, 4 heads
    full, linear = tiny_model(spec), tiny_model(spec, ["gdn"] * 3)
    per_token = 3 * 2 * 2 * 12 * 4
    state = 3 * (4 * 12 * 12 + 3 * 4 * 12 * 3) * 4  # S [H, K, V] and the last 3 inputs of q, k, v
    for model, expected in ((full, [42, 72]), (linear, None)):
        found = decode_speed(model, [40, 70, 1000], steps=2)
        assert [point["context"] for point in found] == [40, 70]  # 1000 is beyond its positions
        assert all(point["ms_per_token"] > 0 for point in found)
        sizes = [point["cache_bytes"] for point in found]
        assert sizes == ([per_token * n for n in expected] if expected else [state, state])


def test_a_window_bounds_the_cache() -> None:
    model = tiny_model(tiny_spec(), ["window"] * 3, window_tokens=8)
    sizes = {point["cache_bytes"] for point in decode_speed(model, [40, 70], steps=1)}
    assert len(sizes) == 1


def test_shared_storage_is_counted_once() -> None:
    class Layer:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys, self.values, self.more = keys, keys[:2], {"state": [keys.clone()]}

    class Cache:
        layers = (Layer(torch.zeros(4, 5)),)

    assert cache_bytes(Cache()) == 2 * 4 * 5 * 4
