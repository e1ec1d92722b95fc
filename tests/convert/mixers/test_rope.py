"""RoPE tables: formulas by hand, devices, dtypes. Parity with the families is tested elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ltconvert.convert.mixers.rope import Rope, apply_rope, rope_tables
from ltconvert.errors import UserError

DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_default_by_hand() -> None:
    cos, sin = rope_tables(DEFAULT, 6, torch.tensor([[0, 3]]))
    assert cos.shape == sin.shape == (1, 2, 6) and cos.dtype == torch.float32
    for channel in range(6):
        angle = 3 * 10_000.0 ** (-2 * (channel % 3) / 6)
        assert cos[0, 1, channel].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert sin[0, 1, channel].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_linear_stretches_positions() -> None:
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    stretched, plain = (
        rope_tables(params, 8, torch.tensor([positions]))
        for params, positions in ((linear, [0, 4, 8]), (DEFAULT, [0, 1, 2]))
    )
    assert torch.allclose(stretched[0], plain[0]) and torch.allclose(stretched[1], plain[1])


def test_yarn_scales_the_tables() -> None:
    cos, _ = rope_tables(YARN, 8, torch.tensor([[0]]))
    assert cos[0, 0, 0].item() == pytest.approx(0.1 * math.log(4.0) + 1.0)
    cos, _ = rope_tables({**YARN, "attention_factor": 1.5}, 8, torch.tensor([[0]]))
    assert cos[0, 0, 0].item() == 1.5


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query: int, key: int) -> torch.Tensor:
        (cq, sq), (ck, sk) = (rope_tables(DEFAULT, 8, torch.tensor([[p]])) for p in (query, key))
        rotated = apply_rope(q, cq, sq)
        assert rotated.norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
        return (rotated * apply_rope(k, ck, sk)).sum()

    assert score(9, 4).item() == pytest.approx(score(25, 20).item(), abs=1e-5)
    assert score(4, 4).item() == pytest.approx((q * k).sum().item(), abs=1e-5)


@pytest.mark.parametrize("params", [DEFAULT, YARN])
def test_survives_meta_inference_mode_and_autocast(params: dict[str, Any]) -> None:
    positions = torch.arange(70_000, 70_003)[None]
    expected = rope_tables(params, 8, positions)
    with torch.device("meta"):
        rope = Rope(params, 8)
        assert rope(torch.zeros(1, 2, dtype=torch.long))[0].device.type == "meta"
    with torch.inference_mode():
        rope(positions)
    with torch.autocast("cpu", torch.bfloat16):
        found = rope(positions)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    x = torch.randn(1, 1, 3, 8, requires_grad=True)
    apply_rope(x, *found).sum().backward()
    assert apply_rope(x.bfloat16(), *found).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("params", "head_dim", "word"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, 8, "longrope"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 8, "dynamic"),
        ({"rope_type": "llama3", "rope_theta": 1e4}, 8, "low_freq_factor"),
        ({"rope_type": "default"}, 8, "rope_theta"),
        ({**DEFAULT, "partial_rotary_factor": 0.25}, 8, "partial_rotary_factor"),
        (DEFAULT, 7, "even head_dim"),
    ],
)
def test_refusals(params: dict[str, Any], head_dim: int, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        Rope(params, head_dim)
    assert "\n" not in str(caught.value)
