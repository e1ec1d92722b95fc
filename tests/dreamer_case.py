"""Dreamers of tiny teachers whose routing is released and no longer one-hot."""

from __future__ import annotations

from typing import Any

import torch
from helpers import tiny_model, tiny_spec

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student


def released(family: str = "llama", kind: str = "full", **options: Any) -> LT2ForCausalLM:
    """A Dreamer of three layers with a mixer; ``options`` are those of a DreamerConfig."""
    teacher = tiny_model(tiny_spec(family), [kind] * 3, window_tokens=5)
    layers, slices = teacher.config.num_layers, options.setdefault("slices", 1)
    options.setdefault("top_experts", 2 * slices)
    settings = {"entries": layers, "experts": layers * slices, "shared_size": 16, **options}
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        student = build_student(teacher, [kind] * layers, {"dreamer": settings})
        layer = student.model.dreamer
        for router in (layer.attention_router, layer.expert_router):
            router.keys.copy_(0.5 * torch.randn(router.keys.shape, generator=generator))
        if layer.depth is not None:
            weight = layer.depth.o_proj.weight
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    layer.set_release(1.0)
    return student
