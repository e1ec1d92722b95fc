"""linear_kl against the same formulas on whole logits, by autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ltconvert.kernels.linear_kl import linear_kl, linear_scores

N, D, E, V = 23, 11, 7, 53


def inputs(rows: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, D), (rows, D), (N, E), (rows, E))
    hs, ws, ht, wt = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return hs.requires_grad_(), ws.requires_grad_(), ht, wt


def whole(hs, ws, ht, wt, kind, temperature, beta, caps, mask, labels, kl_weight, ce_weight) -> Tensor:
    def logits(h: Tensor, w: Tensor, cap: float | None) -> Tensor:
        z = h @ w.T
        return z if cap is None else cap * torch.tanh(z / cap)

    z = logits(hs, ws, caps[0])
    q, p = torch.softmax(z / temperature, -1), torch.softmax(logits(ht, wt, caps[1]) / temperature, -1)
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
        hs, ws, ht, wt, mask_N=mask, labels_N=labels if ce_weight else None, temperature=temperature,
        divergence=kind, beta=0.3, kl_weight=1.3, ce_weight=ce_weight, student_softcap=caps[0],
        teacher_softcap=caps[1], chunk_tokens=chunk,
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
        assert abs(float(result.loss)) < 1e-14 and float(hs.grad.abs().max()) < 1e-14


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
    before = float(linear_kl(hs, ws, ht, wt, chunk_tokens=4).loss)
    ht[-1] += 1.0
    assert float(linear_kl(hs, ws, ht, wt, chunk_tokens=4).loss) != before


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
    truth = whole(hs, ws, ht, wt, "forward", 1.0, 0.5, (None, None), torch.ones(N, dtype=torch.bool),
                  torch.zeros(N, dtype=torch.long), 1.0, 0.0)
    right = torch.autograd.grad(truth, (hs, ws))
    small = [x.detach().float().requires_grad_() for x in (hs, ws, ht, wt)]

    def grads(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, small[:2])

    with torch.autocast("cpu", torch.bfloat16):
        z, y = small[0] @ small[1].T, small[2] @ small[3].T
        plain = torch.nn.functional.kl_div(
            z.float().log_softmax(-1), y.float().log_softmax(-1).detach(), log_target=True, reduction="batchmean"
        )
        ours = linear_kl(*small, chunk_tokens=8).loss
    assert abs(float(ours - truth)) <= abs(float(plain - truth)) + 1e-2
    for truth_grad, ours_grad, plain_grad in zip(right, grads(ours), grads(plain), strict=True):
        worst = (truth_grad - plain_grad).abs().max()
        assert (truth_grad - ours_grad).abs().max() <= worst + 5e-3
