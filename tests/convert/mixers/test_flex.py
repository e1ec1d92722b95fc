"""Block masks against the mask that SDPA gets, and flex attention against SDPA."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from ltconvert.convert.mixers import context as context_module
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.flex import BLOCK_TOKENS, block_mask, fits, flex
from ltconvert.convert.students.blocks import run_layer

LENGTH = 5 * BLOCK_TOKENS


def counts(kind: str) -> torch.Tensor:
    """Documents of two rows: one alone, many, some that end with a block."""
    cuts = {"one": [], "many": range(7, LENGTH, 61), "even": [128, 256], "long": [130, 600]}[kind]
    starts = torch.zeros(2, LENGTH, dtype=torch.int64)
    starts[0, list(cuts)] = 1
    starts[1, [300]] = 1
    return starts.cumsum(1)


def dense(segments_BT: torch.Tensor, window: int | None) -> torch.Tensor:
    context = SequenceContext(
        {}, LENGTH, torch.device("cpu"), torch.arange(LENGTH)[None], segment_ids_BT=segments_BT
    )
    mask = context.attention_mask(window, LENGTH)
    assert mask is not None
    return mask[:, 0]


def blocks(number_B1K: torch.Tensor, index_B1KK: torch.Tensor) -> torch.Tensor:
    """Listed blocks as a table [B, K, K]."""
    rank = torch.arange(index_B1KK.shape[-1])
    listed = (rank < number_B1K[..., None]).to(torch.int32)
    return torch.zeros_like(index_B1KK).scatter(-1, index_B1KK.long(), listed)[:, 0].bool()


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("kind", ["one", "many", "even", "long"])
def test_blocks_are_those_of_the_mask(kind: str, window: int | None) -> None:
    segments = counts(kind)
    mask = block_mask(segments, window)
    expected = dense(segments, window)
    index = torch.arange(LENGTH)
    row = torch.arange(2)[:, None, None]
    assert torch.equal(mask.mask_mod(row, 0, index[:, None], index), expected)
    of_blocks = expected.unflatten(2, (-1, BLOCK_TOKENS)).unflatten(1, (-1, BLOCK_TOKENS))
    some, whole = of_blocks.any((2, 4)), of_blocks.all((2, 4))
    assert torch.equal(blocks(mask.full_kv_num_blocks, mask.full_kv_indices), whole)
    assert torch.equal(blocks(mask.kv_num_blocks, mask.kv_indices), some & ~whole)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_equals_sdpa() -> None:
    segments, window = counts("many"), 100
    q = torch.randn(2, 4, LENGTH, 16)
    k, v = torch.randn(2, 2, 2, LENGTH, 16)
    mask = dense(segments, window)[:, None]
    repeated = (y.repeat_interleave(2, dim=1) for y in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, scale=0.3)
    with torch.no_grad():
        found = flex(q, k, v, block_mask(segments, window), 0.3, None)
        capped = flex(q, k, v, block_mask(segments, window), 0.3, 2.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    scores = 2.0 * torch.tanh(0.3 * q @ k.repeat_interleave(2, dim=1).mT / 2.0)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    torch.testing.assert_close(
        capped, weights @ v.repeat_interleave(2, dim=1), rtol=1e-4, atol=1e-5
    )


def test_not_without_autocast_or_a_gpu() -> None:
    assert not fits(torch.device("cpu"), LENGTH) and not fits(torch.device("cuda"), LENGTH)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_layers_read_the_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all layers of a window and every batch, and no mask of T x T."""
    monkeypatch.setattr(context_module, "fits", lambda device, num_tokens: True)
    model = tiny_model(tiny_spec(family, head_dim=16))
    ids, segments = tokens(2, LENGTH), counts("many")
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model.model(ids, segment_ids=segments).last_hidden_state
        other = model.model(ids, segment_ids=counts("even")).last_hidden_state
        model.model.call_layer = torch.compile(
            run_layer, dynamic=False, fullgraph=True, backend=counter
        )
        monkeypatch.setattr(SequenceContext, "attention_mask", None)
        found = model.model(ids, segment_ids=segments).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        found = model.model(ids, segment_ids=counts("even")).last_hidden_state
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-4)
    assert counter.frame_count == len(model.model.windows())
