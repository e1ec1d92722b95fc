"""Memory of masks, against what autograd keeps; none where a kernel needs none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from dreamer_case import released
from helpers import kept_bytes, tiny_model, tiny_spec

from ltconvert.convert.inspect import LayerFacts, model_facts
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.planning.masks import mask_bytes
from ltconvert.kernels import dispatch


def kept(spec: TeacherSpec, length: int, precision: str) -> int:
    """Bytes that a pass over packed documents keeps for the backward pass, weights aside."""
    model = tiny_model(spec, ["full", "gdn", "window"], window_tokens=16)
    documents = torch.arange(length)[None] // 40
    return kept_bytes(model, length, precision, segment_ids=documents)


def facts(spec: TeacherSpec) -> Sequence[LayerFacts]:
    return model_facts(
        LT2Config.from_spec(spec, ["full", "gdn", "window"], window_tokens=16)
    ).layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
def test_what_grows_with_the_square_of_a_row(family: str, precision: str) -> None:
    """Masks as numbers, or scores under a soft cap; the linear layer keeps neither."""
    spec = tiny_spec(family)
    # Neither what is kept whatever the length, nor what grows with it.
    grown = [kept(spec, length, precision) for length in (64, 128, 256)]
    square = (2 * grown[0] - 3 * grown[1] + grown[2]) / (6 * 64**2)
    one, many = (
        mask_bytes(spec, facts(spec), 1, 256, precision, "cpu", one_visit=one)
        for one in (True, False)
    )
    visits = 2 * spec.num_loops
    windows = len(
        {window for layer in facts(spec) if layer.mixer != "gdn" for window in layer.windows}
    )
    # Autograd does not keep the masks that all layers of a window share.
    predicted = many - windows * 256**2
    assert predicted == pytest.approx(square * 256**2, rel=0.02)
    assert one == windows * 256**2 + predicted / visits
    assert mask_bytes(spec, facts(spec), 3, 256, precision, "cpu") == 3 * many


def test_kernels_need_no_mask_but_for_wide_heads_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (tiny_spec(head_dim=width) for width in (128, 64))
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "choose", lambda *_: ("triton", "a test"))
        assert mask_bytes(wide, facts(wide), 1, 256, "fp32", "cuda") > 0
        assert mask_bytes(wide, facts(wide), 1, 256, "bf16", "cuda") == 0
        assert mask_bytes(narrow, facts(narrow), 1, 256, "fp32", "cuda") == 0
    with dispatch.use(window_attention="reference"):
        assert mask_bytes(narrow, facts(narrow), 1, 256, "bf16", "cuda") > 0


def test_a_student_without_softmax_has_its_teachers_masks() -> None:
    spec = tiny_spec()
    layers = model_facts(LT2Config.from_spec(spec, ["gdn"] * 3)).layers
    assert mask_bytes(spec, layers, 1, 256, "fp32", "cpu") == 256**2 * (1 + 4)


def test_depths_without_attention_have_no_mask() -> None:
    spec, config = tiny_spec(), released(skipped_attention=[0, 2]).config
    layers = model_facts(config).layers
    assert mask_bytes(spec, layers, 1, 256, "fp32", "cpu") == 256**2 * (1 + 4)
