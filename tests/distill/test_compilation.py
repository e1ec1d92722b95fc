"""Compiled layers: the same numbers, one graph a make of layer, and plain layers where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import scatter, tiny_model, tiny_spec, tokens
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounterWithBackend

from ltconvert.convert.students.blocks import run_layer
from ltconvert.convert.students.dreamer.pools import attend
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill import compilation
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.compilation import Choice, choose, compiled, importing
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.distill.parking import Parking
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import LogitsSettings

MIXERS = ["gdn", "full", "window", "gdn", "gdn_window", "gdn_window", "dsa", "nsa"]
LINEAR = ["deltanet", "kda", "mamba2", "retnet", "kda", "retnet", "mamba2", "deltanet"]
FEW = ["full", "gdn_window"]  # every make of layer is a graph, and compiling one is slow
SMALL = {"window_tokens": 4, "top_k_tokens": 5, "block_tokens": 2, "chosen_blocks": 2}
ON = Choice(True, "a test")


def fail(reason: str) -> None:
    raise AssertionError(reason)


def packed(length: int = 16) -> Batch:
    """Two rows of two documents, no padding."""
    ids_BT = tokens(2, length)
    segments_BT = torch.stack([(torch.arange(length) >= cut).int() for cut in (5, 9)])
    keep_BT = torch.ones(2, length, dtype=torch.bool)
    return Batch(ids_BT, segments_BT, ids_BT.roll(-1, 1), keep_BT).to("cpu")


def pair(
    family: str = "llama", mixers: list[str] = MIXERS, *, share: bool = False
) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    tied = {"family": "qwen2", "num_loops": 2, "tied_rank": 3} if family == "tied" else {}
    spec = tiny_spec(
        **({"family": family} | tied),
        num_layers=len(mixers),
        layer_rope=("default",) * len(mixers),
        layer_windows=(None,) * len(mixers),
        head_dim=16,
    )
    teacher = tiny_model(spec).requires_grad_(False)
    student = build_student(teacher, mixers, SMALL, share=share)
    for seed, layer in enumerate(student.model.layers):
        if layer.mixer.kind != "full":
            scatter(layer.mixer, seed + 1)
    return teacher, student.train()


def logits(family: str, mixers: list[str] = MIXERS) -> LogitsObjective:
    teacher, student = pair(family, mixers)
    settings = LogitsSettings(ce_weight=0.5, loop_warmup_share=1.0)
    student.model.gradient_checkpointing = family == "qwen3"
    return LogitsObjective(teacher, student, settings)


def align(family: str, mixers: list[str] = MIXERS) -> AlignObjective:
    return AlignObjective(*pair(family, mixers, share=True))


def step(objective: Any, *, bf16: bool = False) -> dict[str, torch.Tensor]:
    """Metrics and gradients of one step."""
    objective.module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = objective.train_step(packed(), lambda loss: loss.backward(), 0.0)
    named = objective.module.named_parameters()
    return found | {name: p.grad.clone() for name, p in named if p.grad is not None}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rounding = 1e-4 * value.abs().max().item()
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=rounding, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("make", "family", "mixers", "kernel", "backend"),
    [
        (logits, "ouro", MIXERS, "reference", "aot_eager"),
        (align, "ouro", LINEAR, "reference", "aot_eager"),
        (logits, "qwen3", FEW, "reference", "eager"),  # traced alike, the backward pass is not
        (align, "ouro", MIXERS, "reference", "eager"),
        (logits, "tied", ["gdn", "full"], "reference", "eager"),
        (align, "tied", ["gdn_window"], "reference", "eager"),
        *(
            pytest.param(*case, "aot_eager", marks=pytest.mark.slow)
            for case in (
                (logits, "qwen3", MIXERS, "reference"),
                (align, "ouro", MIXERS, "reference"),
                (logits, "tied", MIXERS, "reference"),
                (align, "tied", MIXERS, "reference"),
                (logits, "llama", MIXERS, "triton"),
                (align, "llama", MIXERS, "triton"),
                (align, "llama", LINEAR, "triton"),
            )
        ),
    ],
)
def test_the_same_step_and_no_break_in_a_layer(
    make: Callable[..., Any], family: str, mixers: list[str], kernel: str, backend: str
) -> None:
    if kernel == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    objective = make(family, mixers)
    names = list(objective.module.state_dict())
    with dispatch.use(kernel):
        expected = step(objective)
        counter = CompileCounterWithBackend(backend)
        with compiled(objective, ON, fail, backend=counter, fullgraph=True):
            check_same(step(objective), expected)
            makes = counter.frame_count
            check_same(step(objective), expected)
            assert list(objective.module.state_dict()) == names
        assert counter.frame_count == makes  # nothing is compiled anew in the second step
        check_same(step(objective), expected)
    assert counter.frame_count == makes
    # Teacher and student; every mixer: not one a layer or visit, but where loops differ.
    assert makes <= (16 if family == "tied" else 8)
    assert objective.teacher.model.call_layer is run_layer


@pytest.mark.parametrize("family", ["ouro", "qwen3"])  # qwen3 computes activations again
def test_layers_that_read_depth_are_compiled_in_two_parts(family: str) -> None:
    teacher = tiny_model(tiny_spec(family)).requires_grad_(False)
    student = build_student(teacher, ["moda"] * 3).train()
    student.model.gradient_checkpointing = family == "qwen3"
    settings = LogitsSettings(ce_weight=0.5, loop_warmup_share=1.0, depth_warmup_share=0.0)
    objective = LogitsObjective(teacher, student, settings)
    expected = step(objective)
    counter = CompileCounterWithBackend("aot_eager")
    with compiled(objective, ON, fail, backend=counter, fullgraph=True):
        check_same(step(objective), expected)
        makes = counter.frame_count
        check_same(step(objective), expected)
    assert counter.frame_count == makes
    # The teacher's layer, a visit that reads nothing, the two parts of others and of the last one.
    assert makes <= 8


def test_parts_of_a_dreamer_are_compiled_once_for_all_depths() -> None:
    teacher = tiny_model(tiny_spec("ouro")).requires_grad_(False)
    pools = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3}
    student = build_student(teacher, ["full"] * 3, {"dreamer": pools}).train()
    objective = LogitsObjective(teacher, student, LogitsSettings(release_share=0.0))
    expected = step(objective)
    counter = CompileCounterWithBackend("aot_eager")
    with compiled(objective, ON, fail, backend=counter, fullgraph=True):
        check_same(step(objective), expected)
        makes = counter.frame_count
        check_same(step(objective), expected)
    # The layer of the teacher, attention of a Dreamer, activations of its experts.
    assert counter.frame_count == makes <= 8
    assert student.model.dreamer.attention.attend is attend


def test_under_autocast() -> None:
    objective = logits("llama", FEW)
    expected = step(objective, bf16=True)
    with compiled(objective, ON, fail, backend="aot_eager", fullgraph=True):
        found = step(objective, bf16=True)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0.02, atol=0.0)


def test_parked_mixers_come_back_into_the_same_graphs(tmp_path: Any) -> None:
    teacher, student = pair(share=True)
    parking = Parking(student, tmp_path / "parked", torch.device("cpu"))
    expected = step(AlignObjective(teacher, student, [0]))
    parking.leave([0, 2, 3, 5])
    parking.fetch([0])
    counter = CompileCounterWithBackend("aot_eager")
    objective = AlignObjective(teacher, student, [0])
    with compiled(objective, ON, fail, backend=counter, fullgraph=True):
        check_same(step(objective), expected)
        parking.leave([0])
        parking.fetch([0])
        student.model.layers[0].mixer.requires_grad_(True)
        check_same(step(objective), expected)
    parking.close()


def test_a_compiler_that_fails_is_told_of_once_and_done_without() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such compiler\nand more")

    objective = logits("llama")
    expected, said = step(objective), []
    with compiled(objective, ON, said.append, backend=broken):
        check_same(step(objective), expected)
    assert len(said) == 1 and "\n" not in said[0]
    assert "going on without" in said[0] and "no such compiler" in said[0]


@pytest.mark.parametrize("graph", [1, 3])  # the teacher's; the second of the student
def test_layers_that_fail_to_compile_do_without_where_activations_are_recomputed(
    graph: int,
) -> None:
    """Layers that ran compiled before stay so: the backward pass computes them again."""
    graphs = iter(range(1, 100))

    def breaks_once(module: Any, inputs: Any) -> Any:
        if next(graphs) == graph:
            raise RuntimeError("no such kernel")
        return aot_eager(module, inputs)

    objective = logits("qwen3", FEW)
    assert objective.module.model.gradient_checkpointing
    expected, said = step(objective), []
    with compiled(objective, ON, said.append, backend=breaks_once):
        check_same(step(objective), expected)
        check_same(step(objective), expected)
    assert len(said) == 1


def test_a_backward_pass_that_fails_to_compile_is_done_without() -> None:
    def broken(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no backward kernel")

    backend = aot_autograd(fw_compiler=lambda m, _: make_boxed_func(m), bw_compiler=broken)
    objective = logits("llama", FEW)
    expected, said = step(objective), []
    with compiled(objective, ON, said.append, backend=backend):
        check_same(step(objective), expected)
    assert len(said) == 1 and "no backward kernel" in said[0]


def test_a_process_that_has_run_nothing_yet_compiles_whole_layers() -> None:
    """No op has been imported before the first graph is traced."""
    here = Path(__file__).parent
    lines = [
        "import sys",
        f"sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]",
        "import test_compilation as t",
        "objective = t.logits('llama')",
        "with t.compiled(objective, t.ON, t.fail, backend='eager', fullgraph=True):",
        "    t.step(objective)",
    ]
    command = [sys.executable, "-P", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_compiling_needs_is_imported_once() -> None:
    thread = importing()
    thread.join()
    assert importing() is thread and "torch._inductor.compile_fx" in sys.modules


def test_the_teacher_is_one_graph_in_align_whichever_layers_are_converted() -> None:
    objective, counter = align("llama", FEW), CompileCounterWithBackend("eager")
    with compiled(objective, ON, fail, backend=counter, fullgraph=True):
        step(objective)
    assert counter.frame_count == 2  # the teacher's layer, the mixer beside it


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not choose("auto", cpu, 10_000).compiled
    assert choose("layers", cpu, 1).compiled and not choose("off", gpu, 10_000).compiled
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compilation, "find_spec", lambda name: object())
    assert choose("auto", gpu, 200).compiled and not choose("auto", gpu, 199).compiled
    assert str(choose("auto", gpu, 5)) == "layers not compiled (5 steps are too few)"
    monkeypatch.setattr(compilation, "find_spec", lambda name: None)
    assert "triton is not installed" in str(choose("auto", gpu, 10_000))
