"""A rehearsal of stage `align`: the kernels of a step, and nothing that is seen of it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import scatter, tiny_model, tiny_spec, tokens

from ltconvert.convert.transfer import build_student
from ltconvert.distill import rehearsal
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.data import Batch
from ltconvert.kernels import dispatch

SMALL = {"window_tokens": 4, "top_k_tokens": 5, "block_tokens": 2, "chosen_blocks": 2}


def objective_of(mixers: list[str]) -> AlignObjective:
    layers = len(mixers)
    size = {"num_layers": layers, "layer_rope": ("default",) * layers, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # few, for the interpreter
    spec = tiny_spec(**size, **heads, layer_windows=(None,) * layers)
    teacher = tiny_model(spec).requires_grad_(False)
    student = build_student(teacher, mixers, SMALL, share=True)
    for seed, layer in enumerate(student.model.layers):
        if layer.mixer.converted:
            scatter(layer.mixer, seed + 1)
    return AlignObjective(teacher, student.train())


def packed() -> Batch:
    """A row of two documents, no padding."""
    ids_BT = tokens(1, 16)
    segments_BT = (torch.arange(16) >= 5).int()[None]
    return Batch(ids_BT, segments_BT, ids_BT, ids_BT > 0).to("cpu")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    "mixers", [["gdn_window", "gdn_window"], ["gdn", "full", "kda", "gdn"], ["dsa", "nsa", "dsa"]]
)
def test_it_launches_what_a_step_does_and_changes_nothing(
    mixers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launched: set[tuple[str, str]] = set()
    launch = GridExecutor.__call__

    def noted(self: GridExecutor, *given: Any, **constants: Any) -> None:
        launched.add((self.fn.__name__, str(constants)))
        launch(self, *given, **constants)

    objective = objective_of(mixers)
    before = {name: x.clone() for name, x in objective.module.state_dict().items()}
    drawn = torch.get_rng_state()
    monkeypatch.setattr(GridExecutor, "__call__", noted)
    with dispatch.use("triton"):
        objective.rehearse(packed())
        found, after = launched.copy(), objective.module.state_dict()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        assert all(p.grad is None for p in objective.module.parameters())
        assert torch.equal(torch.get_rng_state(), drawn)
        launched.clear()
        objective.train_step(packed(), lambda loss: loss.backward(), 0.0)
    assert found == launched


@pytest.mark.parametrize("fails", [False, True])
def test_it_runs_beside_the_stage_which_hears_nothing_of_it(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, go, seen = objective_of(["gdn"]), Event(), []

    def rehearse(batch: Batch) -> None:
        go.wait()
        seen.append((batch.input_ids_BT.shape, batch.mask_BT))
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(rehearsal, "rehearses", lambda *_: True)
    monkeypatch.setattr(objective, "rehearse", rehearse)
    settings: Any = SimpleNamespace(rows_at_once=3, seq_len_tokens=8)
    inputs: Any = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
    with (
        pytest.raises(KeyboardInterrupt),  # of the stage: the thread is waited for all the same
        rehearsal.rehearsing(objective, settings, inputs),
    ):
        assert not seen
        go.set()
        raise KeyboardInterrupt
    assert seen == [((3, 8), None)]
    assert objective.rehearsal is not None and not objective.rehearsal.is_alive()


def test_nothing_is_recorded_beside_it() -> None:
    objective, end = objective_of(["gdn"]), Event()
    assert objective.work(0.0) is not None
    objective.rehearsal = Thread(target=end.wait)
    objective.rehearsal.start()
    assert objective.work(0.0) is None
    end.set()
    objective.rehearsal.join()
    assert objective.work(0.0) is not None
