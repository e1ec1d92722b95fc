"""A cache allocated once gives what a growing one gives, and stays where it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.students.static_layers import tensors_of

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
SMALL = {"window_tokens": 5, "top_k_tokens": 6, "block_tokens": 2, "chosen_blocks": 2}


def model_of(family: str, mixers: str, loops: int = 2, **options: Any) -> Any:
    spec = tiny_spec(family, num_loops=loops)
    return tiny_model(spec, MIXERS[mixers], **SMALL, **options)


def padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of those lengths, padded at the left, and their mask."""
    width = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :], mask[row, width - length :] = tokens(1, length, seed=length), 1
    return ids, mask


@pytest.mark.parametrize("mixers", list(MIXERS))
@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
def test_forward_passes_are_those_of_a_growing_cache(family: str, mixers: str) -> None:
    model = model_of(family, mixers).double()
    ids, mask = padded((19, 4, 11))
    static, growing = StaticCache.for_model(model, 3, 19), model.new_cache()
    with torch.no_grad():
        start = 0
        for piece in ids.split([7, 1, 8, 1, 2], dim=1):
            start += piece.shape[1]
            logits = [
                model(piece, attention_mask=mask[:, :start], cache=cache).logits
                for cache in (static, growing)
            ]
            seen = mask[:, start - piece.shape[1] : start].bool()
            torch.testing.assert_close(logits[0][seen], logits[1][seen], atol=1e-10, rtol=1e-10)
    assert static.get_seq_length() == 19


@pytest.mark.parametrize("mixers", list(MIXERS))
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_takes_it(mixers: str, options: dict[str, Any]) -> None:
    model = model_of("ouro", mixers)
    ids, mask = padded((6, 3))
    call = {"attention_mask": mask, "max_new_tokens": 7, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, **call, **options)
    cache = StaticCache.for_model(model, 2 * options.get("num_beams", 1), 13)
    found = model.generate(ids, past_key_values=cache, **call, **options)
    assert found.tolist() == expected.tolist()


def test_a_static_cache_by_name_is_refused_in_one_line() -> None:
    """A line that names ours, with what to pass it as."""
    with pytest.raises(ValueError, match=rf"pass as {CACHE_NAME} StaticCache.for_model") as caught:
        model_of("llama", "full").generate(tokens(1, 3), cache_implementation="static")
    assert StaticCache.__module__ in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mixers", ["full", "gdn", "gdn_window", "hybrid"])
@pytest.mark.parametrize("kind", [transformers.StaticCache, transformers.DynamicCache])
def test_caches_of_transformers_are_refused_in_one_line(mixers: str, kind: Any) -> None:
    """They can be made, from what the config says of windows; no forward pass takes them."""
    model, ids = model_of("ouro", mixers), tokens(1, 3)
    options = {"max_cache_len": 8} if kind is transformers.StaticCache else {}
    for call in (model, partial(model.generate, max_new_tokens=1)):
        cache = {CACHE_NAME: kind(config=model.config, **options)}
        with pytest.raises(ValueError, match=r"model.new_cache\(\)") as caught:
            call(ids, **cache)
        assert StaticCache.__module__ in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [1, 3, 5, 40])
def test_settled_rows_begin_at_slot_0(window: int) -> None:
    """A token p of a row stands in slot p, or p modulo the window."""
    spec = tiny_spec("llama", num_layers=2, layer_rope=("default",) * 2, layer_windows=(None,) * 2)
    model = tiny_model(spec, ["full", "window"], window_tokens=window)
    lengths = (9, 2, 6)
    ids, mask = padded(lengths)
    cache = StaticCache.for_model(model, 3, 12)
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
        cache.settle([9 - length for length in lengths])
        assert cache.lengths_B.tolist() == list(lengths)
        for row, length in enumerate(lengths):
            alone = model.new_cache()
            model(ids[row : row + 1, 9 - length :], cache=alone)
            full, ring = cache.layers
            torch.testing.assert_close(full.keys[row, :, :length], alone.layers[0].keys[0])
            recent = range(max(0, length - window + 1), length)
            slots = [p % ring.slots for p in recent]
            torch.testing.assert_close(ring.values[row, :, slots], alone.layers[1].values[0])


def test_nothing_is_allocated_twice() -> None:
    model = model_of("ouro", "hybrid")
    cache = StaticCache.for_model(model, 1, 20)
    places = [t.data_ptr() for layer in cache.layers for t in tensors_of(layer)]
    with torch.no_grad():
        for _ in range(2):
            model(tokens(1, 9), cache=cache)
            model(tokens(1, 1), cache=cache)
            again = model(tokens(1, 3), cache=cache).logits
            cache.reset()
    fresh = model.new_cache()
    with torch.no_grad():
        for count in (9, 1):
            model(tokens(1, count), cache=fresh)
        torch.testing.assert_close(again, model(tokens(1, 3), cache=fresh).logits)
    assert places == [t.data_ptr() for layer in cache.layers for t in tensors_of(layer)]
    width, kv = 4 * 12, 4 * 12
    states = 4 * (width * 12 + 3 * width * 3)
    assert cache.nbytes == 2 * (states + 2 * 4 * kv * 20 + 2 * 4 * kv * 5)


def test_it_is_made_for_no_gradient_mode_and_survives_inference_mode() -> None:
    model = model_of("llama", "hybrid")
    with torch.inference_mode():
        cache = StaticCache.for_model(model, 1, 8)
        model(tokens(1, 3), cache=cache)
    with torch.no_grad():
        model(tokens(1, 3), cache=cache)
    assert cache.num_tokens == 6


@pytest.mark.parametrize(
    ("rows", "count", "message"), [(1, 9, "larger max_length"), (2, 3, "has 1 rows, got 2")]
)
def test_what_does_not_fit_is_one_line(rows: int, count: int, message: str) -> None:
    model = model_of("llama", "full")
    with pytest.raises(ValueError, match=message) as caught:
        model(tokens(rows, count), cache=StaticCache.for_model(model, 1, 8))
    assert "\n" not in str(caught.value)


def test_a_settled_cache_takes_no_forward_pass() -> None:
    model, ids = model_of("llama", "gdn"), tokens(1, 3)
    cache = StaticCache.for_model(model, 1, 8)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.settle([0])
        with pytest.raises(ValueError, match="settled for one-token steps"):
            model(ids, cache=cache)
        cache.reset()
        model(ids, cache=cache)
