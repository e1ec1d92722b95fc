"""The benchmark itself, on cases of its own: table, refusals, missing peers, exit codes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ltconvert.benchmarks import run, step, timing
from ltconvert.benchmarks.case import Case, Function, Inputs, Options, Peer, Scale
from ltconvert.benchmarks.cases import OPS, delta_rule, linear_kl
from ltconvert.benchmarks.cases.draw import row_start
from ltconvert.benchmarks.harness import measure
from ltconvert.benchmarks.rows import PeerTime, Row, Target, brief, render, verdict
from ltconvert.benchmarks.run import main
from ltconvert.distill.compilation import compiled
from ltconvert.kernels import dispatch

CPU = torch.device("cpu")
OPTIONS = Options(CPU, backend="reference")


def cube(x: Tensor, weight: Tensor) -> Tensor:
    return x**3 * weight


def case(**changes: object) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(3, 50, 4, generator=generator), "weight": torch.rand(4) + 1.0}

    fake = Case("cube", "3x50x4", make, cube, grads=("x", "weight"), sample=row_start(20))
    return replace(fake, **changes)  # type: ignore[arg-type]


def backend_of(op: str = "delta_rule") -> str:
    """What the process asks for at the moment."""
    return dispatch._requests.backend(op)


def missing() -> Function:
    import a_package_that_is_not_there

    return a_package_that_is_not_there.op


def refusing() -> Function:
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return cube(x, weight)

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no backward | on this chip\nand more")

    return lambda x, weight: Refuse.apply(x, weight)


def test_a_row_a_phase_with_ours_floor_and_peer() -> None:
    peers = {"same": Peer(lambda: cube)}
    rows = list(measure(case(peers=peers, targets={"bwd": Target("same", 1e6)}), OPTIONS))
    assert [row.phase for row in rows] == ["fwd", "bwd", "fwd+bwd"]
    for row in rows:
        assert row.ms and row.floor_ms and row.peers["same"].ms and not row.bad
    assert rows[0].first_s and rows[1].first_s and rows[2].first_s is None
    assert verdict(rows[1]) == "<= 1e+06 x same: met"
    text = render(rows)
    assert len({len(line) for line in text.splitlines()}) == 1  # columns line up
    assert "same" in text and "copy" in text and "ok" in text


def test_red_parity_shows_no_speed() -> None:
    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return cube(x, weight) * (1.5 if backend_of() == "auto" else 1.0)

    peers = {"same": Peer(lambda: cube)}
    rows = list(measure(case(ours=ours, peers=peers), Options(CPU, backend="auto")))
    assert len(rows) == 3 and all(row.parity_red and row.ms is None for row in rows)
    assert not any(row.peers for row in rows)
    assert "PARITY RED" in brief(rows[0]) and "WRONG" in brief(rows[0])


def test_wrong_gradient_of_a_parameter_is_red() -> None:
    """The gradient of a weight sums over all tokens; only those of the sample count."""

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        if backend_of() == "auto":
            return x**3 * (weight + (weight - weight.detach()))
        return cube(x, weight)

    rows = list(measure(case(ours=ours), Options(CPU, backend="auto")))
    assert rows[0].parity_red and "d weight" in rows[0].parity and "d x" not in rows[0].parity


def test_red_row_carries_no_time_into_json() -> None:
    row = Row("op", "shape", "fwd", ms=1.0, floor_ms=0.5, parity_red=True, parity="x: WRONG")
    row.peers = {"peer": PeerTime(2.0)}
    values = row.to_dict()
    assert values["ms"] is None and values["floor_ms"] is None and values["peers"] == {}
    assert "1.0" not in brief(row)


def test_missing_peer_gives_its_reason() -> None:
    rows = list(measure(case(peers={"other": Peer(missing)}), OPTIONS))
    assert not any(row.bad for row in rows)
    assert all("a_package_that_is_not_there is not installed" in brief(row) for row in rows)


def test_peer_that_refuses_the_backward_keeps_its_forward() -> None:
    forward, backward, both = measure(case(peers={"half": Peer(refusing)}), OPTIONS)
    assert forward.peers["half"].ms and not backward.bad
    for row in (backward, both):
        assert row.peers["half"].ms is None
        assert row.peers["half"].note == "RuntimeError: no backward / on this chip"


def test_peer_with_another_result_is_no_peer() -> None:
    peers = {"other": Peer(lambda: lambda x, weight: x * weight), "shape": Peer(lambda: _sum)}
    row = next(iter(measure(case(peers=peers), OPTIONS)))
    assert row.peers["other"].ms is None and "other result" in row.peers["other"].note
    assert row.peers["shape"].note == "other result: []"


def _sum(x: Tensor, weight: Tensor) -> Tensor:
    return cube(x, weight).sum()


def test_slow_peer_meets_its_limit() -> None:
    def slow(x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(5)
        return cube(x, weight)

    options = replace(OPTIONS, peer_seconds=0.05)
    rows = list(measure(case(peers={"slow": Peer(lambda: slow)}), options))
    assert all("no result within" in row.peers["slow"].note for row in rows)


def test_a_limit_that_interrupts_the_end_of_a_block_leaves_no_mode_behind() -> None:
    with pytest.raises(timing.TimeLimit), timing.deadline(0.05):
        torch.set_grad_enabled(False)
        torch.autocast("cpu", torch.bfloat16).__enter__()
        torch.device("meta").__enter__()
        torch.set_default_dtype(torch.float64)
        time.sleep(5)
    made = torch.ones(1)
    assert made.device.type == "cpu" and made.dtype == torch.float32
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_limit_reaches_a_backward_pass() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(5)
            return grad

    peers = {"slow": Peer(lambda: lambda x, weight: Slow.apply(cube(x, weight)))}
    begun = time.monotonic()
    rows = list(measure(case(peers=peers), replace(OPTIONS, peer_seconds=0.1)))
    assert time.monotonic() - begun < 4
    assert rows[0].peers["slow"].ms and "no result within" in rows[1].peers["slow"].note


def test_no_peers_once_the_time_is_over() -> None:
    options = replace(OPTIONS, until=time.time() - 1)
    row = next(iter(measure(case(peers={"same": Peer(lambda: cube)}), options)))
    assert row.ms and row.peers["same"].note == "no time left"


def test_failure_of_ours_is_a_row() -> None:
    def broken(x: Tensor, weight: Tensor) -> Tensor:
        raise ValueError("no kernel here\nlong text")

    rows = list(measure(case(ours=broken), OPTIONS))
    assert len(rows) == 3 and all(row.failed == "ValueError: no kernel here" for row in rows)


def test_step_phases_take_turns_over_sets() -> None:
    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.add(x.data_ptr())
        return x + 1, x

    seen: set[int] = set()
    fake = case(
        make=lambda seed: {"x": torch.full((2, 3), float(seed))},
        ours=ours,
        grads=(),
        phases=("eager",),
        sets=3,
        sample=lambda name, x: x,
    )
    (row,) = measure(fake, OPTIONS)
    assert row.ms and len(seen) >= 3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("fla", 1.0), "<= 1 x fla: met"),
        (Target("fla", 0.4), "<= 0.4 x fla: missed"),
        (Target("torch"), "<= 1 x torch: no figure"),
        (Target(floor_share=0.7), ">= 70% of copy: missed"),
        (Target("fla", peak_gib=1.2), "<= 1 x fla: met, <= 1.2 GiB: missed"),
    ],
)
def test_targets(target: Target, words: str) -> None:
    row = Row("op", "shape", "fwd", ms=1.0, floor_ms=0.5, floor="copy", peak_gib=1.3)
    row.peers, row.target = {"fla": PeerTime(2.0), "torch": PeerTime(note="absent")}, target
    assert verdict(row) == words
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def _fake_rows(*rows: Row) -> run.Measure:
    def measure_op(op: str, arguments: argparse.Namespace, until: float) -> Iterator[Row]:
        yield from (replace(row, op=op) for row in rows)

    return measure_op


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"parity_red": True}, 1), ({"failed": "why"}, 1)]
)
def test_exit_code_and_json(changes: dict, code: int, tmp_path: Path, capsys) -> None:
    row = Row("", "shape", "fwd", ms=1.0, parity="ok", **changes)
    file = tmp_path / "rows.json"
    found = main(["--op", "norm_gate", "--json", str(file)], _fake_rows(row))
    assert found == code
    assert capsys.readouterr().out.count("norm_gate") == 1
    assert [x["op"] for x in json.loads(file.read_text())["rows"]] == ["norm_gate"]


def test_one_op_in_its_process(capfd) -> None:
    """The real thing at toy size: process, rows over a pipe, table."""
    arguments = ["--op", "norm_gate", "--device", "cpu", "--backend", "reference", "--no-peers"]
    assert main(arguments) == 0
    assert capfd.readouterr().out.count("| norm_gate") == 6


def test_death_of_an_op_is_a_row() -> None:
    assert main(["--op", "norm_gate", "--device", "no-such-device"]) == 1


@pytest.mark.parametrize("scale", ["full", "quick", "tiny"])
def test_every_op_has_cases(scale: Scale) -> None:
    import importlib

    for op in OPS:
        found = importlib.import_module(f"ltconvert.benchmarks.cases.{op}").cases(scale, CPU)
        assert found and all(x.op == op for x in found)
        assert len({x.shape for x in found}) == len(found)
        for x in found:
            assert set(x.targets) <= set(x.phases)
            assert {target.peer for target in x.targets.values()} - {None} <= set(x.peers)


@pytest.mark.parametrize("module", [delta_rule, linear_kl])
def test_parity_of_the_reference_with_itself(module) -> None:
    first = module.cases("tiny", CPU)[0]
    row = next(iter(measure(replace(first, peers={}), OPTIONS)))
    assert not row.bad and row.parity.startswith("ok")


def _toy_steps(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    size = ["--tiny", "--rows", "1", "--length", "16", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["step.py", *size, "--kernel", "reference", *options])
    return step.main()


def test_training_step_of_a_toy(monkeypatch, capsys) -> None:
    assert _toy_steps(monkeypatch) == 0
    table = capsys.readouterr().out
    assert 0 < table.index("| reference |") < table.index("| plain |")


def test_training_step_compiled(monkeypatch, capsys) -> None:
    monkeypatch.setattr(step, "compiled", partial(compiled, backend="aot_eager"))
    assert _toy_steps(monkeypatch, "--compile", "layers") == 0
    table = capsys.readouterr().out
    assert 0 < table.index("| reference, layers compiled |") < table.index("| plain |")


def test_training_step_that_does_not_compile_has_no_speed(monkeypatch, capsys) -> None:
    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> None:
        raise NotImplementedError("not on this machine")

    monkeypatch.setattr(step, "compiled", partial(compiled, backend=backend))
    assert _toy_steps(monkeypatch, "--compile", "layers", "--no-plain") == 1
    found = capsys.readouterr().out
    assert "| reference, layers compiled | failed: " in found and "not on this machine" in found


def test_training_step_that_takes_too_long_is_a_row(monkeypatch, capsys) -> None:
    assert _toy_steps(monkeypatch, "--limit", "0") == 1
    assert capsys.readouterr().out.count("| failed: TimeLimit: no result within 0 s |") == 2
