"""Linear mixers against their own formulas, token by token in fp64, and what bounds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import scatter, tiny_model, tiny_spec, tokens
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.mixers import MIXERS, SequenceContext
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.teachers.spec import TeacherSpec

LINEAR = [name for name, made in MIXERS.items() if issubclass(made, LinearMixer)]
ALONE = [name for name in LINEAR if not MIXERS[name].keeps_keys]
DECAYING = [name for name in ALONE if MIXERS[name].decays]  # type: ignore[attr-defined]
THETA = 10_000.0
Head = tuple[Tensor, Tensor, Tensor]  # q, k, v of one head, [T, D]


def mixer_of(kind: str, spec: TeacherSpec, **options: Any) -> Any:
    window = {"window": 4} if MIXERS[kind].keeps_keys else {}
    return MIXERS[kind](spec, 0, **({"conv_size": 4} | window | options))


def projected(x_TC: Tensor, linear: torch.nn.Linear) -> Tensor:
    return x_TC @ linear.weight.T


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def rms_normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def rotated(x_TD: Tensor) -> Tensor:
    """RoPE as a product of complex numbers: channel i is the real part to channel i + D/2."""
    length, width = x_TD.shape
    angle = torch.outer(
        torch.arange(length, dtype=torch.float64),
        THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width),
    )
    half = width // 2
    turned = torch.complex(x_TD[:, :half], x_TD[:, half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def delta_rule(h: int, head: Head, beta_TH: Tensor, decay: Callable[[int], Tensor]) -> Tensor:
    """arXiv 2412.06464, equation 10; ``decay(t)`` is of the rows of the state."""
    q, k, v = head
    k, q = k / k.norm(dim=-1, keepdim=True), q / q.norm(dim=-1, keepdim=True)
    state, out = torch.zeros(v.shape[1], v.shape[1], dtype=v.dtype), []
    for t in range(len(v)):
        state = decay(t).reshape(-1, 1) * state
        state = state + beta_TH[t, h] * torch.outer(k[t], v[t] - state.T @ k[t])
        out.append(state.T @ q[t] * v.shape[1] ** -0.5)
    return torch.stack(out)


def deltanet(m: Any, x_TC: Tensor, h: int, head: Head) -> Tensor:
    beta = torch.sigmoid(projected(x_TC, m.b_proj))
    return delta_rule(h, head, beta, lambda t: torch.ones(1, dtype=x_TC.dtype))


def gdn(m: Any, x_TC: Tensor, h: int, head: Head) -> Tensor:
    beta = torch.sigmoid(projected(x_TC, m.b_proj))
    rate = softplus(projected(x_TC, m.a_proj) + m.rate_bias)
    return delta_rule(h, head, beta, lambda t: torch.exp(-m.log_rate[h].exp() * rate[t, h]))


def kda(m: Any, x_TC: Tensor, h: int, head: Head) -> Tensor:
    """arXiv 2510.26692, equation 1: a decay for each row of the state."""
    beta = torch.sigmoid(projected(x_TC, m.b_proj))
    raw = projected(projected(x_TC, m.a_proj), m.decay_up).reshape(len(x_TC), m.num_heads, -1)
    rate = softplus(raw + m.rate_bias)
    return delta_rule(h, head, beta, lambda t: torch.exp(-m.log_rate[h].exp() * rate[t, h]))


def mamba2(m: Any, x_TC: Tensor, h: int, head: Head) -> Tensor:
    """arXiv 2405.21060, equation 2 with A a number, B = k, C = q, x = v; h' = Ah + B x, y = C h."""
    q, k, v = rms_normed(head[0]), rms_normed(head[1]), head[2]
    step = softplus(projected(x_TC, m.a_proj) + m.rate_bias)[:, h]
    state, out = torch.zeros(v.shape[1], v.shape[1], dtype=v.dtype), []
    for t in range(len(v)):
        state = torch.exp(-m.log_rate[h].exp() * step[t]) * state
        state = state + step[t] * torch.outer(k[t], v[t])
        out.append(state.T @ q[t] * v.shape[1] ** -0.5 + m.skip[h] * v[t])
    return torch.stack(out)


def retnet(m: Any, x_TC: Tensor, h: int, head: Head) -> Tensor:
    """arXiv 2307.08621, the parallel form, its rows of weights divided by their sums."""
    q, k, v = rotated(rms_normed(head[0])), rotated(rms_normed(head[1])), head[2]
    decay, out = torch.exp(-softplus(m.rate_bias[h])), []
    for t in range(len(v)):
        weights = decay ** torch.arange(t, -1, -1, dtype=v.dtype)
        scores = (k[: t + 1] @ q[t]) * v.shape[1] ** -0.5
        out.append((weights / weights.sum() * scores) @ v[: t + 1])
    return torch.stack(out)


ORACLES = {"deltanet": deltanet, "gdn": gdn, "kda": kda, "mamba2": mamba2, "retnet": retnet}


@pytest.mark.parametrize("short_conv", [True, False])
@pytest.mark.parametrize("kind", ALONE)
def test_the_mixer_is_its_formula(kind: str, short_conv: bool) -> None:
    spec, length = tiny_spec("qwen2"), 11
    model = tiny_model(spec, [kind] * 3, short_conv=short_conv).double().model
    mixer = model.layers[0].mixer
    generator = torch.Generator().manual_seed(2)
    x_TC = torch.randn(length, spec.hidden_size, dtype=torch.float64, generator=generator)
    qkv = torch.cat(
        [F.linear(x_TC, p.weight, p.bias) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1
    )
    if short_conv:
        taps = mixer.conv.weight.shape[1]
        past = torch.cat([torch.zeros(taps - 1, qkv.shape[1], dtype=torch.float64), qkv])
        qkv = sum(past[i : i + length] * mixer.conv.weight[:, i] for i in range(taps))
    heads = [y.reshape(length, spec.num_attention_heads, -1) for y in qkv.chunk(3, dim=-1)]
    gate = 2 * torch.sigmoid(projected(x_TC, mixer.gate_proj)).reshape(heads[0].shape)
    expected = torch.zeros_like(gate)
    for h in range(spec.num_attention_heads):
        q, k, v = (y[:, h] for y in heads)
        out = ORACLES[kind](mixer, x_TC, h, (q, k, v))
        rms = (out.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt()
        expected[:, h] = out / rms * mixer.out_norm_weight[h] * gate[:, h]
    expected = F.linear(expected.reshape(length, -1), mixer.o_proj.weight)
    with torch.no_grad():
        found = mixer(x_TC[None], model.context(x_TC[None]))
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ALONE)
def test_the_start_is_neutral(kind: str) -> None:
    """The convolution is the identity, the gate is 1, half-lives cover 8 to 2048 tokens."""
    spec = tiny_spec("llama")
    mixer = mixer_of(kind, spec)
    x_TC = torch.randn(5, spec.hidden_size)
    assert torch.equal(2 * torch.sigmoid(mixer.gate_proj(x_TC)), torch.ones(5, 48))
    assert torch.equal(mixer.conv.weight, F.one_hot(torch.tensor(3), 4).float().expand(144, 4))
    if hasattr(mixer, "b_proj"):
        assert torch.equal(torch.sigmoid(mixer.b_proj(x_TC)), torch.full((5, 4), 0.5))
    if kind in DECAYING:
        first_and_last = half_lives(mixer, x_TC)[:, [0, -1]]
        expected = torch.tensor([[8.0, 2048.0]] * 5).double()
        torch.testing.assert_close(first_and_last, expected, rtol=1e-4, atol=0)
    if kind == "mamba2":
        assert torch.equal(mixer.skip, torch.zeros(4))


def half_lives(mixer: Any, x_TC: Tensor) -> Tensor:
    """Tokens [T, H] in which a state that nothing is written to falls to its half, in fp64."""
    length, heads, width = len(x_TC), mixer.num_heads, mixer.head_dim
    zeros = torch.zeros(length, 1, heads, width, dtype=torch.float64)
    state = torch.ones(length, heads, width, width, dtype=torch.float64)
    tables = (torch.ones(1, 1, width), torch.zeros(1, 1, width))
    context = SequenceContext({"default": tables}, 1, x_TC.device, torch.zeros(1, 1).long())
    with torch.no_grad():
        rates = [getattr(mixer.double(), name)(x_TC.double())[:, None] for name in mixer.RATES]
        _, after = mixer.recur(zeros, zeros, zeros, rates, state, context)
    assert (after - after[..., :1, :1]).abs().max() < 1e-6
    return -math.log(2.0) / after[..., 0, 0].log()


@pytest.mark.parametrize("kind", DECAYING)
def test_half_lives_are_what_they_are_set_to(kind: str) -> None:
    mixer = mixer_of(kind, tiny_spec("llama"))
    scatter(mixer)
    wanted = torch.tensor([1.0, 3.3, 77.7, 1500.0])
    mixer.set_half_lives(wanted)
    for name in mixer.RATES:
        torch.nn.init.zeros_(getattr(mixer, name).weight)
    found = half_lives(mixer, torch.randn(2, 32))
    torch.testing.assert_close(found, wanted.double().expand(2, 4), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_retention_is_bounded_by_the_largest_value(size: float) -> None:
    """Weights that add up to 1 and scores within sqrt(D): |o| and |S| <= sqrt(D) max |v|.

    For decays from next to none to one token. The plain form adds up to 1 / (1 - g) tokens: with
    keys and values that stay the same it is beyond that bound.
    """
    spec, length = tiny_spec("llama"), 200
    mixer = mixer_of("retnet", spec).double()
    heads, width = mixer.num_heads, mixer.head_dim
    with torch.no_grad():
        mixer.rate_bias.copy_(torch.tensor([-12.0, -5.0, -1.0, 3.0]))
    g = torch.Generator().manual_seed(4)
    q, k, v = (
        size * torch.randn(2, length, heads, width, generator=g, dtype=torch.float64)
        for _ in range(3)
    )
    k[1], v[1] = k[1, :1], v[1, :1]
    q[1] = k[1]
    tables = (torch.ones(1, length, width), torch.zeros(1, length, width))  # no rotation
    context = SequenceContext({"default": tables}, length, q.device, torch.arange(length)[None])
    with torch.no_grad():
        o, state = mixer.recur(q, k, v, [], None, context)
        bound = width**0.5 * v.abs().amax(1)  # of each value channel, [B, H, D]
        assert (o.abs() <= bound[:, None] * (1 + 1e-9)).all()
        assert (state.abs() <= bound[:, :, None] * (1 + 1e-9)).all()
        # Row 1 reaches it: every score is sqrt(D).
        torch.testing.assert_close(o[1], width**0.5 * v[1], rtol=1e-5, atol=0)
        decay = torch.exp(-softplus(mixer.rate_bias))[:, None]
        added = sum(decay**n for n in range(length))
        assert ((added * width**0.5 * v[1, 0]).abs() > 5 * bound[1])[:2].all()


def test_the_state_of_mamba2_is_bounded_whatever_its_steps() -> None:
    """sum_s d_s exp(-A sum_{r>s} d_r) <= max d + 1/A, and |k v| <= sqrt(D) max |v|."""
    spec, length = tiny_spec("llama"), 300
    mixer = mixer_of("mamba2", spec).double()
    heads, width = mixer.num_heads, mixer.head_dim
    with torch.no_grad():
        mixer.log_rate.copy_(torch.tensor([-6.0, -2.0, 0.0, 2.0]))
    g = torch.Generator().manual_seed(5)
    q, k, v = (
        100 * torch.randn(1, length, heads, width, generator=g, dtype=torch.float64)
        for _ in range(3)
    )
    raw = 4 * torch.randn(1, length, heads, generator=g, dtype=torch.float64)
    context = SequenceContext({}, length, q.device, torch.arange(length)[None])
    with torch.no_grad():
        _, state = mixer.recur(q, k, v, [raw], None, context)
        step = softplus(raw + mixer.rate_bias)
        most = step.amax(1) + torch.exp(-mixer.log_rate)  # [1, H]
        bound = width**0.5 * v.abs().amax(1) * most[..., None]
    assert (state.abs() <= bound[:, :, None]).all()


@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("kind", ALONE)
def test_four_loops_add_no_more_than_norms_and_gates_let_through(kind: str, size: float) -> None:
    """|h_T - h_0| <= T sum over layers of |W_o| sqrt(sum over heads (2 sqrt(D) max |w|)^2)."""
    loops = 4
    spec = tiny_spec("llama", num_loops=loops)  # no norm between the loops
    model = tiny_model(spec, [kind] * 3).double().model
    bound = 0.0
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.down_proj.weight.zero_()  # the mixers alone
            layer.mixer.gate_proj.weight.mul_(100.0)
            heads = 2 * spec.head_dim**0.5 * layer.mixer.out_norm_weight.abs().amax(-1)
            bound += float(torch.linalg.matrix_norm(layer.mixer.o_proj.weight, 2) * heads.norm())
        h_BTC = size * model.embed(tokens(2, 50))
        context = model.context(h_BTC)
        state = model.start(h_BTC)
        for step in model.schedule:
            state = model.visit(step, state, context)
            grown = (state.h_BTC - h_BTC).norm(dim=-1).max()
            assert grown <= (step.loop + 1) * bound
        assert grown > bound / 100  # they do speak
