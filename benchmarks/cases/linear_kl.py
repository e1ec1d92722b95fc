"""KL between two models from hidden states and heads, forward and backward.

N tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import Case, Function, Inputs, Peer, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.benchmarks.rows import Target
from ltconvert.kernels.linear_kl import linear_kl

PHASE = "fwd+bwd"
SHAPES = {
    "full": ((8192, 2048, 49152), (8192, 2048, 151936)),
    "quick": ((8192, 2048, 49152),),
    "tiny": ((64, 32, 500),),
}
TARGETS = {49152: Target("torch", 0.6, peak_gib=1.2), 151936: Target("torch", 1.0, peak_gib=3.0)}
SAMPLE_TOKENS = 1000


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """A small and a large vocabulary."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(tokens: int, width: int, vocab: int, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        teacher = draw.normal(tokens, width)
        heads = draw.normal(vocab, width, scale=2.0 * width**-0.5)  # logits as peaked as a model's
        return {
            "student": teacher + draw.normal(tokens, width, scale=0.3),
            "student_head": heads + draw.normal(vocab, width, scale=0.3 * width**-0.5),
            "teacher": teacher,
            "teacher_head": heads,
        }

    return Case(
        op="linear_kl",
        shape=f"{tokens}x{width}x{vocab}",
        make=make,
        ours=ours,
        grads=("student", "student_head"),
        phases=(PHASE,),
        peers={
            "torch": Peer(partial(_torch, torch.bfloat16)),
            "torch, fp32 softmax": Peer(partial(_torch, torch.float32)),
            "fla": Peer(_fla),
            "liger": Peer(_liger),
        },
        sample=_sample,
        sample_first=True,
        floor=partial(_products, device=device),
        floor_name="4 products",
        targets={PHASE: TARGETS[vocab]} if vocab in TARGETS else {},
        peer_memory=True,
    )


def _sample(name: str, tensor: Tensor) -> Tensor:
    return tensor[-SAMPLE_TOKENS:] if name in ("student", "teacher") else tensor


def ours(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    """Mean KL(teacher || student)."""
    return linear_kl(student, student_head, teacher, teacher_head).loss


def _products(inputs: Inputs, device: torch.device) -> dict[str, float]:
    """Two logits, and two gradients from one of them: nothing else."""
    hs, ws, ht, wt = (x.detach() for x in inputs.values())

    def call() -> None:
        grad = hs @ ws.T
        ht @ wt.T
        grad @ ws
        grad.T @ hs

    return {PHASE: timing.median_ms(call, device)}


def _torch(dtype: torch.dtype) -> Function:
    """Whole logits and autograd, log-softmax and KL in ``dtype``."""

    def kl(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
        student_NV = F.log_softmax(F.linear(student, student_head), -1, dtype=dtype)
        with torch.no_grad():
            teacher_NV = F.log_softmax(F.linear(teacher, teacher_head), -1, dtype=dtype)
        return F.kl_div(student_NV, teacher_NV, log_target=True, reduction="batchmean")

    return kl


def _fla() -> Function:
    from fla.modules.fused_kl_div import FusedKLDivLoss

    loss = FusedKLDivLoss()
    return lambda student, student_head, teacher, teacher_head: loss(
        student, teacher, student_head, teacher_head
    )


def _liger() -> Function:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.0)  # 0 stands for the forward KL there
    return lambda student, student_head, teacher, teacher_head: loss(
        student, student_head, teacher, teacher_head, None
    )
