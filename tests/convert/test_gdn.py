"""The GDN mixer against its own formula, written token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_model, tiny_spec
from torch.nn import functional as F

from ltconvert.convert.mixers import SequenceContext


@pytest.mark.parametrize("short_conv", [True, False])
def test_the_mixer_is_its_formula(short_conv: bool) -> None:
    spec = tiny_spec("qwen2")
    mixer = tiny_model(spec, ["gdn"] * 3, short_conv=short_conv).model.layers[0].mixer.double()
    x_TC = torch.randn(
        11, spec.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    heads, width = spec.num_attention_heads, spec.head_dim
    qkv = torch.cat(
        [F.linear(x_TC, p.weight, p.bias) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1
    )
    if short_conv:
        taps = mixer.conv.weight.shape[1]
        past = torch.cat([torch.zeros(taps - 1, qkv.shape[1], dtype=torch.float64), qkv])
        qkv = sum(past[i : i + 11] * mixer.conv.weight[:, i] for i in range(taps))
    q, k, v = (y.reshape(11, heads, width) for y in qkv.chunk(3, dim=-1))
    beta = 1 / (1 + torch.exp(-x_TC @ mixer.b_proj.weight.T))
    rate = torch.log1p(torch.exp(x_TC @ mixer.a_proj.weight.T + mixer.rate_bias))
    decay = torch.exp(-torch.exp(mixer.log_rate) * rate)
    gate = 2 / (1 + torch.exp(-x_TC @ mixer.gate_proj.weight.T)).reshape(11, heads, width)
    expected = torch.zeros(11, heads, width, dtype=torch.float64)
    for h in range(heads):
        state = torch.zeros(width, width, dtype=torch.float64)
        for t in range(11):
            key, query = (y[t, h] / y[t, h].norm() for y in (k, q))
            state = decay[t, h] * state
            state = state + beta[t, h] * torch.outer(key, v[t, h] - state.T @ key)
            out = state.T @ query * width**-0.5
            rms = (out.square().mean() + spec.rms_norm_eps).sqrt()
            expected[t, h] = out / rms * mixer.out_norm_weight[h] * gate[t, h]
    with torch.no_grad():
        found = mixer(x_TC[None], SequenceContext({}, 11, x_TC.device, torch.arange(11)[None]))
    expected = F.linear(expected.reshape(11, -1), mixer.o_proj.weight)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_the_start_is_neutral() -> None:
    """The convolution is the identity, the gate is 1, half-lives cover 8 to 2048 tokens."""
    spec = tiny_spec("llama")
    from ltconvert.convert.mixers import make_mixer

    mixer = make_mixer("gdn", spec, 0, window_tokens=4, conv_size=4, sdpa_gate=False)
    x_TC = torch.randn(5, spec.hidden_size)
    half_lives = torch.log(torch.tensor(2.0)) / F.softplus(mixer.rate_bias)
    torch.testing.assert_close(half_lives[[0, -1]], torch.tensor([8.0, 2048.0]))
    assert torch.equal(2 * torch.sigmoid(mixer.gate_proj(x_TC)), torch.ones(5, 48))
    assert torch.equal(torch.sigmoid(mixer.b_proj(x_TC)), torch.full((5, 4), 0.5))
    assert torch.equal(mixer.conv.weight, F.one_hot(torch.tensor(3), 4).float().expand(144, 4))
