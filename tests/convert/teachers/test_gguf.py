"""GGUF files, written here with llama.cpp's conventions from a known model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf
from tiny_hf import random_ids, tiny_hf
from transformers import PreTrainedTokenizerFast

from ltconvert.convert.teachers.gguf_file import GGUFFile
from ltconvert.convert.teachers.load import describe_teacher, load_teacher
from ltconvert.convert.teachers.tokenizers import cache_folder
from ltconvert.errors import UserError

IDS = random_ids()
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
CASES = {
    "llama": {"head_dim": 12},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7, **CAPS},
    "gemma2-default": {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7},
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "num_hidden_layers": 7,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_model_it_was_written_from(case: str, tmp_path: Path) -> None:
    oracle = tiny_hf(case.partition("-")[0], **CASES[case])
    path = tmp_path / "tiny.gguf"
    write_gguf(oracle, path)
    teacher = load_teacher(str(path))
    with torch.no_grad():
        difference = teacher.model(IDS).logits - oracle(IDS).logits
    assert difference.abs().max() < 1e-4
    assert teacher.tokenizer is None
    assert any("dequantised" in remark for remark in teacher.remarks)


@pytest.mark.parametrize("pattern", [2, [True, False, True, False]])
def test_windows_and_their_rope_base_are_read(pattern: int | list[bool], tmp_path: Path) -> None:
    ropes = {"full_attention": 1e6, "sliding_attention": 50.0}
    oracle = tiny_hf(
        "gemma3_text",
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={k: {"rope_type": "default", "rope_theta": v} for k, v in ropes.items()},
    )
    path = tmp_path / "tiny.gguf"
    settings = {"rope.freq_base_swa": 50.0, "attention.sliding_window_pattern": pattern}
    write_gguf(oracle, path, settings=settings)
    with torch.no_grad():
        difference = load_teacher(str(path)).model(IDS).logits - oracle(IDS).logits
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.scale", 0.3), ("attention.causal", False), ("rope.scaling.yarn_beta_fast", 16.0)],
)
def test_what_is_not_computed_is_refused(key: str, value: bool | float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_hf("llama"), path, settings={key: value})
    with pytest.raises(UserError, match=key) as caught:
        describe_teacher(str(path))
    assert "\n" not in str(caught.value)


def test_quantised_blocks_are_decoded(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "tiny.gguf"
    oracle = tiny_hf("llama")
    quantised = write_gguf(oracle, path, tiny_tokenizer, quantise=True)
    state = load_teacher(str(path)).model.state_dict()
    for name, value in quantised.items():
        layer = name.split(".")[1]
        ours = state[f"model.layers.{layer}.mlp.gate_proj.weight"]
        assert torch.equal(ours, torch.from_numpy(value))
        assert not torch.equal(ours, oracle.model.layers[int(layer)].mlp.gate_proj.weight)


def test_tokenizer_is_kept_and_equal(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_hf("llama"), path, tiny_tokenizer)
    teacher = load_teacher(str(path))
    assert teacher.spec.bos_token_id == 1
    assert teacher.model.generation_config.eos_token_id == 2
    first = teacher.tokenizer
    kept = list((cache_folder() / "tokenizers").iterdir())
    assert [entry.name for entry in kept] == [GGUFFile(path).header_digest[:32]]
    second = load_teacher(str(path)).tokenizer
    text = "<|im_start|>user\nHello there!<|im_end|>"
    assert first(text).input_ids == second(text).input_ids
    assert first.decode(first(text).input_ids) == second.decode(second(text).input_ids) == text
    assert first.chat_template == second.chat_template == tiny_tokenizer.chat_template


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_hf("llama"), path, tiny_tokenizer)
    assert load_teacher(str(path)).tokenizer is not None


def test_describe_reads_the_header_alone(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "tiny.gguf"
    oracle = tiny_hf("qwen2")
    write_gguf(oracle, path, tiny_tokenizer)
    with path.open("r+b") as file:  # the tensors are gone, the header is whole
        file.truncate(GGUFFile(path).tensors["token_embd.weight"].start)
    spec, facts = describe_teacher(str(path))
    assert spec.qkv_bias and spec.num_layers == 4
    assert facts["kind"] == "gguf"
    assert facts["parameters"] == sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize("keep", [2, 20, 3000, -5000])
def test_truncated_file(keep: int, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_hf("llama"), path, tiny_tokenizer)
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(UserError, match=r"not a GGUF file|broken or incomplete") as caught:
        load_teacher(str(path))
    assert "\n" not in str(caught.value)


def test_scaled_frequencies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    extra = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    write_gguf(tiny_hf("llama"), path, extra_tensors=extra)
    with pytest.raises(UserError, match="rope_freqs"):
        describe_teacher(str(path))


def test_unknown_architecture(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"'mamba' is not supported.*llama, qwen2"):
        load_teacher(str(path))
