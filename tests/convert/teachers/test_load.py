"""Loading folders and hub ids: every form of checkpoint, every mistake in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import random_ids, tiny_hf
from transformers import PreTrainedTokenizerFast

from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.teachers.load import describe_teacher, load_teacher
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError

IDS = random_ids(length=12)


def saved(folder: Path, model_type: str = "llama", **changes: Any) -> torch.Tensor:
    """A tiny checkpoint in the folder; returns the oracle's logits on IDS."""
    model = tiny_hf(model_type, **changes)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_teacher(str(folder)).model(IDS).logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


def message(reference: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        load_teacher(str(reference))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_safetensors(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        assert (logits(tmp_path) - model(IDS).logits).abs().max() < 1e-4
    next(iter(tmp_path.glob("model-*.safetensors"))).unlink()
    assert "download is not complete" in message(tmp_path)


def test_pytorch_format(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    assert (logits(tmp_path) - expected).abs().max() < 1e-4
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    assert "broken or incomplete" in message(tmp_path)


def test_derived_frequencies_are_ignored(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(tmp_path, lambda state: state.update({name: torch.ones(4)}))
    assert (logits(tmp_path) - expected).abs().max() < 1e-4


def test_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    expected = saved(tmp_path, tie_word_embeddings=True)

    def store(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    edit_weights(tmp_path, store)
    teacher = load_teacher(str(tmp_path))
    assert teacher.spec.tie_word_embeddings
    assert teacher.model.head_weight is teacher.model.model.embed_tokens.weight
    with torch.no_grad():
        assert (teacher.model(IDS).logits - expected).abs().max() < 1e-4


def test_a_stored_head_that_differs_wins_over_the_tie(tmp_path: Path) -> None:
    expected = saved(tmp_path, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    teacher = load_teacher(str(tmp_path))
    assert not teacher.spec.tie_word_embeddings
    assert not teacher.model.config.tie_word_embeddings
    with torch.no_grad():
        assert (teacher.model(IDS).logits - expected).abs().max() < 1e-4


def test_frozen_and_in_the_wanted_dtype(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    teacher = load_teacher(str(tmp_path), dtype=torch.bfloat16)
    parameters = list(teacher.model.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert not any(p.requires_grad for p in parameters)
    assert not teacher.model.training
    with torch.no_grad():
        found = teacher.model(IDS).logits.float()
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_digest_names_the_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    first = load_teacher(str(tmp_path))
    assert load_teacher(str(tmp_path), dtype=torch.bfloat16).digest == first.digest

    def change(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.2.mlp.up_proj.weight"] *= 1.01

    edit_weights(tmp_path, change)
    assert load_teacher(str(tmp_path)).digest != first.digest


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(tmp_path, lambda state: state.pop(name))
    assert "model.layers.1.mixer.k_proj.weight" in message(tmp_path)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_weights(tmp_path, lambda state: state.pop("lm_head.weight"))
    assert "lm_head.weight" in message(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight"]
)
def test_tensor_without_a_place_is_named(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_weights(tmp_path, lambda state: state.update({name: torch.zeros(32)}))
    assert name.replace("self_attn", "mixer") in message(tmp_path)


def test_tensor_of_another_format_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_weights(tmp_path, lambda state: state.update({"score.weight": torch.zeros(2)}))
    assert "score.weight" in message(tmp_path)


def test_tensor_stored_twice(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    state = {**load_file(second), **load_file(first)}
    save_file(state, second, metadata={"format": "pt"})
    assert "twice" in message(tmp_path)


def test_shape_mismatch(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, vocab_size=101)
    assert "(97, 32), the config says (101, 32)" in message(tmp_path)


def test_quantised_tensor(tmp_path: Path) -> None:
    saved(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"

    def quantise(state: dict[str, torch.Tensor]) -> None:
        state[name] = state[name].to(torch.int8)

    edit_weights(tmp_path, quantise)
    assert "int8" in message(tmp_path)


@pytest.mark.parametrize("keep", [4, 900, -4000])
def test_truncated_safetensors(keep: int, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "broken or incomplete" in message(tmp_path)


def test_broken_or_missing_config(tmp_path: Path) -> None:
    assert "config.json is missing" in message(tmp_path)
    (tmp_path / "run" / "student").mkdir(parents=True)
    (tmp_path / "run" / "student" / "config.json").write_text("{}")
    assert f"; {tmp_path / 'run' / 'student'} is one" in message(tmp_path / "run")
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "not valid JSON" in message(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "expected a JSON object" in message(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights" in message(tmp_path)


def test_unknown_reference() -> None:
    assert "smollm2-135m" in message("smollm2-135")
    assert "no GGUF file" in message("nowhere/x.gguf")
    assert "expected a model folder" in message("./nowhere")


def test_hub_offline_is_one_line() -> None:
    assert "cannot get 'someone/some-model' from the hub: HF_HUB_OFFLINE" in message(
        "someone/some-model"
    )


def test_hub_records_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files first; weights only to load, at the commit of the first call."""
    snapshot = tmp_path / "abc123"
    expected = saved(snapshot)
    hidden = tmp_path / "weights"
    (snapshot / "model.safetensors").rename(hidden)
    calls = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo, revision))
        assert not any(pattern.endswith(".py") for pattern in allow_patterns)
        if "model.safetensors" in allow_patterns:
            hidden.rename(snapshot / "model.safetensors")
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _, facts = describe_teacher("someone/some-model", revision="main")
    assert facts["revision"] == "abc123" and facts["kind"] == "hub"
    assert facts["stored_bytes"] is None
    assert calls == [("someone/some-model", "main")]
    teacher = load_teacher("someone/some-model")
    assert calls[1:] == [("someone/some-model", None), ("someone/some-model", "abc123")]
    assert (teacher.name, teacher.source) == ("some-model", "someone/some-model")
    assert teacher.revision == "abc123"
    with torch.no_grad():
        assert (teacher.model(IDS).logits - expected).abs().max() < 1e-4


def test_hub_refuses_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "model.safetensors" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "mixture of experts" in message("someone/some-moe")


def test_describe_needs_no_weights(tmp_path: Path) -> None:
    model = tiny_hf("qwen3", tie_word_embeddings=True, head_dim=12)
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    spec, facts = describe_teacher(str(tmp_path))
    assert spec.qk_norm == "head"
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["stored_bytes"] == size
    assert facts["cache_bytes_per_token"] == 4 * 2 * 12 * 2 * 2
    (tmp_path / "model.safetensors").unlink()
    assert describe_teacher(str(tmp_path))[1]["stored_bytes"] is None


def test_a_student_is_a_teacher_too(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "gemma3_text", head_dim=12)
    first = load_teacher(str(tmp_path / "hf"))
    save_student(first.model, None, tmp_path / "lt2", {})
    second = load_teacher(str(tmp_path / "lt2"))
    assert second.spec == first.spec and second.digest == first.digest
    spec, facts = describe_teacher(str(tmp_path / "lt2"))
    assert spec == first.spec and facts["model_type"] == "lt2"
    with torch.no_grad():
        assert torch.equal(second.model(IDS).logits, first.model(IDS).logits)


def test_a_hybrid_student_is_described_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path / "hf")
    teacher = load_teacher(str(tmp_path / "hf"))
    student = build_student(teacher.model, ["gdn", "full", "gdn", "gdn"])
    save_student(student, None, tmp_path / "lt2", {})
    _, facts = describe_teacher(str(tmp_path / "lt2"))
    assert facts["parameters"] == sum(p.numel() for p in student.parameters())
    assert facts["cache_bytes_per_token"] == 1 * 2 * 8 * 2 * 2  # one full layer is left
    assert set(load_teacher(str(tmp_path / "lt2")).model.config.mixers) == {"gdn", "full"}


def test_generation_settings_come_along(tmp_path: Path) -> None:
    saved(tmp_path)
    settings = {"eos_token_id": [5, 2], "do_sample": True, "temperature": 0.7}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    teacher = load_teacher(str(tmp_path))
    generation = teacher.model.generation_config
    assert generation.eos_token_id == [5, 2] == teacher.spec.eos_token_id
    assert generation.temperature == 0.7
    assert generation.pad_token_id == 0


def test_generation_settings_that_cannot_be_saved_are_dropped(tmp_path: Path) -> None:
    """Published files hold a temperature with sampling off; transformers refuses to save that."""
    saved(tmp_path)
    settings = {"do_sample": False, "temperature": 0.7, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    teacher = load_teacher(str(tmp_path))
    assert teacher.model.generation_config.eos_token_id == 5
    save_student(teacher.model, None, tmp_path / "lt2", {})


def test_padded_vocabulary(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    saved(tmp_path, vocab_size=128)
    tiny_tokenizer.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert len(teacher.tokenizer) == 97 and teacher.spec.vocab_size == 128
    assert teacher.remarks == ()


def test_tokenizer_larger_than_the_embedding(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_hf("llama", vocab_size=90)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert "ids go up to 96, the embedding has 90 rows" in message(tmp_path)


def test_an_added_token_past_the_embedding_is_a_remark(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    saved(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert any("<image>" in remark for remark in teacher.remarks)


def test_no_tokenizer_is_a_remark(tmp_path: Path) -> None:
    saved(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert teacher.tokenizer is None
    assert any("tokenizer" in remark for remark in teacher.remarks)


def test_broken_tokenizer(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    saved(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    assert "tokenizer" in message(tmp_path)
