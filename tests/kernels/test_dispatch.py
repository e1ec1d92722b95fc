"""Which backend runs, why, and what happens when the one asked for cannot."""

from __future__ import annotations

import pytest
import torch

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.delta_rule import delta_rule
from ltconvert.kernels.norm_gate import norm_gate

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", dispatch.OPS)
def test_auto_takes_the_reference_on_a_cpu_and_says_why(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend, reason = dispatch.choose(op, "auto", CPU)
    assert backend == "reference" and "interpreted" in reason
    monkeypatch.delenv("TRITON_INTERPRET")
    backend, reason = dispatch.choose(op, "auto", CPU)
    assert backend == "reference" and "needs a GPU" in reason
    assert dispatch.choose(op, "reference", "cpu")[0] == "reference"


@pytest.mark.parametrize("op", dispatch.OPS)
def test_a_backend_asked_for_never_falls_back(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"'triton' cannot run {op} on cpu: triton") as caught:
        dispatch.choose(op, "triton", CPU)
    assert "\n" not in str(caught.value)


def test_every_listed_backend_has_its_module() -> None:
    for op, backends in dispatch.OPS.items():
        assert "reference" in backends
        for backend in backends:
            with dispatch.use(backend):
                assert callable(getattr(dispatch.implementation(op, CPU), op))


def test_table_lists_every_op() -> None:
    rows = dispatch.table("auto", CPU)
    assert [row[0] for row in rows] == list(dispatch.OPS)
    assert {row[1] for row in rows} == {"reference"}


def test_a_listed_kernel_still_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend, reason = dispatch.choose("norm_gate", "auto", CPU)
    assert backend == "reference" and "needs a GPU" in reason
    with pytest.raises(ValueError, match="needs a GPU"):
        dispatch.choose("norm_gate", "triton", CPU)
    assert dispatch.choose("norm_gate", "auto", "cuda")[0] == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("norm_gate", "triton", CPU) == ("triton", "asked for")
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    assert dispatch.choose("norm_gate", "auto", "cuda") == ("reference", "triton is not installed")


def test_use_and_set_default_reach_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(2, 3)

    def call() -> torch.Tensor:
        return norm_gate(x, torch.ones(3), x, eps=1e-5)

    with dispatch.use("reference"):
        call()
        with dispatch.use("auto", norm_gate="triton"), pytest.raises(ValueError, match="triton"):
            call()
        call()
    dispatch.set_default("triton")
    try:
        with pytest.raises(ValueError, match="norm_gate"):
            call()
        with dispatch.use(norm_gate="reference"):
            call()
    finally:
        dispatch.set_default()
    call()


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown op 'conv'; the ops are delta_rule"):
        dispatch.choose("conv", "auto", CPU)
    with pytest.raises(ValueError, match=r"unknown kernel backend 'cuda'; use one of auto, ref"):
        dispatch.choose("delta_rule", "cuda", CPU)
    with pytest.raises(ValueError, match="unknown op"), dispatch.use("auto", conv="reference"):
        pass


def test_what_a_kernel_does_not_take_goes_to_the_reference_unless_asked_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = torch.zeros(1, 1, 1, 300, device=CPU)
    narrow, beta = wide[..., :200], wide[..., 0]
    limit = limits.of_linear_attention(wide, wide, narrow, None, None)
    assert dispatch.choose("delta_rule", "auto", "cuda", limit) == (
        "reference",
        "widths go up to 256, got 300 (keys) and 200 (values)",
    )
    assert dispatch.choose("delta_rule", "auto", "cuda", None)[0] == "triton"
    message = "cannot run delta_rule on cpu: widths go up to 256, got 300"
    with dispatch.use("triton"), pytest.raises(ValueError, match=message):
        delta_rule(wide, wide, narrow, beta)
    message = "decays per channel keys go up to 128, got 200"
    with dispatch.use("triton"), pytest.raises(ValueError, match=message):
        delta_rule(narrow, narrow, wide[..., :8], beta, narrow)
