"""What kernels that begin early rely on in a step: the block around it, and what stands ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ltconvert.convert import decode_layers, decode_sparse, decode_step
from ltconvert.convert.decoding import Decoder
from ltconvert.kernels import overlap
from ltconvert.kernels.decode_attention import decode_attention
from ltconvert.kernels.decode_linear import decode_linear

MIXERS = ["gdn", "full", "gdn_window"]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_of_one_row_lets_kernels_begin_early_and_nothing_else_does(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def recorded(*tensors: Tensor, **options: Any) -> Tensor:
        seen.append(overlap._active.get())
        return decode_linear(*tensors, **options)

    monkeypatch.setattr(decode_layers, "decode_linear", recorded)
    model = tiny_model(tiny_spec("ouro"), MIXERS, window_tokens=4)
    Decoder(model, rows, 12).generate(tokens(rows, 5), max_new_tokens=3)
    assert set(seen) == {rows == 1} and not overlap._active.get()


def test_lengths_are_older_than_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read them before they wait; what the embedding launches has waited by then."""
    model = tiny_model(tiny_spec("ouro"), MIXERS, window_tokens=4)
    decoder, order = Decoder(model, 1, 12), []
    for owner, name in ((decoder.step, "_now"), (model.model, "embed")):
        call = getattr(owner, name)

        def noted(*given: Any, call: Any = call, name: str = name) -> Any:
            order.append(name)
            return call(*given)

        monkeypatch.setattr(owner, name, noted)
    decoder.prefill(tokens(1, 5), [0])
    order.clear()
    with torch.no_grad():
        decoder.step(torch.tensor([3]))
    assert order == ["_now", "embed"]


class Launched(TorchDispatchMode):
    """The ops that ran in a block, but for those that only look at a tensor: their names, and where
    the first of what they made lies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made: list[int | None] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if not op.is_view:
            first = result if isinstance(result, Tensor) else None
            self.names.append(op.overloadpacket.__name__)
            self.made.append(None if first is None else first.untyped_storage().data_ptr())
        return result


def test_lengths_of_chosen_keys_are_older_than_the_last_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that begins early reads them while what was launched last may still be at work."""
    model = tiny_model(tiny_spec("llama"), ["dsa"] * 3, top_k_tokens=4)
    decoder, launched, calls = Decoder(model, 1, 24), Launched(), []

    def noted(q_BHD: Tensor, keys: Tensor, values: Tensor, lengths_B: Tensor, **more: Any) -> Any:
        calls.append(launched.made[-1] != lengths_B.untyped_storage().data_ptr())
        return decode_attention(q_BHD, keys, values, lengths_B, **more)

    monkeypatch.setattr(decode_sparse, "decode_attention", noted)
    decoder.prefill(tokens(1, 8), [0])
    with torch.no_grad(), launched:
        decoder.step(torch.tensor([3]))
    assert calls == [True] * 3


def test_a_step_launches_little_outside_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch takes its microseconds, before and behind what the layers have to read."""
    model = tiny_model(tiny_spec("llama", layer_windows=(None, 7, 7)))
    decoder = Decoder(model, 2, 12)
    advance = decoder.prepare()
    decoder.prefill(tokens(2, 5), [0, 2])
    decoder.step.layers = [lambda stream, *_: stream] * len(decoder.step.layers)
    monkeypatch.setattr(
        decode_step, "decode_linear", lambda h_BC, weight, *_, **__: h_BC @ weight.T
    )
    with torch.no_grad(), Launched() as launched:
        advance()
    # The last ahead of the layers is younger than what kernels read before they wait.
    assert launched.names[-4:] == ["embedding", "mm", "add_", "argmax"]
    positions, ring = ["mul", "cos", "sin"], ["remainder", "clamp"]
    assert sorted(launched.names[:-4]) == sorted(["add", *positions, *ring])
