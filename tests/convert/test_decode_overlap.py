"""What kernels that begin early rely on in a step: the block around it, and what stands ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert import decode_layers
from ltconvert.convert.decoding import Decoder
from ltconvert.kernels import overlap
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
