"""The Triton backend of linear_kl: fp64 truth, plain PyTorch and kernel, three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from ltconvert.kernels import dispatch
from ltconvert.kernels.linear_kl import LinearKL, chunks, linear_kl, linear_scores
from ltconvert.kernels.parity import check, judge

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
UPSTREAM = 3.0  # what the loss is multiplied by before the backward pass

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]


class Sizes(NamedTuple):
    """N tokens, D and E widths, V vocabulary, K tokens of a top-k."""

    N: int
    D: int
    E: int
    V: int
    K: int


SIZES = Sizes(333, 256, 192, 5003, 50) if GPU else Sizes(6, 11, 7, 530, 9)
SCALE = 2.0


class Inputs(NamedTuple):
    """Leaves in the working dtype; ``mask_N`` and ``labels_N`` where the case asks for them."""

    student_ND: Tensor
    student_head_VD: Tensor
    teacher_NE: Tensor
    teacher_head_VE: Tensor
    mask_N: Tensor | None
    labels_N: Tensor | None


def inputs(
    dtype: torch.dtype, sizes: Sizes = SIZES, *, mask: bool = False, labels: bool = False
) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    shapes = (sizes.N, sizes.D), (sizes.V, sizes.D), (sizes.N, sizes.E), (sizes.V, sizes.E)
    scales = 1.0, SCALE / sizes.D**0.5, 1.0, SCALE / sizes.E**0.5
    tensors = [
        (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    every = torch.arange(sizes.N, device=DEVICE)
    ids = torch.where(every % 5 == 0, -100, every * 37 % sizes.V)
    return Inputs(*tensors, every % 4 != 1 if mask else None, ids if labels else None)


def top_k(x: Inputs, sizes: Sizes = SIZES, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The teacher's most probable tokens and a few others, with log-probabilities in fp32."""
    log_p_NV = (x.teacher_NE.float() @ x.teacher_head_VE.float().T / temperature).log_softmax(-1)
    index_NK = log_p_NV.topk(sizes.K, -1).indices.flip(-1)
    return index_NK, log_p_NV.gather(-1, index_NK).detach()


def definition(
    x: Inputs,
    work: torch.dtype,
    *,
    form: str = "head",
    divergence: str = "forward",
    temperature: float = 1.0,
    beta: float = 0.5,
    caps: tuple[float | None, float | None] = (None, None),
    weights: tuple[float, float] = (1.0, 0.0),
    reduction: str = "mean",
) -> dict[str, Tensor | None]:
    """Loss, KL, CE and gradients by autograd on whole logits, products and softmax in ``work``."""
    lone = [t.detach().to(work).requires_grad_() for t in x[:4]]

    def logits(h: Tensor, w: Tensor, cap: float | None) -> Tensor:
        z = h @ w.T
        z = z if z.dtype == torch.float64 else z.float()
        return z if cap is None else cap * torch.tanh(z / cap)

    keep = torch.ones(len(x.student_ND), dtype=torch.bool, device=DEVICE)
    keep = keep if x.mask_N is None else x.mask_N
    z = logits(lone[0], lone[1], caps[0])[keep]
    y = logits(lone[2], lone[3], caps[1]).detach()[keep]
    log_q, log_p = (z / temperature).log_softmax(-1), (y / temperature).log_softmax(-1)
    if form == "topk":
        index, given = (t[keep] for t in top_k(x, temperature=temperature))
        log_p, log_q = _with_rest(given.to(log_q), log_q, index)
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    kls = {
        "forward": (log_p.exp() * (log_p - log_q)).sum(-1),
        "reverse": (log_q.exp() * (log_q - log_p)).sum(-1),
        "jsd": beta * (log_p.exp() * (log_p - log_m)).sum(-1)
        + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1),
    }
    kl, ce, reduced_ce = kls[divergence], z.new_zeros(()), z.new_zeros(())
    reduce = torch.mean if reduction == "mean" else torch.sum
    if x.labels_N is not None:
        labels = x.labels_N[keep]
        nll = -z.log_softmax(-1)[labels >= 0].gather(-1, labels[labels >= 0][:, None])
        ce, reduced_ce = nll.mean(), reduce(nll)
    loss = weights[0] * temperature**2 * reduce(kl) + weights[1] * reduced_ce
    grads = torch.autograd.grad(UPSTREAM * loss, lone[:2])
    return {
        "loss": loss.detach(), "kl": kl.mean().detach(), "ce": ce.detach(),
        "grad hidden": grads[0], "grad head": grads[1],
    }  # fmt: skip


def _with_rest(log_p: Tensor, log_q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, K + 1], the last of all other tokens."""
    others = torch.ones_like(log_q, dtype=torch.bool).scatter(-1, index, False)
    rest_q = log_q.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    rest_p = (1 - log_p.exp().sum(-1, keepdim=True)).log()
    return torch.cat([log_p, rest_p], -1), torch.cat([log_q.gather(-1, index), rest_q], -1)


def call(x: Inputs, case: dict[str, Any], backend: str = "triton", **more: Any) -> LinearKL:
    """``linear_kl`` with the options of a case."""
    case = dict(case)
    form, caps = case.pop("form", "head"), case.pop("caps", (None, None))
    weights = case.pop("weights", (1.0, 0.0))
    teacher: dict[str, Any] = {}
    if form == "head":
        teacher = {"teacher_hidden_NE": x.teacher_NE, "teacher_head_VE": x.teacher_head_VE}
    if form == "logits":
        teacher = {"teacher_logits_NV": x.teacher_NE @ x.teacher_head_VE.T}
    if form == "topk":
        teacher = {"teacher_topk": top_k(x, temperature=case.get("temperature", 1.0))}
    with dispatch.use(backend):
        return linear_kl(
            x.student_ND,
            x.student_head_VD,
            mask_N=x.mask_N,
            labels_N=x.labels_N,
            student_softcap=caps[0],
            teacher_softcap=caps[1],
            kl_weight=weights[0],
            ce_weight=weights[1],
            **teacher,
            **case,
            **more,
        )


def found(x: Inputs, result: LinearKL) -> dict[str, Tensor | None]:
    grads = torch.autograd.grad(UPSTREAM * result.loss, (x.student_ND, x.student_head_VD))
    return {
        "loss": result.loss.detach(), "kl": result.kl, "ce": result.ce,
        "grad hidden": grads[0], "grad head": grads[1],
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "forward": {},
    "forward, warm": {"temperature": 2.5},
    "forward, all": {"temperature": 2.0, "caps": (4.0, 6.0), "weights": (1.3, 0.7)},
    "forward, cold, labels": {"temperature": 0.5, "weights": (0.6, 0.4)},
    "labels, no KL": {"weights": (0.0, 1.0)},
    "forward, sum": {"weights": (0.5, 0.1), "reduction": "sum"},
    "reverse": {"divergence": "reverse"},
    "reverse, all": {
        "divergence": "reverse", "temperature": 2.0, "caps": (4.0, None), "weights": (1.3, 0.7),
    },
    "jsd": {"divergence": "jsd"},
    "jsd, all": {
        "divergence": "jsd", "beta": 0.3, "temperature": 2.0, "caps": (None, 6.0),
        "weights": (1.3, 0.7),
    },
    "logits": {"form": "logits"},
    "logits, all": {
        "form": "logits", "divergence": "jsd", "temperature": 2.0, "caps": (4.0, 6.0),
        "weights": (1.3, 0.7),
    },
    "top-k": {"form": "topk"},
    "top-k, all": {
        "form": "topk", "temperature": 2.0, "caps": (4.0, None), "weights": (1.3, 0.7),
    },
    "top-k, sum": {"form": "topk", "weights": (0.5, 0.1), "reduction": "sum"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_three_ways(name: str, dtype: torch.dtype) -> None:
    """Where there are weights there are labels and a mask, and what it leaves out is NaN."""
    case = CASES[name]
    x = inputs(dtype, mask="weights" in case, labels="weights" in case)
    truth, plain = definition(x, torch.float64, **case), definition(x, dtype, **case)
    if x.mask_N is not None:
        for tensor in (x.student_ND, x.teacher_NE):
            tensor.data[~x.mask_N] = torch.nan
    kernel = found(x, call(x, case, chunk_tokens=SIZES.N // 2))
    check(judge(truth, plain, kernel, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["jsd, all", "top-k"])
def test_inputs_that_are_not_contiguous(name: str, dtype: torch.dtype) -> None:
    x = inputs(dtype, labels=True, mask=True)
    expected = found(x, call(x, CASES[name]))
    strided = [t.detach().repeat_interleave(2, -1)[:, ::2].requires_grad_() for t in x[:2]]
    turned = [t.detach().T.contiguous().T for t in x[2:4]]
    rest = [t.repeat_interleave(3)[::3] for t in x[4:] if t is not None]
    y = Inputs(*strided, *turned, *rest)
    check(judge(expected, expected, found(y, call(y, CASES[name])), dtype))


@pytest.mark.parametrize("form", ["head", "logits", "topk"])
def test_padded_vocabularies_are_cut(form: str) -> None:
    x = inputs(torch.float32)
    case = {"form": form}
    expected = found(x, call(x, case))
    wide = [
        torch.cat([t.detach(), torch.full_like(t[:rows], torch.nan)]).requires_grad_()
        for t, rows in ((x.student_head_VD, 5), (x.teacher_head_VE, 3))
    ]
    y = x._replace(student_head_VD=wide[0])
    if form != "topk":
        y = y._replace(teacher_head_VE=wide[1])
    got = found(y, call(y, case, vocab_size=SIZES.V))
    grad_VD = got["grad head"]
    assert grad_VD is not None and not grad_VD[SIZES.V :].any()
    got["grad head"] = grad_VD[: SIZES.V]
    check(judge(expected, expected, got, torch.float32))


@pytest.mark.parametrize("name", ["forward, all", "reverse", "jsd", "logits", "top-k"])
@pytest.mark.parametrize("tokens", [0, SIZES.N])
def test_nothing_to_count_is_zero_not_nan(name: str, tokens: int) -> None:
    x = inputs(torch.float32, SIZES._replace(N=tokens), labels=True)
    x = x._replace(mask_N=torch.zeros(tokens, dtype=torch.bool, device=DEVICE))
    x.student_ND.data.fill_(torch.nan)
    result = call(x, CASES[name])
    assert int(result.tokens) == 0
    assert not any(value is None or bool(value.any()) for value in found(x, result).values())


def test_tokens_are_counted_where_a_mask_says_so() -> None:
    x = inputs(torch.float32)
    assert call(x, {}).tokens == SIZES.N
    x = inputs(torch.float32, mask=True)
    assert x.mask_N is not None and int(call(x, {}).tokens) == int(x.mask_N.sum())


@pytest.mark.parametrize("name", ["forward, all", "reverse", "jsd", "top-k"])
def test_the_same_bits_twice(name: str) -> None:
    x = inputs(DTYPES[-1], mask=True, labels=True)
    first, second = (found(x, call(x, CASES[name], chunk_tokens=5)) for _ in range(2))
    for a, b in zip(first.values(), second.values(), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_equal_models_have_no_gradient(divergence: str) -> None:
    x = inputs(torch.float32)
    x = x._replace(teacher_NE=x.student_ND, teacher_head_VE=x.student_head_VD)
    result = found(x, call(x, {"divergence": divergence}))
    assert all(t is not None and float(t.abs().max()) < 1e-6 for t in result.values())


def test_a_small_kl_keeps_its_digits() -> None:
    x = inputs(torch.float32)
    noise = torch.randn(x.student_ND.shape, generator=torch.Generator().manual_seed(4))
    near = x.student_ND.detach() + 1e-3 * noise.to(DEVICE)
    x = x._replace(teacher_NE=near, teacher_head_VE=x.student_head_VD)
    truth = definition(x, torch.float64)["kl"]
    assert truth is not None and 1e-7 < float(truth) < 1e-4
    assert abs(float(call(x, {}).kl) - float(truth)) < 5e-7


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_certain_models_stay_finite(divergence: str) -> None:
    x = inputs(torch.float32)
    x.student_ND.data *= 300
    x.teacher_NE.data *= 300
    result = found(x, call(x, {"divergence": divergence}))
    assert all(t is not None and bool(t.isfinite().all()) for t in result.values())


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_teacher_may_exclude_tokens(backend: str) -> None:
    x = inputs(torch.float32)
    logits = (x.teacher_NE @ x.teacher_head_VE.T).detach()
    logits[:, 3:9] = -torch.inf
    z = (x.student_ND @ x.student_head_VD.T).log_softmax(-1)
    y = logits.log_softmax(-1)
    truth = torch.where(y.isinf(), 0.0, y.exp() * (y - z)).sum(-1).mean()
    right = torch.autograd.grad(truth, x.student_ND)[0]
    with dispatch.use(backend):
        loss = linear_kl(x.student_ND, x.student_head_VD, teacher_logits_NV=logits).loss
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, x.student_ND)[0], right)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_whole_vocabulary_as_top_k_is_the_forward_kl(backend: str) -> None:
    sizes = SIZES._replace(V=20, K=20)
    x = inputs(torch.float32, sizes)
    expected = found(x, call(x, {}))
    index, log_p = top_k(x, sizes)
    with dispatch.use(backend):
        result = linear_kl(x.student_ND, x.student_head_VD, teacher_topk=(index, log_p))
    check(judge(expected, expected, found(x, result), torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_top_k_of_one_sure_token_is_the_cross_entropy(backend: str, dtype: torch.dtype) -> None:
    x = inputs(dtype, labels=True)
    assert x.labels_N is not None

    def whole(work: torch.dtype) -> dict[str, Tensor | None]:
        h, w = (t.detach().to(work).requires_grad_() for t in x[:2])
        z = h @ w.T
        ce = F.cross_entropy(z if work == torch.float64 else z.float(), x.labels_N)
        grads = torch.autograd.grad(UPSTREAM * ce, (h, w))
        return {"loss": ce.detach(), "grad hidden": grads[0], "grad head": grads[1]}

    label_N1 = x.labels_N.clamp(min=0)[:, None]
    sure = label_N1, torch.zeros_like(label_N1, dtype=torch.float32)
    with dispatch.use(backend):
        result = linear_kl(*x[:2], teacher_topk=sure, mask_N=x.labels_N >= 0)
    numbers = found(x, result)
    kernel = {name: numbers[name] for name in ("loss", "grad hidden", "grad head")}
    check(judge(whole(torch.float64), whole(dtype), kernel, dtype))


@pytest.mark.parametrize("name", ["logits, all", "top-k, all", "top-k, sum", "forward, sum"])
def test_the_reference_has_the_same_forms(name: str) -> None:
    case = CASES[name]
    x = inputs(torch.float32, mask=True, labels=True)
    kernel = found(x, call(x, case))
    reference = found(x, call(x, case, "reference", chunk_tokens=5))
    check(judge(reference, reference, kernel, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_scores_three_ways(dtype: torch.dtype, cap: float | None) -> None:
    x = inputs(dtype)
    labels = torch.arange(SIZES.N, device=DEVICE) % SIZES.V

    def scores(work: torch.dtype) -> dict[str, Tensor | None]:
        h, w, g, v = (t.detach().to(work) for t in x[:4])
        z, y = (t if work == torch.float64 else t.float() for t in (h @ w.T, g @ v.T))
        z = z if cap is None else cap * torch.tanh(z / cap)
        log_q, log_p = z.log_softmax(-1), y.log_softmax(-1)
        nll = [-t.gather(-1, labels[:, None])[:, 0] for t in (log_q, log_p)]
        return {"kl": (log_p.exp() * (log_p - log_q)).sum(-1), "q": nll[0], "p": nll[1]}

    with dispatch.use("triton"):
        got = linear_scores(*x[:4], labels, student_softcap=cap, chunk_tokens=SIZES.N // 2)
    kernel = {"kl": got.kl_N, "q": got.student_nll_N, "p": got.teacher_nll_N}
    check(judge(scores(torch.float64), scores(dtype), kernel, dtype))
    assert not any(t.requires_grad for t in got)


def test_scores_take_the_first_of_equal_maxima() -> None:
    """Logits of few different values: every row has its maximum many times."""
    generator = torch.Generator().manual_seed(3)
    h = torch.ones(1, 1, device=DEVICE)
    heads = [torch.randint(0, 4, (1300, 1), generator=generator).float() for _ in range(2)]
    labels = torch.zeros(1, dtype=torch.long, device=DEVICE)
    for first in ((0, 0), (5, 5), (700, 701), (1299, 1299), (1299, 3)):
        w, v = (head.clone().to(DEVICE) for head in heads)
        for head, start in zip((w, v), first, strict=True):
            head[:start] = head[:start].clamp(max=2)
            head[start] = 3
        with dispatch.use("triton"):
            agree_N = linear_scores(h, w, h, v, labels).agree_N
        assert bool(agree_N) == (first[0] == first[1])


def test_only_needed_gradients_are_made() -> None:
    x = inputs(torch.float32)
    both = torch.autograd.grad(call(x, {}).loss, x[:2])
    frozen = x._replace(student_head_VD=x.student_head_VD.detach())
    assert torch.equal(torch.autograd.grad(call(frozen, {}).loss, x.student_ND)[0], both[0])
    frozen = x._replace(student_ND=x.student_ND.detach())
    assert torch.equal(torch.autograd.grad(call(frozen, {}).loss, x.student_head_VD)[0], both[1])
    with torch.no_grad():
        assert not call(x, {}).loss.requires_grad
    loss = call(x, {}).loss
    kept = [torch.autograd.grad(loss, x[:2], retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize("name", ["forward, all", "top-k"])
def test_compiles_whole_and_recomputes(name: str) -> None:
    x = inputs(torch.float32, mask=True, labels=True)
    torch._dynamo.reset()

    def loss(student_ND: Tensor, head_VD: Tensor) -> Tensor:
        y = x._replace(student_ND=2 * student_ND, student_head_VD=head_VD)
        caps = CASES[name].get("caps", (None, None))
        teacher = {"teacher_topk": topk} if name == "top-k" else {
            "teacher_hidden_NE": x.teacher_NE, "teacher_head_VE": x.teacher_head_VE
        }  # fmt: skip
        result = linear_kl(
            y.student_ND, y.student_head_VD, mask_N=x.mask_N, labels_N=x.labels_N,
            student_softcap=caps[0], ce_weight=0.5, **teacher,
        )  # fmt: skip
        return result.loss + 0 * result.tokens

    topk = top_k(x)
    with dispatch.use("triton"):
        eager = loss(*x[:2])
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*x[:2])
        again = checkpoint(loss, *x[:2], use_reentrant=False)
        right = torch.autograd.grad(eager, x[:2])
        for other in (compiled, again):
            assert torch.equal(other, eager)
            for a, b in zip(torch.autograd.grad(other, x[:2]), right, strict=True):
                torch.testing.assert_close(a, b)


def test_scores_compile_whole() -> None:
    x, labels = inputs(torch.float32), torch.arange(SIZES.N, device=DEVICE)
    with dispatch.use("triton"):
        eager = linear_scores(*x[:4], labels)
        compiled = torch.compile(linear_scores, fullgraph=True, backend="aot_eager")
        for a, b in zip(compiled(*x[:4], labels), eager, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["head", "topk"])
def test_autocast_sets_the_dtype_of_products(form: str) -> None:
    x = inputs(torch.float32)
    truth = definition(x, torch.float64, form=form)
    with torch.autocast(DEVICE, torch.bfloat16):
        plain = definition(x, torch.float32, form=form)
        kernel = found(x, call(x, {"form": form}))
    assert kernel["grad head"] is not None and kernel["grad head"].dtype == torch.float32
    assert kernel["loss"] is not None and kernel["loss"].dtype == torch.float32
    check(judge(truth, plain, kernel, torch.bfloat16))


def test_the_chunk_is_stated_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {}
    with caplog.at_level(logging.INFO, logger=chunks.__name__):
        for tokens in (1, 300, 5000, 5000):
            sizes[tokens] = chunks.chunk_size(None, tokens, 99, 512, torch.device("cpu"))
    assert sizes == {1: 1, 300: 300, 5000: 1792}
    assert [r.getMessage().split(":")[1] for r in caplog.records][-1].startswith(" 5000 tokens")
    assert len(caplog.records) == 3
    assert chunks.chunk_size(7, 5000, 99, 512, torch.device("cpu")) == 7


def test_wrong_arguments_are_named() -> None:
    x = inputs(torch.float32)
    topk = top_k(x)
    hidden = {"teacher_hidden_NE": x.teacher_NE, "teacher_head_VE": x.teacher_head_VE}
    logits = x.teacher_NE @ x.teacher_head_VE.T
    wrong: dict[str, dict[str, Any]] = {
        "must be given once": {},
        "given once: as teacher_hidden_NE": {**hidden, "teacher_topk": topk},
        "come together": {"teacher_hidden_NE": x.teacher_NE},
        "needs; use 'forward'": {"teacher_topk": topk, "divergence": "reverse"},
        "caps logits": {"teacher_topk": topk, "teacher_softcap": 3.0},
        "reduction must be": {**hidden, "reduction": "none"},
        "teacher_topk must be two": {"teacher_topk": (topk[0], topk[1][:, 1:])},
        "rows; say how many": {"teacher_logits_NV": logits[:, 1:]},
        "equal tokens": {"teacher_logits_NV": logits[1:]},
    }
    if not GPU:
        wrong["indices must be below"] = {"teacher_topk": (topk[0] + SIZES.V, topk[1])}
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            linear_kl(x.student_ND, x.student_head_VD, **options)
    with dispatch.use("triton"), pytest.raises(ValueError, match="computes in fp32, got fp64"):
        linear_kl(x.student_ND.double(), x.student_head_VD.double(), *(t.double() for t in x[2:4]))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["forward, all", "jsd", "top-k, all"])
def test_nothing_waits_for_the_gpu(name: str) -> None:
    x = inputs(torch.bfloat16, mask=True, labels=True)
    found(x, call(x, CASES[name]))  # compiles, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found(x, call(x, CASES[name]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_real_vocabularies_three_ways(vocab: int) -> None:
    sizes = Sizes(1000, 256, 128, vocab, 64)
    x = inputs(torch.bfloat16, sizes, mask=True, labels=True)
    case = {"weights": (1.0, 0.5), "temperature": 2.0}
    truth, plain = definition(x, torch.float64, **case), definition(x, torch.bfloat16, **case)
    check(judge(truth, plain, found(x, call(x, case)), torch.bfloat16))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_offsets_past_two_to_the_31() -> None:
    tokens, vocab = 16384, 151936
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = inputs(torch.bfloat16, Sizes(tokens, 16, 16, vocab, 4))
    whole = found(x, call(x, {"reduction": "sum"}, chunk_tokens=tokens))
    parts = found(x, call(x, {"reduction": "sum"}, chunk_tokens=2048))
    check(judge(parts, parts, whole, torch.bfloat16))
