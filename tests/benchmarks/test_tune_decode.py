"""The search for constants of the decode kernels: what it sets it puts back; its last line."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ltconvert.benchmarks import tune_decode, tune_timing
from ltconvert.benchmarks.tune_candidates import CANDIDATES, applied, groups, module_of, text_of

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="no interpreter",
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@needs_triton
def test_constants_hold_inside_and_plans_follow() -> None:
    from ltconvert.kernels.decode_linear import triton

    shape = (6144, 2048, 2, False, 132)
    before, plan = triton.AHEAD, triton._plan_single(*shape)
    with applied({"decode_linear.AHEAD": 1, "decode_linear.OUTPUTS": (2,)}):
        inside = triton._plan_single(*shape).constants
        assert (inside["AHEAD"], inside["BO"]) == (1, 2)
    assert (triton.AHEAD, triton._plan_single(*shape)) == (before, plan)
    with pytest.raises(ValueError, match="has no AHAED"), applied({"decode_linear.AHAED": 1}):
        pass
    with pytest.raises(ValueError, match="no module"):
        module_of("decode_lines.AHEAD")


@needs_triton
def test_every_candidate_names_constants_that_exist() -> None:
    for name, candidates in CANDIDATES.items():
        for constants in candidates:
            with applied({f"{name.split(',')[0]}.{key}": x for key, x in constants.items()}):
                pass


def test_settings_are_read_as_they_are_written() -> None:
    constants = {"overlap.ALLOWED": False}
    word = text_of(constants).removeprefix("--set ").strip("'")
    assert dict([tune_decode._setting(word)]) == constants
    for wrong in ("overlap", "overlap.X=1", "overlap.ALLOWED=x"):
        with pytest.raises(SystemExit, match=f"^--set {wrong}: "):
            tune_decode._setting(wrong)


@needs_triton
@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_ends_with_what_to_set(
    wrong: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CANDIDATES, "gdn_window_step", [{"ELEMENTS": 64}])
    monkeypatch.setattr(tune_timing, "graph_us", lambda calls, device: 1.0)  # interpreted, slow
    if wrong:
        from ltconvert.kernels.gdn_window_step import triton

        right: Callable[..., torch.Tensor] = triton.gdn_window_step
        monkeypatch.setattr(triton, "gdn_window_step", lambda *x, **y: right(*x, **y) + 1)
    status = tune_decode.main(["--device", "cpu", "--op", "gdn_window_step", "--seconds", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("set: ") and status == wrong
    assert any("WRONG" in line for line in lines) == wrong


def test_batches_count_alike_and_shapes_of_a_batch_by_their_time() -> None:
    (group,) = groups(["gdn_step"], torch.device("cpu"))
    shapes = ("1x2x16", "1x9x16", "8x2x16")
    group = replace(group, cases=[replace(group.cases[0], shape=shape) for shape in shapes])
    assert group.score([2.0, 6.0, 30.0], [1.0, 3.0, 10.0]) == 2.5
    assert group.score([2.0, 3.0, 10.0], [1.0, 3.0, 10.0]) == (5 / 4 + 1) / 2
