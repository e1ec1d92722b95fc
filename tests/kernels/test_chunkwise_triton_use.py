"""The chunkwise Triton kernels as models call them: strides, compile, checkpointing, autocast."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from chunkwise_case import DEVICE, DTYPES, GPU, VARIANTS, inputs_of, op, results, three_way
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ltconvert.kernels import dispatch

every_variant = pytest.mark.parametrize("variant", VARIANTS)
# Without a GPU only what differs most: these tests take seconds each.
some_variants = every_variant if GPU else pytest.mark.parametrize("variant", VARIANTS[2:])
LENGTH = 130 if GPU else 20


def same(variant: str, *alternatives: Mapping[str, Tensor]) -> None:
    """All inputs give the same results, bit for bit."""
    want, *others = (results(lambda x: op(variant, x), x, "triton") for x in alternatives)
    for other in others:
        for name, result in want.items():
            assert torch.equal(result, other[name]), name


@some_variants
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_twice(variant: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(variant, LENGTH, dtype=dtype)
    same(variant, inputs, inputs)


@some_variants
def test_inputs_of_any_strides(variant: str) -> None:
    inputs = inputs_of(variant, LENGTH, heads=2, dtype=DTYPES[0])
    last = {n: x.transpose(1, -1).contiguous().transpose(1, -1) for n, x in inputs.items()}
    # Heads before tokens, as attention code has it; q, k and v as parts of one projection.
    heads = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    packed = torch.cat([inputs[n] for n in ("q", "k", "v")], dim=-1)
    parts = dict(zip(("q", "k", "v"), packed.split([16, 16, 24], dim=-1), strict=True))
    same(variant, inputs, last, heads | {"q": parts["q"], "v": parts["v"]}, inputs | parts)


@some_variants
def test_expanded_inputs(variant: str) -> None:
    """One head, batch row or token that stands for all, with a stride of 0."""
    inputs = inputs_of(variant, LENGTH, batch=2, heads=2 if GPU else 1, dtype=DTYPES[0])
    for name, axis in (("q", 2), ("k", 2), ("v", 0), ("beta", 1), ("log_decay", 1)):
        if name in inputs:
            inputs[name] = inputs[name].narrow(axis, 0, 1).expand_as(inputs[name])
    inputs["initial_state_BHKV"] = inputs["initial_state_BHKV"][:1].expand(2, -1, -1, -1)
    same(variant, {n: x.contiguous() for n, x in inputs.items()}, inputs)


@pytest.mark.parametrize("of", [0, 1], ids=["outputs", "final state"])
def test_gradients_of_one_result_alone(of: int) -> None:
    """The other has no cotangent, and that of a plain sum is one number, expanded."""
    inputs = inputs_of("token", LENGTH)
    grads = []
    for backend in ("reference", "triton"):
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        with dispatch.use(backend):
            op("token", leaves)[of].sum().backward()
        grads.append({n: x.grad for n, x in leaves.items()})
    for name, want in grads[0].items():
        found = torch.zeros_like(leaves[name]) if grads[1][name] is None else grads[1][name]
        want = torch.zeros_like(leaves[name]) if want is None else want
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-3)


@some_variants
def test_only_some_inputs_need_gradients(variant: str) -> None:
    inputs = inputs_of(variant, LENGTH)
    with dispatch.use("triton"):
        whole = op(variant, inputs)
        leaves = inputs | {"k": inputs["k"].clone().requires_grad_()}
        o, _ = op(variant, leaves)
        o.sum().backward()
    assert not whole[0].requires_grad and torch.equal(whole[0], o)
    assert leaves["k"].grad.isfinite().all() and leaves["k"].grad.any()


@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_decays_and_betas_of_other_dtypes(variant: str) -> None:
    """The decay may come in the dtype of the model, and beta in fp32."""
    inputs = inputs_of(variant, LENGTH, dtype=DTYPES[0])
    inputs["beta"] = inputs["beta"].float()
    if "log_decay" in inputs:
        inputs["log_decay"] = inputs["log_decay"].to(torch.bfloat16)
    three_way(variant, inputs)


def test_one_decay_a_head() -> None:
    inputs = inputs_of("attention", LENGTH, batch=2, heads=2)
    inputs["log_decay"] = torch.tensor([-0.01, -0.5], device=DEVICE)
    three_way("attention", inputs)


@some_variants
def test_compiles_without_a_break(variant: str) -> None:
    position_BT = torch.arange(LENGTH, device=DEVICE).unsqueeze(0)
    grids = {"segment_ids_BT": position_BT // 7, "keep_BT": position_BT != 3}
    inputs = inputs_of(variant, LENGTH)

    def call(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return op(variant, x, **grids)

    torch.compiler.reset()  # one function may be compiled only so often
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = (results(f, inputs, "triton") for f in (compiled, call))
    for name, result in want.items():
        torch.testing.assert_close(got[name], result, msg=lambda m, n=name: f"{n}: {m}")


@some_variants
def test_activation_checkpointing_changes_nothing(variant: str) -> None:
    inputs = inputs_of(variant, LENGTH)

    def call(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return op(variant, {n: y * 1.5 for n, y in x.items()})

    got = results(lambda x: checkpoint(call, x, use_reentrant=False), inputs, "triton")
    want = results(call, inputs, "triton")
    for name, result in want.items():
        assert torch.equal(got[name], result), name


@some_variants
def test_autocast_does_not_reach_inside(variant: str) -> None:
    inputs = inputs_of(variant, LENGTH)

    def under_autocast(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            return op(variant, x)

    got = results(under_autocast, inputs, "triton")
    want = results(lambda x: op(variant, x), inputs, "triton")
    for name, result in want.items():
        assert got[name].dtype == result.dtype and torch.equal(got[name], result), name


LARGE_GPU = GPU and torch.cuda.get_device_properties(0).total_memory > 100 * 2**30


@pytest.mark.gpu
@pytest.mark.skipif(not LARGE_GPU, reason="needs a GPU of more than 100 GiB")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "length"), [(257, 4096), (1, 257 * 4096)])
def test_offsets_beyond_32_bits(variant: str, batch: int, length: int) -> None:
    """The last tokens of more than 2 ** 31 numbers equal a run of these alone."""
    heads, width, last = 16, 128, 4096
    inputs_of(variant, 1)  # skips where there is no kernel
    torch.cuda.empty_cache()

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    x = {n: normal(batch, length, heads, width) for n in ("q", "k", "v")}
    x["beta"] = normal(batch, length, heads).sigmoid()
    if variant == "channel":
        x["log_decay"] = normal(batch, length, heads, width).mul_(0.1).sub_(1).exp_().neg_()
    elif variant != "no decay":
        x["log_decay"] = -normal(batch, length, heads).exp()
    assert x["q"].numel() > 2**31
    # In a long row the last tokens are a segment of their own.
    ids_BT = (torch.arange(length, device=DEVICE) >= length - last).long().expand(batch, -1)
    with dispatch.use("triton"), torch.no_grad():
        o, state = op(variant, x, segment_ids_BT=ids_BT)
        alone = {n: y[-1:, -last:].contiguous() for n, y in x.items()}
        o_alone, state_alone = op(variant, alone)
    torch.testing.assert_close(o[-1:, -last:], o_alone, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(state[-1:], state_alone, atol=2e-2, rtol=2e-2)
