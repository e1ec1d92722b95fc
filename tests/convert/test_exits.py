"""Early exit while decoding, against mixers that run uncached over everything they ever read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import FAMILIES, covering, diagonal, tiny_model, tiny_spec, tokens
from loop_case import MIXERS, NEW, OPTIONS, PROMPT, ROWS, SAMPLING, decoded, looped, naive, padded

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.exits import exit_probabilities
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError


@pytest.mark.parametrize(
    ("mixers", "options", "threshold"), covering(list(MIXERS), OPTIONS, [0.0, 0.6]), ids=str
)
def test_later_tokens_find_what_skipped_loops_took_in(
    mixers: str, options: dict[str, Any], threshold: float
) -> None:
    model, ids = looped(mixers, **options), tokens(ROWS, PROMPT + NEW)
    expected, loops = naive(model, ids, threshold)
    found, found_loops = decoded(model, ids, threshold)
    assert found_loops == loops[PROMPT:]
    if threshold:
        assert len(set(found_loops)) > 1  # tokens of different depths follow each other
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threshold", [0.5])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2"])
def test_every_norm_layout_leaves_where_it_should(family: str, threshold: float) -> None:
    """Gates in families that loop and gate only here: the final norm closes the last loop alone."""
    model, ids = looped("hybrid", family), tokens(ROWS, PROMPT + NEW)
    expected, loops = naive(model, ids, threshold)
    found, found_loops = decoded(model, ids, threshold)
    assert found_loops == loops[PROMPT:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "mixers"), diagonal(OPTIONS[:3], list(MIXERS), each=1), ids=str
)
def test_threshold_one_is_the_plain_path(mixers: str, options: dict[str, Any]) -> None:
    """Even where the gate is so sure that its rounded probabilities add up to 1."""
    model, ids = looped(mixers, **options).float(), tokens(ROWS, PROMPT)
    with torch.no_grad():
        model.model.exit_gate.bias.fill_(60.0)
    plain = model.generate(ids, **SAMPLING)
    assert torch.equal(model.generate(ids, exit_threshold=1.0, **SAMPLING), plain)
    assert not torch.equal(model.generate(ids, exit_threshold=0.999, **SAMPLING), plain)
    decoder = Decoder(model, ROWS, PROMPT + NEW, exit_threshold=1.0)
    assert torch.equal(decoder.generate(ids, max_new_tokens=NEW), plain[:, PROMPT:])
    assert decoder.cache.steps == 0


@pytest.mark.parametrize(
    ("mixers", "options", "threshold"),
    covering([*MIXERS, "gdn of qwen3"], OPTIONS, [0.0, 0.4]),
    ids=str,
)
def test_the_fast_path_leaves_where_generate_does(
    mixers: str, options: dict[str, Any], threshold: float
) -> None:
    mixers, _, family = mixers.partition(" of ")
    model = looped(mixers, family or "ouro", **options)
    cache = model.new_cache()
    whole = model.generate(**padded(), exit_threshold=threshold, **SAMPLING, **{CACHE_NAME: cache})
    assert cache.loops == NEW - 1 if threshold == 0 else NEW - 1 < cache.loops < 4 * (NEW - 1)
    decoder = Decoder(model, 3, 11 + NEW, prefill_tokens=4, exit_threshold=threshold)
    for _ in range(2):
        found = decoder.generate(**padded(), max_new_tokens=NEW)
        assert torch.equal(found, whole[:, 11:])
        assert (decoder.cache.steps, decoder.cache.loops) == (NEW - 1, cache.loops)


@pytest.mark.parametrize("mixers", ["full", "gdn_window", "decay", "nsa"])
def test_loops_with_tensors_of_their_own_leave_too(mixers: str) -> None:
    """What a skipped loop takes in was projected by the tensors of the last one computed."""
    model = looped(mixers, "qwen2", tied_rank=3)
    whole = model.generate(**padded(), exit_threshold=0.4, **SAMPLING)
    decoder = Decoder(model, 3, 11 + NEW, exit_threshold=0.4)
    assert torch.equal(decoder.generate(**padded(), max_new_tokens=NEW), whole[:, 11:])
    assert NEW - 1 < decoder.cache.loops < 4 * (NEW - 1)


def calls(model: LT2ForCausalLM, threshold: float | None) -> Counter[str]:
    """How often parts of the layers ran in the steps behind a prompt."""
    found: Counter[str] = Counter()
    parts = [
        (name, module)
        for name, module in model.model.layers[1].named_modules()
        if name in ("mixer.q_proj", "mixer.o_proj", "mlp.down_proj", "pre_mixer_norm")
    ]
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens(1, PROMPT), cache=cache)
        hooks = [
            module.register_forward_hook(lambda *_, name=name: found.update([name]))
            for name, module in parts
        ]
        for token in tokens(1, NEW, seed=3).split(1, dim=1):
            model(token, cache=cache, exit_threshold=threshold)
        for hook in hooks:
            hook.remove()
    return found


@pytest.mark.parametrize("mixers", list(MIXERS))
def test_a_skipped_loop_is_not_computed(mixers: str) -> None:
    model = looped(mixers)
    plain, first = calls(model, None), calls(model, 0.0)
    assert len(plain) == 4
    assert set(plain.values()) == {4 * NEW}
    assert set(first.values()) == {NEW}  # norm, projections and MLP: of the first loop alone
    assert NEW < calls(model, 0.7)["mlp.down_proj"] < 4 * NEW


def test_a_batch_goes_as_deep_as_its_slowest_row() -> None:
    model, ids = looped("hybrid"), tokens(3, PROMPT + 1)
    alone = [decoded(model, row[None], 0.6)[1][0] for row in ids]
    assert len(set(alone)) > 1
    assert decoded(model, ids, 0.6)[1] == [max(alone)]


def test_beams_and_sampling_leave_too() -> None:
    model, ids = looped("hybrid"), tokens(2, PROMPT)
    one = {"max_new_tokens": NEW, "pad_token_id": 0, "exit_threshold": 0.0}
    shallow = build_student(model, MIXERS["hybrid"], {"window_tokens": 4})
    assert model.generate(ids, num_beams=3, do_sample=False, **one).shape == (2, PROMPT + NEW)
    torch.manual_seed(0)
    first = model.generate(ids, do_sample=True, **one)
    torch.manual_seed(0)
    assert torch.equal(shallow.generate(ids, do_sample=True, **one), first)


def test_prompts_and_uncached_passes_go_through_all_loops() -> None:
    model, ids = looped("hybrid"), tokens(2, PROMPT)
    with torch.no_grad():
        expected = model(ids).logits
        for given in ({}, {"use_cache": True}):
            found = model(ids, exit_threshold=0.0, **given)
            assert torch.equal(found.logits, expected)
            assert len(found.loop_states) == 4


def test_a_depth_stream_is_left_with_its_loops_or_not_at_all() -> None:
    """What skipped loops would have written nobody reads, unless layers stand behind the loops."""
    spec, ids = tiny_spec("ouro", num_loops=3), tokens(1, PROMPT)
    inside = tiny_model(spec, ["moda"] * 3).double()
    for threshold in (0.0, 0.6):
        plain = inside.generate(ids, exit_threshold=threshold, **SAMPLING)
        decoder = Decoder(inside, 1, PROMPT + NEW, exit_threshold=threshold)
        assert torch.equal(decoder.generate(ids, max_new_tokens=NEW), plain[:, PROMPT:])
    behind = tiny_model(spec, ["moda"] * 3, coda_layers=1)
    with pytest.raises(UserError, match="layers behind the loops read"):
        behind.generate(ids, exit_threshold=0.6, **SAMPLING)
    with pytest.raises(UserError, match="layers behind the loops read"):
        Decoder(behind, 1, PROMPT + NEW, exit_threshold=0.6)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(UserError, match="give a probability, from 0 to 1"):
        looped("full")(tokens(1, 3), exit_threshold=threshold)


def test_what_a_decoder_cannot_do_is_refused() -> None:
    plain = tiny_model(tiny_spec("llama", num_loops=2))
    with pytest.raises(UserError, match="a llama model has no exit gate"):
        plain.generate(tokens(1, 3), exit_threshold=0.5, **SAMPLING)
    with pytest.raises(UserError, match="a llama model has no exit gate"):
        Decoder(plain, 1, 8, exit_threshold=0.5)
    with pytest.raises(ValueError, match="has no exit gate to average its loops by"):
        plain.expected_logits(plain(tokens(1, 3)))
    for nothing in ({"block_tokens": 0}, {"prefill_tokens": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Decoder(plain, 1, 8, **nothing)
    with pytest.raises(ValueError, match="a CUDA graph cannot branch"):
        Decoder(looped("full"), 1, 8, exit_threshold=0.5, graph=True)
    assert torch.equal(
        plain.generate(tokens(1, 3), exit_threshold=1.0, **SAMPLING),
        plain.generate(tokens(1, 3), **SAMPLING),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_logits_are_a_mean_of_every_loops_own(family: str) -> None:
    model, ids = looped("hybrid", family), tokens(2, PROMPT)
    with torch.no_grad():
        output = model(ids)
        found = model.expected_logits(output)
        gates = torch.sigmoid(output.exit_logits)
        stay, expected = torch.ones(2, PROMPT), torch.zeros_like(output.logits)
        for loop, normed in enumerate(output.loop_states):
            leave = gates[..., loop] if loop < 3 else torch.ones(2, PROMPT)
            expected += (stay * leave)[..., None] * model.logits(normed)
            stay = stay * (1 - leave)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        exit_probabilities(output.exit_logits).sum(-1), torch.ones(2, PROMPT)
    )


def test_the_gate_outlives_conversion_and_saving(tmp_path: Any) -> None:
    teacher = looped("full").float()
    student = build_student(teacher, ["gdn", "full", "window"], {"loops": 3}, dtype=torch.float32)
    save_student(student, None, tmp_path / "student", {})
    kept = load_student(tmp_path / "student").model.exit_gate
    for name, value in teacher.model.exit_gate.state_dict().items():
        assert torch.equal(kept.state_dict()[name], value)


@pytest.mark.gpu
@pytest.mark.parametrize("mixers", list(MIXERS))
def test_on_a_gpu_steps_are_launched_and_leave_as_generate_does(mixers: str) -> None:
    model, ids = looped(mixers).float().cuda(), tokens(ROWS, PROMPT).cuda()
    whole = model.generate(ids, exit_threshold=0.4, **SAMPLING)
    decoder = Decoder(model, ROWS, PROMPT + NEW, exit_threshold=0.4)
    assert not decoder.graph
    assert torch.equal(decoder.generate(ids, max_new_tokens=NEW), whole[:, PROMPT:].cpu())
