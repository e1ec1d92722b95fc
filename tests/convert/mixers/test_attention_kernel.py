"""Attention by the package's kernel, against PyTorch's with a mask."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton")

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.students.blocks import run_layer
from ltconvert.kernels import dispatch

LENGTH = 70

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="no interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]


def limits(kind: str) -> dict[str, Tensor]:
    """What limits the queries of two rows beside the order of tokens."""
    if kind == "window":
        return {}
    if kind == "padding":
        return {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long()}
    starts = torch.zeros(2, LENGTH, dtype=torch.int64)
    starts[0, [7, 8, 40]] = 1
    starts[1, [64]] = 1
    return {"segment_ids": starts.cumsum(1)}


def hidden(model: torch.nn.Module, given: dict[str, Tensor], backend: str) -> list[Tensor]:
    """Hidden states of what is no padding, and the first layer's gradients."""
    kept = given.get("attention_mask", torch.ones(2, LENGTH)).bool()
    leaves = list(model.model.layers[0].mixer.parameters())
    with dispatch.use("reference", window_attention=backend):
        h_NC = model.model(tokens(2, LENGTH), **given).last_hidden_state[kept]
        return [h_NC.detach(), *torch.autograd.grad(h_NC.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "documents"), ("gemma2", "documents"), ("gemma2", "padding"), ("gemma2", "window")],
)
def test_equals_attention_with_a_mask(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tiny_spec(family, head_dim=16))
    wanted = hidden(model, limits(kind), "reference")
    monkeypatch.setattr(SequenceContext, "attention_mask", None)
    for found, value in zip(hidden(model, limits(kind), "triton"), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


def test_left_padding_and_a_cache() -> None:
    """A prompt by the kernel, further tokens behind its keys by PyTorch: as in one pass."""
    model, ids, kept = tiny_model(tiny_spec("gemma2")), tokens(2, 20), torch.ones(2, 20).bool()
    kept[0, :5] = False
    whole = model.model(ids, attention_mask=kept.long()).last_hidden_state
    cache = model.model.new_cache()
    with dispatch.use("reference", window_attention="triton"):
        parts = [
            model.model(ids[:, a:b], attention_mask=kept[:, :b].long(), past_key_values=cache)
            for a, b in ((0, 12), (12, 20))
        ]
    found = torch.cat([part.last_hidden_state for part in parts], dim=1)
    torch.testing.assert_close(found[kept], whole[kept], rtol=1e-3, atol=1e-4)


def test_compiled_layers_read_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all layers of a window and every batch, and no mask of T x T."""
    model = tiny_model(tiny_spec("gemma2", head_dim=16))  # every other layer has a window
    first, other = limits("documents"), {"segment_ids": limits("documents")["segment_ids"].flip(0)}
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    with torch.no_grad(), dispatch.use("reference", window_attention="triton"):
        wanted = [model.model(tokens(2, LENGTH), **x).last_hidden_state for x in (first, other)]
        model.model.call_layer = torch.compile(
            run_layer, dynamic=False, fullgraph=True, backend=counter
        )
        monkeypatch.setattr(SequenceContext, "attention_mask", None)
        for given, value in zip((first, other), wanted, strict=True):
            found = model.model(tokens(2, LENGTH), **given).last_hidden_state
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
    assert counter.frame_count == len(model.model.windows()) == 2
