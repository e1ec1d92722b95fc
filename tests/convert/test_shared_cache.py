"""Loops that look at the last loop's keys while decoding, against mixers that run uncached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dreamer_case import released
from helpers import covering, tiny_model, tiny_spec, tokens
from loop_case import NEW, OPTIONS, PROMPT, ROWS, SAMPLING, decoded, looped, naive, padded

from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.students.shared_cache import owners
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.errors import UserError

SHARING = ["full", "hybrid"]
LAST = {"loop_cache": "last"}


@pytest.mark.parametrize("threshold", [None, 0.4])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("mixers", SHARING)
def test_every_loop_sees_the_last_ones_keys_beside_its_own_token(
    mixers: str, options: dict[str, Any], threshold: float | None
) -> None:
    """Alone, and with tokens that leave their loops early."""
    model, ids = looped(mixers, **options), tokens(ROWS, PROMPT + NEW)
    given = {} if threshold is None else {"threshold": threshold}
    expected, loops = naive(model, ids, last_of_full=True, **given)
    found, found_loops = decoded(model, ids, threshold, "last")
    assert found_loops == loops[PROMPT:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    own, _ = decoded(model, ids, threshold)
    assert torch.equal(own[:, :PROMPT], found[:, :PROMPT])  # a prompt comes to no harm
    assert not torch.allclose(own[:, PROMPT + 1 :], found[:, PROMPT + 1 :], atol=1e-3)


@pytest.mark.parametrize(
    ("mixers", "options", "threshold"),
    covering(["full", "hybrid", "full of qwen3"], OPTIONS[:3], [None, 0.4]),
    ids=str,
)
def test_the_fast_path_and_a_static_cache_do_the_same(
    mixers: str, options: dict[str, Any], threshold: float | None
) -> None:
    """A prompt longer than the Decoder's usual chunks is still read in one pass."""
    mixers, _, family = mixers.partition(" of ")
    model = looped(mixers, family or "ouro", **options)
    whole = model.generate(**padded(), exit_threshold=threshold, **LAST, **SAMPLING)
    static = StaticCache.for_model(model, 3, 11 + NEW, "last")
    again = model.generate(**padded(), exit_threshold=threshold, **SAMPLING, **{CACHE_NAME: static})
    assert torch.equal(again, whole)
    decoder = Decoder(model, 3, 11 + NEW, prefill_tokens=4, exit_threshold=threshold, **LAST)
    for _ in range(2):
        found = decoder.generate(**padded(), max_new_tokens=NEW)
        assert torch.equal(found, whole[:, 11:])


@pytest.mark.parametrize("loops", [2, 4])
def test_keys_take_a_share_of_the_memory(loops: int) -> None:
    model = looped("full", loops=loops).float()
    sizes = [StaticCache.for_model(model, 2, 32, kind).nbytes for kind in ("own", "last")]
    assert sizes[0] == loops * sizes[1]
    cache = model.new_cache("last")
    model(tokens(2, 9), cache=cache)
    kept = {layer.keys.data_ptr() for layer in cache.layers}
    assert len(cache.layers) == 3 * loops and len(kept) == 3


def test_windows_and_states_stay_each_loops_own() -> None:
    model = looped("hybrid", loops=3)  # gdn, full, window
    found = [type(layer).__name__ for layer in model.new_cache("last").layers]
    assert [name == "EarlierLoop" for name in found] == [s % 3 == 1 and s < 6 for s in range(9)]


def test_beams_move_with_their_keys() -> None:
    """A beam's tokens score as they do when they are decoded one after the other."""
    model, ids = looped("full", loops=2), tokens(1, PROMPT)
    found = model.generate(
        ids, num_beams=3, max_new_tokens=NEW, do_sample=False, pad_token_id=0, length_penalty=0.0,
        return_dict_in_generate=True, output_scores=True, **LAST,
    )  # fmt: skip
    logits, _ = decoded(model, found.sequences, None, "last")
    chosen = found.sequences[0, PROMPT:]
    steps = logits[0, PROMPT - 1 : -1].log_softmax(-1).gather(-1, chosen[:, None])
    assert float(found.sequences_scores[0]) == pytest.approx(float(steps.sum()), rel=1e-4)


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been() -> None:
    model, ids = looped("full"), tokens(1, PROMPT + 4)
    with torch.no_grad():
        straight, other = model.new_cache("last"), model.new_cache("last")
        for cache in (straight, other):
            model(ids[:, :PROMPT], cache=cache)
        model(ids[:, -3:], cache=other)
        other.crop(-3)
        assert other.get_seq_length() == other.layers[0].get_seq_length() == PROMPT
        found = [model(ids[:, PROMPT : PROMPT + 1], cache=c).logits for c in (straight, other)]
    assert torch.equal(*found)


def test_own_is_the_default() -> None:
    model, ids = looped("full"), tokens(2, PROMPT)
    plain = model.generate(ids, **SAMPLING)
    assert torch.equal(model.generate(ids, loop_cache="own", **SAMPLING), plain)


@pytest.mark.parametrize(
    ("mixers", "loops", "message"),
    [
        ("full", 1, "has one loop"),
        ("gdn", 4, "loops no layer with full attention"),
        ("gdn_window", 2, "windows, recurrent states and chosen keys stay each loop's own"),
        ("window", 2, "loops no layer with full attention"),
    ],
)
def test_where_nothing_can_be_shared_one_line_says_so(
    mixers: str, loops: int, message: str
) -> None:
    model = looped(mixers, loops=loops)
    for call in (
        lambda: model.new_cache("last"),
        lambda: model.generate(tokens(1, 3), **LAST, **SAMPLING),
        lambda: Decoder(model, 1, 8, **LAST),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_another_word_is_refused_with_those_that_are_known() -> None:
    model = tiny_model(tiny_spec("ouro"))
    with pytest.raises(UserError, match="'first'; choose one of own, last"):
        model.new_cache("first")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cuda_graph_shares_as_single_launches_do(rows: int, dtype: torch.dtype) -> None:
    model = looped("hybrid").to("cuda", dtype)
    ids = tokens(rows, PROMPT).cuda()
    graph, eager = (Decoder(model, rows, PROMPT + NEW, graph=g, **LAST) for g in (True, False))
    expected = eager.generate(ids, max_new_tokens=NEW)
    for _ in range(2):
        assert torch.equal(graph.generate(ids, max_new_tokens=NEW), expected)
    if dtype == torch.float32:
        assert torch.equal(model.generate(ids, **LAST, **SAMPLING)[:, PROMPT:].cpu(), expected)


def test_a_loop_that_skips_attention_has_no_keys_to_share() -> None:
    """Of three layers and four loops: the last visits of layer 2, and one of layer 1 between."""
    model = released("ouro", skipped_attention=[4, 8, 11])
    assert owners(model.config, "last") == [9, 10, 5, 9, 4, 5, 9, 10, 8, 9, 10, 11]
    whole = model.generate(**padded(), **LAST, **SAMPLING)
    decoder = Decoder(model, 3, 11 + NEW, **LAST)
    assert torch.equal(decoder.generate(**padded(), max_new_tokens=NEW), whole[:, 11:])
