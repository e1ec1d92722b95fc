"""linear_kl against the same formulas on whole logits, by autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ltconvert.kernels.linear_kl import blocks, linear_kl, linear_scores

N, D, E, V = 23, 11, 7, 53


def inputs(rows: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, D), (rows, D), (N, E), (rows, E))
    hs, ws, ht, wt = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return hs.requires_grad_(), ws.requires_grad_(), ht, wt


def whole(
    hs, ws, ht, wt, kind, temperature, beta, caps, mask, labels, kl_weight, ce_weight
) -> Tensor:
    def logits(h: Tensor, w: Tensor, cap: float | None) -> Tensor:
        z = h @ w.T
        return z if cap is None else cap * torch.tanh(z / cap)

    z = logits(hs, ws, caps[0])
    q = torch.softmax(z / temperature, -1)
    p = torch.softmax(logits(ht, wt, caps[1]) / temperature, -1)
    m = beta * p + (1 - beta) * q
    kls = {
        "forward": (p * (p / q).log()).sum(-1),
        "reverse": (q * (q / p).log()).sum(-1),
        "jsd": beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1),
    }
    loss = kl_weight * temperature**2 * kls[kind][mask].mean()
    chosen = mask & (labels >= 0)
    ce = -torch.softmax(z, -1)[chosen].gather(-1, labels[chosen][:, None]).log().mean()
    return loss + ce_weight * ce


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("caps", [(None, None), (4.0, 6.0)])
@pytest.mark.parametrize("ce_weight", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_value_and_gradients(kind, temperature, caps, ce_weight, chunk) -> None:
    hs, ws, ht, wt = inputs()
    mask = torch.arange(N) % 4 != 1
    labels = torch.where(torch.arange(N) % 5 == 0, -100, torch.arange(N) * 2 % V)
    expected = whole(hs, ws, ht, wt, kind, temperature, 0.3, caps, mask, labels, 1.3, ce_weight)
    right = torch.autograd.grad(3.0 * expected, (hs, ws))
    result = linear_kl(
        hs,
        ws,
        ht,
        wt,
        mask_N=mask,
        labels_N=labels if ce_weight else None,
        temperature=temperature,
        divergence=kind,
        beta=0.3,
        kl_weight=1.3,
        ce_weight=ce_weight,
        student_softcap=caps[0],
        teacher_softcap=caps[1],
        chunk_tokens=chunk,
    )
    found = torch.autograd.grad(3.0 * result.loss, (hs, ws))
    torch.testing.assert_close(result.loss, expected)
    assert result.tokens == int(mask.sum())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def test_equal_models_give_zero_and_no_gradient() -> None:
    hs, ws, *_ = inputs()
    for kind in ("forward", "reverse", "jsd"):
        result = linear_kl(hs, ws, hs, ws, divergence=kind)
        result.loss.backward()
        assert abs(result.loss.item()) < 1e-14 and float(hs.grad.abs().max()) < 1e-14


def test_padded_vocabularies_are_cut() -> None:
    hs, ws, ht, wt = inputs(rows=60)
    cut = linear_kl(hs, ws, ht, wt[:57], vocab_size=V)
    expected = linear_kl(hs, ws[:V], ht, wt[:V])
    torch.testing.assert_close(cut.loss, expected.loss)
    (grad,) = torch.autograd.grad(cut.loss, ws)
    assert grad.shape == (60, D) and not grad[V:].any()
    with pytest.raises(ValueError, match="60 and 57 rows"):
        linear_kl(hs, ws, ht, wt[:57])


def test_every_token_counts_to_the_last() -> None:
    hs, ws, ht, wt = inputs()
    before = linear_kl(hs, ws, ht, wt, chunk_tokens=4).loss.item()
    ht[-1] += 1.0
    assert linear_kl(hs, ws, ht, wt, chunk_tokens=4).loss.item() != before


def test_all_masked_is_zero_not_nan() -> None:
    hs, ws, ht, wt = inputs()
    result = linear_kl(hs, ws, ht, wt, mask_N=torch.zeros(N, dtype=torch.bool))
    result.loss.backward()
    assert float(result.loss) == 0 and not hs.grad.any()


def test_scores_are_the_definitions() -> None:
    hs, ws, ht, wt = (x.detach() for x in inputs())
    labels = torch.arange(N) % V
    scores = linear_scores(hs, ws, ht, wt, labels, chunk_tokens=6)
    q, p = torch.softmax(hs @ ws.T, -1), torch.softmax(ht @ wt.T, -1)
    torch.testing.assert_close(scores.kl_N, (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(scores.student_nll_N, -q[torch.arange(N), labels].log())
    torch.testing.assert_close(scores.teacher_nll_N, -p[torch.arange(N), labels].log())
    assert torch.equal(scores.agree_N, q.argmax(-1) == p.argmax(-1))


def test_bf16_autocast_stays_near_the_truth() -> None:
    """Judged against PyTorch's own error in the same dtype on whole logits."""
    hs, ws, ht, wt = inputs()
    every, labels = torch.ones(N, dtype=torch.bool), torch.zeros(N, dtype=torch.long)
    truth = whole(hs, ws, ht, wt, "forward", 1.0, 0.5, (None, None), every, labels, 1.0, 0.0)
    right = torch.autograd.grad(truth, (hs, ws))
    small = [x.detach().float().requires_grad_() for x in (hs, ws, ht, wt)]

    def grads(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, small[:2])

    with torch.autocast("cpu", torch.bfloat16):
        z, y = small[0] @ small[1].T, small[2] @ small[3].T
        plain = torch.nn.functional.kl_div(
            z.float().log_softmax(-1),
            y.float().log_softmax(-1).detach(),
            log_target=True,
            reduction="batchmean",
        )
        ours = linear_kl(*small, chunk_tokens=8).loss
    assert abs(float(ours - truth)) <= abs(float(plain - truth)) + 1e-2
    for truth_grad, ours_grad, plain_grad in zip(right, grads(ours), grads(plain), strict=True):
        worst = (truth_grad - plain_grad).abs().max()
        assert (truth_grad - ours_grad).abs().max() <= worst + 5e-3


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    hs, ws, ht, wt = inputs()
    labels = torch.arange(N)

    def results() -> list[Tensor]:
        r = linear_kl(hs, ws, ht, wt, labels_N=labels, ce_weight=0.5, divergence=kind)
        return [r.loss, r.kl, r.ce, *torch.autograd.grad(r.loss, (hs, ws))]

    expected = results()
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    for a, b in zip(results(), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_certain_models_stay_finite(kind: str) -> None:
    """Logits so far apart that all but one probability underflow in fp32."""
    hs, ws, ht, wt = (x.detach() for x in inputs())
    hs, ws = (200 * hs).float().requires_grad_(), ws.float().requires_grad_()
    result = linear_kl(hs, ws, 200 * ht.float(), wt.float(), divergence=kind)
    grads = torch.autograd.grad(result.loss, (hs, ws))
    assert result.loss.isfinite() and all(g.isfinite().all() for g in grads)


def test_a_small_kl_keeps_its_digits_in_fp32() -> None:
    hs, ws, *_ = (x.detach() for x in inputs())
    hs *= 3
    ht = hs + 1e-3 * torch.randn(hs.shape, generator=torch.Generator().manual_seed(4))
    p, q = (torch.log_softmax(h @ ws.T, -1) for h in (ht, hs))
    truth = (p.exp() * (p - q)).sum(-1).mean()
    assert 1e-6 < float(truth) < 1e-4
    got = linear_kl(hs.float(), ws.float(), ht.float(), ws.float()).kl
    assert abs(float(got) - float(truth)) < 2e-7


def test_parts_are_means_without_weights() -> None:
    hs, ws, ht, wt = (x.detach() for x in inputs())
    labels = torch.arange(N).where(torch.arange(N) % 3 > 0, -100)
    plain = linear_kl(hs, ws, ht, wt, temperature=2.0, labels_N=labels)
    r = linear_kl(hs, ws, ht, wt, temperature=2.0, labels_N=labels, kl_weight=0.3, ce_weight=0.7)
    torch.testing.assert_close(r.kl, plain.kl)
    torch.testing.assert_close(r.ce, plain.ce)
    torch.testing.assert_close(r.loss, 0.3 * 4 * r.kl + 0.7 * r.ce)
    assert not r.kl.requires_grad and not r.ce.requires_grad
    assert float(linear_kl(hs, ws, ht, wt).ce) == 0


class Widest(TorchDispatchMode):
    """Most rows of any tensor with a column for each token, but for transposed heads."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        logits = isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == V
        if logits and out.shape[0] not in (D, E):
            self.rows = max(self.rows, out.shape[0])
        return out


def test_logits_never_stand_whole() -> None:
    hs, ws, ht, wt = inputs()
    with Widest() as seen:
        result = linear_kl(hs, ws, ht, wt, labels_N=torch.arange(N), ce_weight=1.0, chunk_tokens=5)
        result.loss.backward()
        linear_scores(hs.detach(), ws.detach(), ht, wt, torch.arange(N), chunk_tokens=5)
    assert seen.rows == 5


def test_gradients_come_for_what_needs_them_and_twice_if_kept() -> None:
    hs, ws, ht, wt = inputs()
    frozen = linear_kl(hs, ws.detach(), ht, wt).loss
    (alone,) = torch.autograd.grad(frozen, hs)
    loss = linear_kl(hs, ws, ht, wt).loss
    first = torch.autograd.grad(loss, (hs, ws), retain_graph=True)
    second = torch.autograd.grad(loss, (hs, ws))
    assert torch.equal(first[0], alone)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_heads_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hs, ws, ht, wt = (x.detach().float() for x in inputs())
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.shape in (ws.shape, wt.shape):
                casts.append(out.dtype)
            return out

    with torch.autocast("cpu", torch.bfloat16), Casts():
        linear_kl(hs, ws, ht, wt, chunk_tokens=3)
    assert casts == [torch.bfloat16] * 2


@pytest.mark.parametrize("width", [512, 700])
def test_argmax_is_the_first_of_equals(width: int) -> None:
    z = torch.randint(0, 9, (40, width), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(blocks.argmax(z), z.argmax(-1))


def test_wrong_arguments_are_named() -> None:
    hs, ws, ht, wt = inputs()
    wrong = {
        "student head must be": (hs, ws[:, 1:], ht, wt, {}),
        "equal tokens": (hs[1:], ws, ht, wt, {}),
        "labels must be below 53": (hs, ws, ht, wt, {"labels_N": torch.full((N,), V)}),
        "labels must be \\[23\\]": (hs, ws, ht, wt, {"labels_N": torch.zeros(3).long()}),
        "mask must be": (hs, ws, ht, wt, {"mask_N": torch.ones(3).bool()}),
        "vocab_size must be 1 to 53": (hs, ws, ht, wt, {"vocab_size": 99}),
        "needs labels_N": (hs, ws, ht, wt, {"ce_weight": 1.0}),
        "temperature must be above 0": (hs, ws, ht, wt, {"temperature": 0.0}),
        "divergence must be": (hs, ws, ht, wt, {"divergence": "l2"}),
    }
    for message, (*tensors, options) in wrong.items():
        with pytest.raises(ValueError, match=message):
            linear_kl(*tensors, **options)
