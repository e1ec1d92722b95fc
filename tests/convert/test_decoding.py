"""The fast path against plain ``generate()`` and the uncached forward pass."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from helpers import FAMILIES, VOCAB, covering, diagonal, tiny_model, tiny_spec, tokens

from ltconvert.convert.decode_weights import join, split
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.sampling import Sampling
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.kernels import dispatch

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
    "moda": ["moda", "gdn", "moda"],
}
SMALL = {"window_tokens": 5, "top_k_tokens": 6, "block_tokens": 2, "chosen_blocks": 2}
LENGTHS, NEW = (11, 3, 7), 9
PLAIN = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def model_of(family: str, mixers: str, loops: int = 2, **options: Any) -> LT2ForCausalLM:
    """Windows of 5 tokens: shorter than the longest prompts, longer than the shortest."""
    spec = tiny_spec(family, num_loops=loops)
    return tiny_model(spec, MIXERS[mixers], **(SMALL | options))


def prompts() -> dict[str, torch.Tensor]:
    """Rows of LENGTHS tokens, padded at the left."""
    ids, mask = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:], mask[row, -length:] = tokens(1, length, seed=length), 1
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: LT2ForCausalLM, given: dict[str, torch.Tensor], **more: Any) -> list[list[int]]:
    """What transformers' loop generates behind the prompts."""
    whole = model.generate(**given, **(PLAIN | more))
    return whole[:, given["input_ids"].shape[1] :].tolist()


def decoder_of(model: LT2ForCausalLM, **options: Any) -> Decoder:
    return Decoder(model, len(LENGTHS), max(LENGTHS) + NEW - 1, **options)


@pytest.mark.parametrize(
    ("family", "mixers"), diagonal([*FAMILIES, "huginn"], list(MIXERS), each=3)
)
def test_greedy_tokens_are_those_of_generate(family: str, mixers: str) -> None:
    model = model_of(family, mixers)
    expected = plain(model, prompts())
    decoder = decoder_of(model, prefill_tokens=4)
    assert decoder.generate(**prompts(), max_new_tokens=NEW).tolist() == expected
    assert plain(model, prompts()) == expected  # the model itself works as before


OPTIONS: list[dict[str, Any]] = [
    {"loops": 1},
    {"loops": 3},
    {"loops": 3, "prelude_layers": 1, "coda_layers": 1},
    {"loops": 3, "coda_layers": 1, "tied_rank": 0},
    {"tied_rank": 3},
    {"sdpa_gate": True, "loop_residual": True},
    {"short_conv": False},
    {"conv_size": 2},
    {"window_tokens": 1},
    {"window_tokens": 64},
]


@pytest.mark.parametrize(
    ("family", "mixers", "options"),
    covering(["llama", "ouro", "qwen2"], ["hybrid", "gdn_window", "delta", "decay"], OPTIONS),
    ids=str,
)
def test_every_option_of_a_student(family: str, mixers: str, options: dict[str, Any]) -> None:
    model = model_of(family, mixers, **options)
    decoder = decoder_of(model)
    found = decoder.generate(**prompts(), max_new_tokens=NEW).tolist()
    assert found == plain(model, prompts())


@pytest.mark.parametrize(
    ("family", "mixers"),
    diagonal(["qwen2", "gemma2", "gemma3", "olmo2", "ouro", "huginn"], list(MIXERS), each=3),
)
def test_every_step_has_the_logits_of_an_uncached_pass(family: str, mixers: str) -> None:
    """In fp64, so that rounding hides nothing; RoPE tables are fp32."""
    model = model_of(family, mixers, sdpa_gate=True, loop_residual=True).double()
    rows = [tokens(1, length + NEW, seed=length) for length in LENGTHS]
    decoder, given = decoder_of(model, prefill_tokens=4), prompts()
    for row, length in zip(rows, LENGTHS, strict=True):
        row[0, :length] = tokens(1, length, seed=length)
    with torch.no_grad():
        padding = [max(LENGTHS) - length for length in LENGTHS]
        logits = [decoder.prefill(given["input_ids"], padding)]
        for index in range(NEW - 1):
            token_B = torch.stack([r[0, n + index] for r, n in zip(rows, LENGTHS, strict=True)])
            logits.append(decoder.step(token_B))
        for row, (ids, length) in enumerate(zip(rows, LENGTHS, strict=True)):
            whole = model(ids).logits[0, length - 1 : length + NEW - 1]
            found = torch.stack([step[row] for step in logits])
            torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert decoder.cache.lengths_B.tolist() == [length + NEW - 1 for length in LENGTHS]


@pytest.mark.parametrize("mixers", list(MIXERS))
def test_chunks_of_a_prompt_change_nothing(mixers: str) -> None:
    model = model_of("llama", mixers).double()
    padding = [max(LENGTHS) - length for length in LENGTHS]
    found = []
    for chunk in (2048, 1, 4):
        decoder = decoder_of(model, prefill_tokens=chunk)
        logits = decoder.prefill(prompts()["input_ids"], padding)
        with torch.no_grad():
            found.append(torch.stack([logits, decoder.step(torch.tensor([3, 4, 5]))]))
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found[2], found[0], atol=1e-9, rtol=1e-9)


def test_a_decoder_is_used_again_and_shared_padding_costs_nothing() -> None:
    model = model_of("ouro", "hybrid")
    decoder, given = decoder_of(model), prompts()
    first = decoder.generate(**given, max_new_tokens=NEW)
    other = {"input_ids": tokens(3, 4, seed=9)}
    assert decoder.generate(**other, max_new_tokens=NEW).tolist() == plain(model, other)
    assert torch.equal(decoder.generate(**given, max_new_tokens=NEW), first)
    wide = {name: torch.nn.functional.pad(value, (5, 0)) for name, value in given.items()}
    with pytest.raises(ValueError, match="16 tokens of prompt and 9 new ones do not fit"):
        decoder.generate(**wide, max_new_tokens=NEW)
    found = decoder.generate(**wide, max_new_tokens=4)
    assert torch.equal(found, first[:, :4])


@pytest.mark.parametrize("block", [1, 2, 8])
def test_rows_end_at_stop_tokens(block: int) -> None:
    model = model_of("llama", "hybrid")
    free = plain(model, prompts())
    stops = [free[0][5], free[1][2], free[2][7]]
    expected = plain(model, prompts(), eos_token_id=stops)
    assert len(expected[0]) < NEW or free[0][:8] != expected[0][:8]
    decoder = decoder_of(model, block_tokens=block)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = stops, 0
    pieces = list(decoder.stream(**prompts(), max_new_tokens=NEW))
    assert max(piece.shape[1] for piece in pieces) <= block
    assert torch.cat(pieces, dim=1).tolist() == expected
    whole = decoder.generate(**prompts(), max_new_tokens=NEW, stop_tokens=())
    assert whole.tolist() == free


def test_a_repetition_penalty_is_that_of_generate() -> None:
    model, given = model_of("llama", "hybrid"), {"input_ids": tokens(3, 8)}
    expected = plain(model, given, repetition_penalty=1.7)
    assert expected != plain(model, given)
    decoder = decoder_of(model)
    sampling = Sampling(repetition_penalty=1.7)
    for _ in range(2):
        found = decoder.generate(**given, max_new_tokens=NEW, sampling=sampling)
        assert found.tolist() == expected


def test_sampling_follows_its_seed() -> None:
    model = model_of("llama", "hybrid")
    decoder, sampling = decoder_of(model), Sampling(1.0, top_k=20, top_p=0.95)
    draws = [
        decoder.generate(**prompts(), max_new_tokens=NEW, sampling=sampling, seed=seed).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert decoder.generate(**prompts(), max_new_tokens=NEW).tolist() == plain(model, prompts())


def test_joined_weights_are_views_and_can_be_split_again() -> None:
    model = model_of("qwen2", "hybrid")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    memory = sum(p.nbytes for p in model.parameters())

    def held() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        return sum(storage.nbytes() for storage in storages.values())

    decoder = decoder_of(model)
    biases = sum(linear.out_features for linear in (model.model.layers[0].mixer.gate_proj,)) * 4
    assert memory <= held() <= memory + 2 * biases  # zeros where a joined bias has no layer's
    again = decoder_of(model)
    assert all(
        a.weight.data_ptr() == b.weight.data_ptr()
        for a, b in zip(decoder.step.layers, again.step.layers, strict=True)
    )
    with torch.no_grad():
        model.model.layers[0].mixer.k_proj.weight.mul_(2)
        model.model.layers[0].mixer.k_proj.bias.mul_(2)
    assert decoder.generate(**prompts(), max_new_tokens=NEW).tolist() == plain(model, prompts())
    with torch.no_grad():
        model.model.layers[0].mixer.k_proj.weight.div_(2)
        model.model.layers[0].mixer.k_proj.bias.div_(2)
    split(model)
    assert held() == memory
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="weights have moved"):
        decoder.generate(**prompts(), max_new_tokens=NEW)


def test_a_model_with_joined_weights_trains_and_is_saved(tmp_path: Any) -> None:
    model = model_of("llama", "hybrid")
    with torch.inference_mode():
        decoder_of(model)
    model.save_pretrained(tmp_path)
    loaded = LT2ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
    assert model.model.layers[1].mixer.k_proj.weight.grad.any()


@pytest.mark.parametrize("tied_rank", [None, 0, 3])
def test_no_change_of_a_looped_layer_goes_unnoticed(tied_rank: int | None) -> None:
    """A Decoder follows it or says that it cannot, whatever of the layer was changed in place."""
    spec = tiny_spec("qwen2", num_loops=2, tied_rank=tied_rank)
    small = {"top_k_tokens": 3, "block_tokens": 2, "chosen_blocks": 1, "window_tokens": 2}
    model, ids = tiny_model(spec, ["gdn", "dsa", "nsa"], **small).double(), tokens(2, 8)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, parameter in model.named_parameters():
        decoder = Decoder(model, 2, 19)
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))
        try:
            found = decoder.generate(ids, max_new_tokens=NEW).tolist()
        except ValueError as error:
            assert "make a new Decoder" in str(error)
        else:
            assert found == plain(model, given), name


@pytest.mark.parametrize("tied_rank", [0, 3])
def test_a_decoder_of_tied_loops_notices_that_they_were_trained(tied_rank: int) -> None:
    model = model_of("qwen2", "hybrid", tied_rank=tied_rank)
    decoder, second = decoder_of(model), decoder_of(model)
    for each in (decoder, second):  # copies of their own, or one memory for both
        assert each.generate(**prompts(), max_new_tokens=NEW).tolist() == plain(model, prompts())
    with torch.no_grad():
        model.model.layers[1].mixer.q_proj.bias.add_(1.0)
    with pytest.raises(ValueError, match="make a new Decoder"):
        decoder.generate(**prompts(), max_new_tokens=NEW)
    again = decoder_of(model).generate(**prompts(), max_new_tokens=NEW)
    assert again.tolist() == plain(model, prompts())


def test_layers_of_two_dtypes_are_not_joined() -> None:
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).half()]
    with pytest.raises(ValueError, match=r"torch\.float16 on cpu, torch\.float32 on cpu"):
        join(layers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": tokens(2, 4), "attention_mask": None}, r"has 3 rows, got prompts \[2, 4\]"),
        ({"max_new_tokens": 99}, "do not fit a max_length of 19"),
        ({"max_new_tokens": 0}, "do not fit"),
        ({"attention_mask": torch.ones(3, 4)}, r"shape \[3, 11\], got \[3, 4\]"),
        ({"attention_mask": torch.ones(3, 11).tril(9)}, "padded at the left alone"),
    ],
)
def test_what_does_not_fit_is_one_line(changed: dict[str, Any], message: str) -> None:
    decoder = decoder_of(model_of("llama", "full"))
    with pytest.raises(ValueError, match=message) as caught:
        decoder.generate(**(prompts() | {"max_new_tokens": NEW} | changed))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="no GPU, no interpreter",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "rows"),
    [("qwen2", 3), ("gemma3", 1), pytest.param("olmo2", 3, marks=pytest.mark.slow)],
)
def test_a_step_in_triton_is_that_in_plain_pytorch(family: str, rows: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = {"num_layers": 2, "layer_rope": ("x", None), "layer_windows": (5, None)}
    rope = {"x": {"rope_type": "default", "rope_theta": 100.0}}
    spec = tiny_spec(family, **size, rope=rope, vocab_size=24, hidden_size=16, intermediate_size=24)
    mixers = ["full", "gdn"] if spec.qk_norm is None else ["gdn_window", "gdn_window"]
    model = tiny_model(spec, mixers, sdpa_gate=True, window_tokens=4).to(device)
    found = []
    for backend in ("reference", "triton"):
        decoder = Decoder(model, rows, 12, graph=False)
        decoder.prefill(tokens(rows, 9).to(device) % 24, [0] * rows)
        with torch.no_grad(), dispatch.use(backend):
            token_BT = tokens(rows, min(rows, 2), seed=4).to(device) % 24
            found.append(torch.stack([decoder.step(token_B) for token_B in token_BT.T]))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("layout", ["pre", "sandwich"])
@pytest.mark.parametrize("mixers", [["gdn", "full", "gdn_window"], ["nsa", "full", "nsa"]], ids=str)
def test_steps_in_bf16_are_as_right_as_forward_passes(
    layout: Any, rows: int, mixers: list[str]
) -> None:
    """Of real width on a GPU; the truth is the same weights in fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, width, mlp = (16, 128, 5632) if device == "cuda" else (4, 16, 96)
    size = {"hidden_size": heads * width, "intermediate_size": mlp, "head_dim": width}
    size |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 1000}
    spec = tiny_spec("ouro", num_loops=2, norm_layout=layout, attention_scale=width**-0.5, **size)
    small = {"window_tokens": 32, "block_tokens": 4, "chosen_blocks": 4}
    model = tiny_model(spec, mixers, **small).bfloat16().to(device)
    ids_BT, first = tokens(rows, 80).to(device), 64
    decoder = Decoder(model, rows, ids_BT.shape[1])
    with torch.no_grad():
        logits = [decoder.prefill(ids_BT[:, :first], [0] * rows)]
        logits += [decoder.step(ids_BT[:, index]) for index in range(first, ids_BT.shape[1])]
        plain = model(ids_BT).logits[:, first - 1 :]
        truth = model.float()(ids_BT).logits[:, first - 1 :]
    found = torch.stack(logits, dim=1)
    errors = [float((x.float() - truth).norm() / truth.norm()) for x in (plain, found)]
    assert errors[0] < 0.1 and errors[1] < 1.2 * errors[0], errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixers", list(MIXERS))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2", "ouro", "huginn"])
def test_a_cuda_graph_gives_the_tokens_of_single_launches(
    family: str, mixers: str, dtype: torch.dtype
) -> None:
    """Twice, and with draws: replays must neither keep nor lose anything."""
    model = model_of(family, mixers).to("cuda", dtype)
    given = {name: value.cuda() for name, value in prompts().items()}
    graph, eager = decoder_of(model), decoder_of(model, graph=False)
    for sampling in (Sampling(), Sampling(1.0, top_k=VOCAB // 2, top_p=0.9), Sampling()):
        call = {"max_new_tokens": NEW, "sampling": sampling, "seed": 3}
        expected = eager.generate(**given, **call)
        assert torch.equal(graph.generate(**given, **call), expected)
        assert torch.equal(graph.generate(**given, **call), expected)
    if dtype == torch.float32:
        found = graph.generate(**given, max_new_tokens=NEW).tolist()
        assert found == plain(model, given)


def test_a_stream_that_a_later_call_has_overtaken_says_so() -> None:
    model = tiny_model(tiny_spec("llama"), ["gdn", "full", "window"])
    decoder = Decoder(model, 1, 64, block_tokens=2)
    first = decoder.stream(tokens(1, 5), max_new_tokens=12, stop_tokens=[])
    next(first)
    decoder.generate(tokens(1, 5, seed=3), max_new_tokens=4)
    with pytest.raises(RuntimeError, match="later call"):
        list(first)
    unread = decoder.stream(tokens(1, 5), max_new_tokens=4)
    expected = decoder.generate(tokens(1, 5, seed=3), max_new_tokens=4)
    running = decoder.stream(tokens(1, 5, seed=3), max_new_tokens=4)
    found = [next(running)]
    with pytest.raises(RuntimeError, match="later call"):
        list(unread)
    assert torch.equal(torch.cat([*found, *running], dim=1), expected)
    with pytest.raises(ValueError, match=r"expected prompts \[rows, tokens\]"):
        decoder.stream(tokens(1, 5)[0])
