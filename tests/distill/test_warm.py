"""Compiling ahead: a step on fake tensors launches the kernels of a real one, and nothing runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill import warm
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.compilation import Choice, compiled
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.precision import autocast
from ltconvert.distill.warm import FakeStep, warming
from ltconvert.kernels import ahead, dispatch
from ltconvert.recipes.stages import LogitsSettings

MIXERS = ["gdn_window", "full", "gdn", "gdn_window", "kda", "full", "retnet", "gdn"]
SMALL = {"window_tokens": 4, "top_k_tokens": 5, "block_tokens": 2, "chosen_blocks": 2}
ROWS, LENGTH = 2, 16
CPU = torch.device("cpu")


def models(
    family: str, mixers: list[str], share: bool, device: torch.device
) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    spec = tiny_spec(
        family,
        num_layers=len(mixers),
        layer_rope=("default",) * len(mixers),
        layer_windows=(None,) * len(mixers),
        head_dim=16,
    )
    teacher = tiny_model(spec).to(device).requires_grad_(False)
    return teacher, build_student(teacher, mixers, SMALL, share=share).to(device).train()


def logits(
    family: str = "llama", mixers: list[str] = MIXERS, device: torch.device = CPU
) -> LogitsObjective:
    settings = LogitsSettings(ce_weight=0.5, loop_warmup_share=1.0)
    return LogitsObjective(*models(family, mixers, False, device), settings)


def align(
    family: str = "llama", mixers: list[str] = MIXERS, device: torch.device = CPU
) -> AlignObjective:
    return AlignObjective(*models(family, mixers, True, device))


def batch(device: torch.device = CPU) -> Batch:
    ids_BT = tokens(ROWS, LENGTH)
    segments_BT = (torch.arange(LENGTH) >= 9).int().expand(ROWS, -1).contiguous()
    keep_BT = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return Batch(ids_BT, segments_BT, ids_BT.roll(-1, 1), keep_BT).to(device)


def step(objective: Any, device: torch.device = CPU, precision: str = "fp32") -> None:
    with autocast(device, precision):
        objective.train_step(batch(device), lambda loss: loss.backward(), 0.0)


def metrics(objective: Any) -> dict[str, torch.Tensor]:
    """Of a step: the loss and the gradients."""
    objective.module.zero_grad()
    found = objective.train_step(batch(), lambda loss: loss.backward(), 0.0)
    named = objective.module.named_parameters()
    return {"loss": found["loss"]} | {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="its launches are replaced")
@pytest.mark.parametrize(
    ("make", "family", "mixers"),
    [
        (logits, "ouro", MIXERS),
        (align, "ouro", MIXERS),
        (logits, "llama", ["moda", "full", "moda"]),
    ],
)
def test_a_fake_step_launches_what_a_real_one_does(
    make: Callable[..., Any], family: str, mixers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, sizes and constants alike; layers that are like others are left out of the first."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[tuple[Hashable, ...]] = set()

    def note(kernel: Any, args: Any, options: dict[str, Any]) -> None:
        # As Triton: it compiles anew for types, for multiples of 16, for 1 and for constants.
        known = (
            (x.dtype, x.data_ptr() % 16 == 0) if hasattr(x, "dtype") else number(x) for x in args
        )
        found.add((kernel.fn.__name__, *known, *options.items()))

    def number(x: Any) -> Any:
        return (x % 16 == 0, x == 1) if type(x) is int else x

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        note(kernel, args, options)

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    monkeypatch.setattr(ahead, "_launcher", lambda: InterpretedFunction)
    monkeypatch.setattr(
        ahead.Ahead,
        "_compile",
        lambda _, kernel, known, grid, options: note(kernel, known, options),
    )
    objective = make(family, mixers)
    with dispatch.use("triton"):
        FakeStep(objective, (ROWS, LENGTH)).run("fp32")
        assert all(p.grad is None for p in objective.module.parameters())
        compiled_ahead = set(found)
        assert InterpretedFunction.run is launch  # put back
        found.clear()
        step(objective)
    assert compiled_ahead == found and len(found) > 5


def test_layers_like_earlier_ones_are_left_out_of_a_fake_step() -> None:
    mixers = ["gdn", "full", "gdn", "gdn", "full", "window", "gdn", "gdn"]
    fake = FakeStep(logits("ouro", mixers), (ROWS, LENGTH)).objective
    for model in (fake.teacher.model, fake.module.model):
        loops = {x.loop for x in model.schedule}
        assert [x.layer for x in model.schedule if x.loop == 0] == [0, 1, 5, 7]
        assert [x.layer for x in model.schedule if x.loop == max(loops) > 0] == [0, 7]
    assert {p.device.type for p in fake.module.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("make", "mixers"),
    [
        (align, ["gdn"]),
        *(
            pytest.param(make, ["gdn_window", "full"], marks=pytest.mark.slow)
            for make in (align, logits)
        ),
    ],
)
def test_fake_steps_beside_a_compiler_that_traces(
    make: Callable[..., Any], mixers: list[str]
) -> None:
    """Neither has a part in what the other does."""
    objective, failed, count = make("llama", mixers), [], 0
    if make is logits:  # without labels: on a CPU their number is looked at
        objective.settings = objective.settings.model_copy(update={"ce_weight": 0.0})
    expected = metrics(objective)
    done = threading.Event()

    def beside() -> None:
        nonlocal count
        try:
            while not done.is_set():
                fakes[count % 2].run("fp32")
                count += 1
        except Exception as error:
            failed.append(error)

    fakes = [FakeStep(objective, (ROWS, LENGTH)) for _ in range(2)]
    thread = threading.Thread(target=beside)
    thread.start()
    try:
        with compiled(objective, Choice(True, "a test"), pytest.fail, backend="aot_eager"):
            found = metrics(objective)
    finally:
        done.set()
        thread.join()
    assert not failed and count > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nothing_goes_on_in_the_background_of_a_cpu() -> None:
    before = threading.active_count()
    with warming(logits(), (ROWS, LENGTH), CPU, "fp32", pytest.fail):
        assert threading.active_count() == before


@pytest.mark.parametrize("broken", ["__init__", "run"])
def test_what_fails_is_told_of_and_done_without(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such tensor\nand more")

    if broken == "run":
        monkeypatch.setattr(FakeStep, "__init__", lambda *_: None)
    monkeypatch.setattr(FakeStep, broken, fail)
    monkeypatch.setattr(warm.dispatch, "TRITON_INSTALLED", True)
    said: list[str] = []
    with warming(logits(), (ROWS, LENGTH), torch.device("cuda"), "fp32", said.append):
        pass
    assert said == ["kernels are compiled one after the other: no such tensor"]


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["plain", "compiled"])
@pytest.mark.parametrize("make", [logits, align])
@pytest.mark.parametrize("family", ["llama", "ouro"])
def test_the_first_step_after_warming_compiles_nothing(
    family: str, make: Callable[..., Any], layers: str
) -> None:
    from triton import knobs

    device = torch.device("cuda", torch.cuda.current_device())
    late: list[str] = []
    mixers = [*MIXERS, "dsa", "nsa"]

    def note(*, repr: str, **_: Any) -> None:
        if not threading.current_thread().name.startswith(ahead.THREADS):
            late.append(repr)

    objective = make(family, mixers, device)
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, note
    try:
        with dispatch.use("triton"):
            with warming(objective, (ROWS, LENGTH), device, "bf16", pytest.fail):
                pass  # waits
            with compiled(objective, Choice(layers == "compiled", "a test"), pytest.fail):
                step(objective, device, "bf16")
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not late
