"""Shares of attention weight on depth and on first tokens, against weights written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_case import make_batch
from helpers import tiny_model, tiny_spec

from ltconvert.convert.students.depth import depth_stream
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.evaluation.depth_mass import depth_mass
from ltconvert.distill.report import build_report

BATCH = make_batch([[9, 11], [16]], 20, 0)  # two documents and a padded one


def written_out(model: LT2ForCausalLM) -> list[dict[str, float]]:
    """Of each visit of a dense model without windows, caps and biases: sums over all queries."""
    inner, spec = model.model, model.model.spec
    ids, segments, keep = BATCH.input_ids_BT, BATCH.segment_ids_BT, BATCH.keep_BT
    h = inner.embed(ids)
    context = inner.context(h, attention_mask=keep, segment_ids=segments)
    state, stream = inner.start(h), depth_stream(inner, context.rope)
    assert stream is not None
    found = []
    for step in inner.schedule:
        layer, visit = inner.layers[step.layer], stream.plan.visits[step.slot]
        view = stream.view(visit)
        q, k, v = layer.mixer.project(layer.mixer_input(state.h_BTC))
        q, k, v = layer.mixer.placed((q, k, v), context)
        sums, count = {"attention": 0.0, "ffn": 0.0, "sink": 0.0}, 0
        for b in range(2):
            for t in range(20):
                first = min(s for s in range(20) if segments[b, s] == segments[b, t])
                if not keep[b, t] or t == first:
                    continue
                for head in range(spec.num_attention_heads):
                    g = head // 2
                    keys = [*k[b, g, first : t + 1]]
                    if view.count:
                        keys += [*view.slots["default"].keys_BTNGD[b, t, : view.count, g]]
                    weights = (torch.stack(keys) @ q[b, head, t] * spec.attention_scale).softmax(0)
                    slots = weights[t + 1 - first :]
                    sums["attention"] += float(slots[::2].sum())
                    sums["ffn"] += float(slots[1::2].sum())
                    sums["sink"] += float(weights[0])
                    count += 1
        found.append({name: value / count for name, value in sums.items()})
        o = layer.mixer.attend(q, k, v, replace(context, depth=view))
        out = layer.mixer_contribution(layer.mixer.output(h, o, context))
        h = state.h_BTC + out
        x = layer.mlp_input(h)
        read = {"attention": layer.mixer_input(state.h_BTC), "ffn": x}
        left = {kind: layer.depth_proj[kind](read[kind]) for kind in visit.writes}
        stream.write(visit, left)
        state = state.with_stream(h + layer.mlp_contribution(x))
    return found


def test_shares_are_those_of_weights_written_out() -> None:
    model = tiny_model(tiny_spec(), ["moda"] * 3).double()
    model.model.depth_schedule.fill_(1)
    with torch.no_grad():
        wanted = written_out(model)
    found = depth_mass(model, [BATCH])
    assert found["queries"] == 8 + 10 + 15
    for visit, expected in zip(found["visits"], wanted, strict=True):
        assert {name: visit[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    (bucket,) = found["by_position"]  # all within 16 tokens
    assert (bucket["first"], bucket["end"]) == (0, 16)
    mean = sum(visit["attention"] for visit in wanted[1:]) / 2
    assert bucket["attention"] == pytest.approx(mean, abs=1e-6)


def test_a_teacher_gives_depth_nothing_and_its_student_begins_so() -> None:
    teacher = tiny_model(tiny_spec("gemma2", num_loops=2))
    student = build_student(teacher, ["moda", "gdn", "moda"])
    before, after = (depth_mass(model, [BATCH]) for model in (teacher, student))
    assert len(before["visits"]) == 6 and before["by_position"] == []
    assert [(v["layer"], v["loop"]) for v in after["visits"]] == [(0, 0), (2, 0), (0, 1), (2, 1)]
    for visit in (*before["visits"], *after["visits"]):
        assert visit["attention"] == visit["ffn"] == 0 < visit["sink"] < 1
    assert after["visits"][0] == pytest.approx(before["visits"][0])
    student.model.depth_schedule.fill_(1)
    merged = depth_mass(student, [BATCH])["visits"]
    assert merged[0] == after["visits"][0]  # nothing to read yet
    assert merged[1]["ffn"] > 0 and merged[1]["sink"] < after["visits"][1]["sink"]


def test_the_report_shows_it(tmp_path: Path) -> None:
    teacher = tiny_model(tiny_spec("ouro", num_loops=2))
    student: Any = build_student(teacher, ["moda"] * 3)
    student.model.depth_schedule.fill_(1)
    models = {"teacher": teacher, "student": student}
    depth = {who: depth_mass(model, [BATCH]) for who, model in models.items()}
    facts = {"student": {"mixers": ["moda"] * 3, "loops": 2}}
    whole = {"parts": {"depth": depth}, "models": facts, "seconds": {}, "depends_on": {}}
    (tmp_path / "evaluation.json").write_text(json.dumps(whole))
    build_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## Depth attention" in text and "| 2, loop 2 |" in text
    assert "Full attention in 3 of 3 layers: 0-2, with depth" in text
