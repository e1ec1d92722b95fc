"""A Dreamer on the fast path: the tokens of ``generate()``, and nothing that waits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from decode_case import DEVICE, needs_triton
from dreamer_case import released
from helpers import FAMILIES, diagonal, tiny_model, tiny_spec, tokens

from ltconvert.convert.decode_step import Step
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.dreamer.depths import set_depths
from ltconvert.convert.students.dreamer.shrink import set_top_experts
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.kernels import dispatch

LENGTHS, NEW = (11, 3, 7), 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"slices": 4, "top_experts": 6, "release": 0.4},
    {"parallel": True, "stream_norm": True, "select_by": "scores"},
    {"depth_heads": 0, "shared_size": 0, "top_entries": 1},
    {"slices": 2, "release": 0.0},
    {"slices": 2, "null_entries": 1, "null_experts": 2},
    {"slices": 2, "skipped_attention": [0, 2], "skipped_experts": [1]},
]


def dreamer(
    family: str = "llama", kind: str = "full", release: float = 1.0, **options: Any
) -> LT2ForCausalLM:
    """Random in all of its parts; fp64, so that rounding decides nothing."""
    model = released(family, kind, **options).double()
    layer, generator = model.model.dreamer, torch.Generator().manual_seed(7)
    parts = [layer.attention_router.balance, layer.expert_router.balance]
    parts += [p for name, p in layer.named_parameters() if p.dim() < 2 or "down_proj" in name]
    with torch.no_grad():
        for part in parts:
            part += 0.2 * torch.randn(part.shape, generator=generator)
    layer.set_release(release)
    return model


def prompts() -> dict[str, torch.Tensor]:
    """Rows of LENGTHS tokens, padded at the left."""
    ids, mask = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:], mask[row, -length:] = tokens(1, length, seed=length), 1
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: LT2ForCausalLM, given: dict[str, torch.Tensor]) -> list[list[int]]:
    """What transformers' loop generates behind the prompts."""
    whole = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return whole[:, given["input_ids"].shape[1] :].tolist()


def check_as_generate(model: LT2ForCausalLM) -> None:
    """Tokens of ragged rows, whose prompts come in chunks, and logits of a step."""
    decoder = Decoder(model, len(LENGTHS), max(LENGTHS) + NEW, prefill_tokens=4)
    found = decoder.generate(**prompts(), max_new_tokens=NEW)
    assert found.tolist() == plain(model, prompts())
    with torch.no_grad():
        decoder.prefill(prompts()["input_ids"], [max(LENGTHS) - n for n in LENGTHS])
        logits = [decoder.step(token_B) for token_B in found[:, :2].T][-1]
        for row, length in enumerate(LENGTHS):
            ids = torch.cat([prompts()["input_ids"][row, -length:], found[row, :2]])
            wanted = model(ids[None]).logits[0, -1]
            torch.testing.assert_close(logits[row], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "options"), diagonal([*FAMILIES, "huginn"], OPTIONS, each=3))
def test_tokens_are_those_of_generate(family: str, options: dict[str, Any]) -> None:
    check_as_generate(dreamer(family, **options))


@pytest.mark.parametrize("kind", ["window", "gdn", "gdn_window", "kda", "mamba2", "retnet"])
def test_mixers_of_the_layers_are_taken_along(kind: str) -> None:
    check_as_generate(dreamer("qwen3" if kind == "gdn" else "llama", kind, slices=2))


@pytest.mark.parametrize(
    ("family", "depths"), [("llama", 2), ("qwen3", 5), ("ouro", 2), ("ouro", 15), ("huginn", 14)]
)
def test_fewer_and_more_depths(family: str, depths: int) -> None:
    model = dreamer(family)
    set_depths(model, depths)
    check_as_generate(model)


def test_one_row_and_no_padding() -> None:
    model, ids = dreamer(), tokens(1, 9)
    found = Decoder(model, 1, 20).generate(ids, max_new_tokens=NEW)
    assert found.tolist() == plain(model, {"input_ids": ids})


def test_a_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are no values: whoever asks for one raises."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    for options in OPTIONS:
        model = dreamer("qwen3", **options)
        share = model.model.dreamer.released()
        model = model.to("meta")
        model.model.dreamer.set_release(share)
        step = Step(model, StaticCache.for_model(model, 2, 8))
        with torch.no_grad():
            assert step(torch.zeros(2, dtype=torch.int64, device="meta")).shape[0] == 2


def test_routing_that_is_released_further_needs_a_new_decoder() -> None:
    model = dreamer(release=0.0)
    decoder = Decoder(model, 3, 20)
    decoder.generate(**prompts(), max_new_tokens=2)
    model.model.dreamer.set_release(1.0)
    with pytest.raises(ValueError, match="make a new Decoder"):
        decoder.generate(**prompts(), max_new_tokens=2)
    found = Decoder(model, 3, 20).generate(**prompts(), max_new_tokens=NEW)
    assert found.tolist() == plain(model, prompts())


def test_a_decoder_does_not_outlive_how_many_experts_a_token_uses() -> None:
    """Its graph would use as many as before."""
    model = dreamer(slices=2)
    decoder = Decoder(model, len(LENGTHS), 20)
    set_top_experts(model, 2)
    with pytest.raises(ValueError, match="make a new Decoder"):
        decoder.generate(**prompts(), max_new_tokens=2)


@needs_triton
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("kind", ["full", "gdn"])
def test_a_step_in_triton_is_that_in_plain_pytorch(kind: str) -> None:
    model, found = dreamer("llama", kind, slices=2).float().to(DEVICE), []
    for backend in ("reference", "triton"):
        decoder = Decoder(model, 2, 12, graph=False)
        decoder.prefill(tokens(2, 9).to(DEVICE), [0, 0])
        with torch.no_grad(), dispatch.use(backend):
            found.append(decoder.step(tokens(2, 1, seed=4)[:, 0].to(DEVICE)))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_in_bf16_are_as_right_as_forward_passes(family: str, rows: int) -> None:
    """Of real width on a GPU; the truth is the same weights in fp32. Routers are far from ties."""
    heads, width, mlp = (16, 128, 5632) if DEVICE == "cuda" else (4, 16, 96)
    size = {"hidden_size": heads * width, "intermediate_size": mlp, "head_dim": width}
    size |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 1000}
    pools = {"entries": 3, "experts": 12, "slices": 4, "top_experts": 6, "shared_size": 64}
    model = tiny_model(tiny_spec(family, attention_scale=width**-0.5, **size), dreamer=pools)
    layer = model.model.dreamer
    for router in (layer.attention_router, layer.expert_router):
        router.keys.data *= 0.5 * (heads * width) ** -0.5
        router.depth_logits.data.copy_(0.5 * torch.arange(router.depth_logits.shape[1]))
    layer.set_release(1.0)
    model, ids_BT, first = model.bfloat16().to(DEVICE), tokens(rows, 40).to(DEVICE), 32
    decoder = Decoder(model, rows, ids_BT.shape[1])
    with torch.no_grad():
        logits = [decoder.prefill(ids_BT[:, :first], [0] * rows)]
        logits += [decoder.step(ids_BT[:, index]) for index in range(first, ids_BT.shape[1])]
        forward = model(ids_BT).logits[:, first - 1 :]
        truth = model.float()(ids_BT).logits[:, first - 1 :]
    found = torch.stack(logits, dim=1)
    errors = [float((x.float() - truth).norm() / truth.norm()) for x in (forward, found)]
    assert errors[0] < 0.1 and errors[1] < 1.2 * errors[0], errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["full", "window", "gdn", "gdn_window"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cuda_graph_gives_the_tokens_of_single_launches(
    kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """For rows of several lengths, and for one, whose kernels begin early; twice each."""
    model = dreamer("ouro", kind, **options).to("cuda", dtype)
    for rows in (3, 1):
        given = {name: value[:rows].cuda() for name, value in prompts().items()}
        decoders = [Decoder(model, rows, 30, graph=graph) for graph in (False, True, True)]
        eager, *graphs = (d.generate(**given, max_new_tokens=NEW).tolist() for d in decoders)
        assert graphs == [eager, eager]
        again = decoders[1].generate(**given, max_new_tokens=NEW).tolist()
        assert again == eager
        if dtype == torch.float32:
            assert eager == plain(model, given)
