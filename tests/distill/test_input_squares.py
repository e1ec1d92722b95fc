"""Second moments of what a teacher's matrices read, against inputs computed step by step."""

from __future__ import annotations

import torch
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.tying import tie_layers
from ltconvert.distill.data import Batch
from ltconvert.distill.input_squares import input_squares


def batch(seed: int, padding: int = 0) -> Batch:
    """Two rows of 12 tokens, the last ones of the second padded."""
    ids_BT = tokens(2, 12, seed=seed)
    keep_BT = torch.ones(2, 12, dtype=torch.bool)
    if padding:
        keep_BT[1, -padding:] = False
    return Batch(ids_BT, torch.zeros(2, 12, dtype=torch.int32), ids_BT.roll(-1, 1), keep_BT)


def test_all_tokens_but_padding_count_in_every_matrix() -> None:
    teacher = tiny_model(tiny_spec("qwen2")).double()
    batches = [batch(1), batch(2, padding=4)]
    found = input_squares(teacher, batches, [1])
    assert len(found) == 7 and all(name.startswith("model.layers.1.") for name in found)
    read = {"mixer.k_proj": [], "mlp.up_proj": [], "mlp.down_proj": [], "mixer.o_proj": []}
    for one in batches:
        model, layer = teacher.model, teacher.model.layers[1]
        h = model.embed(one.input_ids_BT)
        context = model.context(h, attention_mask=one.keep_BT, segment_ids=one.segment_ids_BT)
        with torch.no_grad():
            h = model.layers[0](h, context)
            x = layer.pre_mixer_norm(h)
            heads: list[torch.Tensor] = []
            keep = lambda _, i, heads=heads: heads.append(i[0])  # noqa: E731
            handle = layer.mixer.o_proj.register_forward_pre_hook(keep)
            m = layer.pre_mlp_norm(h + layer.mixer(x, context))
            handle.remove()
            inner = torch.nn.functional.silu(layer.mlp.gate_proj(m)) * layer.mlp.up_proj(m)
        for name, value in zip(read, (x, m, inner, heads[0]), strict=True):
            read[name].append(value[one.keep_BT])
    for name, values in read.items():
        seen = torch.cat(values)
        assert len(seen) == 44
        torch.testing.assert_close(found[f"model.layers.1.{name}.weight"], seen.mT @ seen / 44)
    hooks = [m for m in teacher.modules() if m._forward_pre_hooks]
    assert not hooks


def test_full_rank_stays_exact_with_them() -> None:
    teacher, ids = tiny_model(tiny_spec("qwen2")).double(), tokens(2, 9)
    squares = input_squares(teacher, [batch(1)], [1, 2])
    for start in ("average", "lower"):
        looped = tie_layers(teacher, loops=2, prelude=1, start=start, rank=99, squares=squares)
        with torch.no_grad():
            torch.testing.assert_close(looped(ids).logits, teacher(ids).logits, atol=1e-9, rtol=0)
