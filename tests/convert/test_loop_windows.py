"""Windows that grow from loop to loop: ``window_tokens`` as a list."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.mixers.attention import WindowAttention
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.transfer import build_student

WINDOWS = [2, 5, 3, 9]
NEAR = {"atol": 1e-5, "rtol": 1e-5}  # models run in fp64, RoPE tables are fp32
VARIANTS: list[dict[str, Any]] = [
    {},
    {"prelude_layers": 1, "coda_layers": 1},
    {"tied_rank": 2},
]


def student(windows: Any = WINDOWS, tied_rank: int | None = None, **options: Any) -> LT2ForCausalLM:
    spec = tiny_spec("ouro", num_loops=4, tied_rank=tied_rank)
    return tiny_model(spec, ["window", "gdn", "window"], window_tokens=windows, **options).double()


@torch.no_grad()
def logits_of(model: LT2ForCausalLM, ids_BT: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(ids_BT, **options).logits


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_each_visit_is_that_of_a_model_with_its_window(options: dict[str, Any]) -> None:
    model, ids = student(**options), tokens(2, 14)
    others = [student(window, **options) for window in WINDOWS]  # same seed, same weights
    with torch.no_grad():
        h_BTC = model.model.embed(ids)
        context = model.model.context(h_BTC)
        state = model.model.start(h_BTC)
        for step in model.model.schedule:
            state = others[step.loop].model.visit(step, state, context)
        expected = model.logits(model.model.finish(state).h_BTC)
    torch.testing.assert_close(logits_of(model, ids), expected, atol=0, rtol=0)
    assert not torch.allclose(expected, logits_of(others[3], ids))


def test_reach_is_the_sum_over_visits() -> None:
    """A visit looks back w - 1 tokens; what lies further back has a gradient of exactly 0."""
    spec = tiny_spec("ouro", num_loops=4)
    model = tiny_model(spec, ["window"] * 3, window_tokens=WINDOWS).double()
    reach = 1 + 3 * sum(window - 1 for window in WINDOWS)
    inputs_BTC = model.model.embed(tokens(1, reach + 4)).detach().requires_grad_(True)
    model.model(inputs_embeds=inputs_BTC).last_hidden_state[0, -1, 0].backward()
    touched_T = (inputs_BTC.grad[0] != 0).any(-1)
    assert touched_T.tolist() == [False] * 4 + [True] * reach


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_cached_padded_and_packed_rows_are_the_plain_ones(options: dict[str, Any]) -> None:
    model, ids = student(**options), tokens(1, 16)
    whole = logits_of(model, ids)
    cache = model.new_cache()
    pieces = [logits_of(model, x, cache=cache) for x in ids.split([6, 4, *[1] * 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **NEAR)
    padded, mask = torch.zeros(2, 1, 19, dtype=torch.long)
    padded[:, 3:], mask[:, 3:] = ids, 1
    found = logits_of(model, padded, attention_mask=mask)[:, 3:]
    torch.testing.assert_close(found, whole, **NEAR)
    cuts = (0, 7, 8, 16)
    segments = torch.bucketize(torch.arange(16), torch.tensor(cuts[1:]), right=True)[None]
    packed = logits_of(model, ids, segment_ids=segments)
    for start, stop in pairwise(cuts):
        alone = logits_of(model, ids[:, start:stop])
        torch.testing.assert_close(packed[:, start:stop], alone, **NEAR)


@pytest.mark.parametrize("threshold", [None, 0.6])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_decoder_and_a_reloaded_model_generate_the_same(
    options: dict[str, Any], threshold: float | None, tmp_path: Path
) -> None:
    model, ids = student(**options), tokens(2, 6)
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, exit_threshold=threshold, **given)[:, 6:]
    save_student(model, None, tmp_path / "student", {})
    again = load_student(tmp_path / "student", dtype=torch.float64)
    assert again.config.window_tokens == WINDOWS
    decoder = Decoder(again, 2, 18, exit_threshold=threshold)
    assert torch.equal(decoder.generate(ids, max_new_tokens=12), expected)


def test_caches_are_as_large_as_the_window_of_their_visit() -> None:
    spec = tiny_spec("ouro", num_loops=4)
    model = tiny_model(spec, ["window", "full", "window"], window_tokens=WINDOWS)
    width = 2 * 4 * 12 * 4  # bytes of a key and a value in fp32
    static = StaticCache.for_model(model, 1, 40)
    assert [layer.keys.shape[2] for layer in static.layers] == [
        size for window in WINDOWS for size in (window, 40, window)
    ]
    growing = model(tokens(1, 40), use_cache=True)[CACHE_NAME]
    assert [layer.keys.shape[2] for layer in growing.layers] == [
        size for window in WINDOWS for size in (window - 1, 40, window - 1)
    ]
    facts = model_facts(model.config, cache_dtype=torch.float32)
    kept = 2 * sum(window - 1 for window in WINDOWS)
    assert facts.cache_bytes(40) == width * (kept + 4 * 40)
    assert facts.cache_bytes(3) == width * (2 * (1 + 3 + 2 + 3) + 4 * 3)
    assert facts.constant_bytes == width * kept
    assert facts.layers[0].windows == tuple(WINDOWS)


def test_windows_that_cover_the_row_are_the_teacher() -> None:
    teacher, ids = tiny_model(tiny_spec("ouro")), tokens(2, 11)
    kept = build_student(teacher, ["window"] * 3, {"window_tokens": [11, 12, 13, 14]})
    torch.testing.assert_close(logits_of(kept, ids), logits_of(teacher, ids), **NEAR)


def test_a_window_of_the_teacher_is_not_widened() -> None:
    spec = tiny_spec("gemma2", num_loops=2)  # 7 tokens in layers 0 and 2
    config = LT2Config.from_spec(spec, ["window"] * 3, window_tokens=[4, 16])
    assert [config.window(layer, loop) for loop in (0, 1) for layer in range(3)] == [
        4, 4, 4, 7, 16, 7,
    ]  # fmt: skip
    mixer = LT2ForCausalLM(config).model.layers[0].mixer
    assert isinstance(mixer, WindowAttention) and mixer.windows == (4, 7)


@pytest.mark.parametrize(
    ("mixers", "windows", "message"),
    [
        (["window"] * 3, [4, 8], "window_tokens has 2 windows for 4 loops; give one a loop"),
        (["full", "gdn_window", "nsa"], WINDOWS, "beside the window in gdn_window mixers"),
        (["full", "window", "nsa"], WINDOWS, "beside the window in nsa mixers"),
    ],
)
def test_what_does_not_fit_is_one_line(mixers: list[str], windows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LT2Config.from_spec(tiny_spec("ouro"), mixers, window_tokens=windows)
