"""Chunkwise kernels held against fp64 and against plain PyTorch on the same inputs.

Without a GPU the kernels run in Triton's interpreter, which is slow and computes fp32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from recurrence_case import make_inputs
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decay_attention import decay_attention, decay_attention_step
from ltconvert.kernels.delta_rule import delta_rule, delta_rule_step
from ltconvert.kernels.parity import check, judge

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
# Of the delta rule, which decay it has; and decay attention.
VARIANTS = ["no decay", "token", "channel", "attention"]

Call = Callable[..., tuple[Tensor, Tensor]]


def op(variant: str, x: Mapping[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    """The public op of a variant."""
    options["initial_state_BHKV"] = x.get("initial_state_BHKV")
    if variant == "attention":
        options.pop("l2norm_qk", None)
        return decay_attention(x["q"], x["k"], x["v"], x["log_decay"], **options)
    return delta_rule(x["q"], x["k"], x["v"], x["beta"], x.get("log_decay"), **options)


def steps(variant: str, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The public op of one token, over all tokens."""
    state, outputs = x["initial_state_BHKV"], []
    for t in range(x["q"].shape[1]):
        now = {n: y[:, t] for n, y in x.items() if n != "initial_state_BHKV"}
        if variant == "attention":
            o, state = decay_attention_step(now["q"], now["k"], now["v"], now["log_decay"], state)
        else:
            o, state = delta_rule_step(
                now["q"], now["k"], now["v"], now["beta"], now.get("log_decay"), state
            )
        outputs.append(o)
    return torch.stack(outputs, 1), state


def inputs_of(
    variant: str, length: int, *, batch: int = 1, heads: int = 1, width: int = 16, value: int = 24,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """q, k, v and beta in `dtype`, log decay and state in fp32 as mixers have them.

    Heads forget at different speeds, the first within a thousand tokens, the last within one.
    """
    op_name = "decay_attention" if variant == "attention" else "delta_rule"
    if "triton" not in dispatch.OPS[op_name]:
        pytest.skip(f"no triton kernel for {op_name} yet")
    decay = {"no decay": None, "attention": "token"}.get(variant, variant)
    inputs = make_inputs(length, batch, heads, width, value, decay, seed)
    if variant == "attention":
        del inputs["beta"]
    if decay is not None:
        speed_H = torch.logspace(-3, 0, heads, dtype=torch.float64)
        inputs["log_decay"] *= speed_H.unsqueeze(-1) if decay == "channel" else speed_H
    fp32 = ("log_decay", "initial_state_BHKV")
    return {n: x.to(DEVICE, torch.float32 if n in fp32 else dtype) for n, x in inputs.items()}


def results(
    call: Call, inputs: Mapping[str, Tensor], backend: str, like: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Outputs, final state and all gradients of `call(inputs)`, under random weights.

    `like`: compute in fp64 with outputs weighed as if they had this dtype.
    """
    dtype = None if like is None else torch.float64
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in inputs.items()}
    with dispatch.use(backend):
        o, final = call(leaves)
        g = torch.Generator().manual_seed(1)
        do, dfinal = (torch.randn(y.shape, generator=g).to(y.device) for y in (o, final))
        do = do.to(inputs["v"].dtype)  # rounded alike in every run
        torch.autograd.backward((o, final), (do.to(o.dtype), dfinal.to(final.dtype)))
    grads = {f"gradient of {n}": x.grad for n, x in leaves.items()}
    return {"output": o.detach(), "final state": final.detach()} | grads


def three_way(
    variant: str, inputs: Mapping[str, Tensor], call: Call | None = None, **options: object
) -> dict[str, Tensor | None]:
    """Check the kernel against fp64 and plain PyTorch; its results. `call`: another way to it."""

    def whole(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return op(variant, x, **options)

    truth = results(whole, inputs, "reference", like=inputs["v"])
    plain = results(whole, inputs, "reference")
    kernel = results(call or whole, inputs, "triton")
    for name, result in kernel.items():
        assert result is None or result.dtype == plain[name].dtype, name
    check(judge(truth, plain, kernel, inputs["v"].dtype))
    return kernel
