"""The paper's claims: exact ranks and reaches, the task of the pointers, trials at toy size."""

from __future__ import annotations

import argparse
import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import scatter
from lock_case import changed, holder
from pipeline_case import WORDS

from ltconvert.benchmarks.claims import (
    output_gate,
    pointer_climb,
    pointer_swap,
    ratio,
    receptive_field,
    update_rank,
)
from ltconvert.benchmarks.claims.common import (
    NOT_SEEN,
    SEEN,
    UNDECIDED,
    compare,
    equal_config,
    ratio_mixers,
    scratch_spec,
    verdict,
)
from ltconvert.benchmarks.claims.pointer_task import (
    ASK,
    FIRST_NAME,
    START,
    SWAP,
    PointerStream,
    PointerTask,
    ladder,
)
from ltconvert.benchmarks.looped_objective import LoopedObjective
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.errors import UserError


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_a_visit_writes_rank_1_and_loops_their_number(loops: int) -> None:
    assert list(update_rank.ranks(loops).values()) == [1, loops, loops, 1, 1]


def test_the_keys_of_the_loops_are_orthogonal_and_of_the_same_token_where_nothing_turns() -> None:
    """``W = b k v^T``, so that ``W_l^T W_m`` is ``k_l . k_m`` times something that is not 0."""
    writes_LHDD, transitions_LHDD = update_rank.visits(update_rank.layer_over_loops(4))
    for one in range(4):
        for other in range(4):
            product = writes_LHDD[one].mT @ writes_LHDD[other]
            assert (product.abs().amax((1, 2)) > 1e-6).all() == (one == other)
            if one != other:
                assert product.abs().max() < 1e-14
    taken_LHDD = torch.eye(8, dtype=torch.float64) - transitions_LHDD  # b k k^T
    torch.testing.assert_close(taken_LHDD, taken_LHDD.mT, atol=1e-14, rtol=0)
    beta_LH = taken_LHDD.diagonal(dim1=-2, dim2=-1).sum(-1)  # k has length 1
    assert ((beta_LH > 0) & (beta_LH < 1)).all()
    same_LHDD, _ = update_rank.visits(update_rank.layer_over_loops(4, turning=False))
    torch.testing.assert_close(same_LHDD, same_LHDD[:1].expand_as(same_LHDD))


@pytest.mark.parametrize(
    ("window", "layers", "loops", "tokens"),
    [(1, 2, 2, 1), (2, 1, 1, 2), (2, 1, 4, 5), (4, 3, 1, 10), (4, 3, 2, 19), (8, 1, 3, 22)],
)
def test_reach_by_gradient_and_by_changing_an_input(
    window: int, layers: int, loops: int, tokens: int
) -> None:
    assert receptive_field.expected_reach(window, layers, loops) == tokens
    assert receptive_field.reach(window, layers, loops) == tokens
    model = receptive_field.window_model(window, layers, loops).requires_grad_(False)
    scatter(model)  # or rounding would hide what little comes from the edge
    h_BTC = torch.randn(1, tokens + 3, model.config.hidden_size, dtype=torch.float64)
    before = model.model(inputs_embeds=h_BTC).last_hidden_state[0, -1]
    h_BTC[:, :-tokens] += 1.0  # all that lies beyond, at once
    assert torch.equal(model.model(inputs_embeds=h_BTC).last_hidden_state[0, -1], before)
    h_BTC[:, -tokens] = torch.randn_like(h_BTC[:, -tokens]).mul_(10)
    assert not torch.equal(model.model(inputs_embeds=h_BTC).last_hidden_state[0, -1], before)


@pytest.mark.parametrize("script", [update_rank, receptive_field])
def test_exact_claims_are_seen(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("| exact | seen |")


def _simulated(ids: list[int]) -> tuple[dict[int, int], list[int]]:
    """(what every pointer holds in the end, what is asked for), read from a row."""
    marks = iter(ids)
    assert next(marks) == START
    holds: dict[int, int] = {}
    token = next(marks)
    while token not in (SWAP, ASK):
        holds[token] = next(marks)
        token = next(marks)
    while token == SWAP:
        one, other, again = next(marks), next(marks), next(marks)
        assert one == again != other
        holds[one], holds[other] = holds[other], holds[one]
        token = next(marks)
    assert token == ASK
    return holds, list(marks)


@pytest.mark.parametrize(("pointers", "swaps"), [(2, 0), (2, 5), (3, 4), (8, 8), (13, 40)])
def test_rows_are_those_of_a_simulation(pointers: int, swaps: int) -> None:
    task = PointerTask(names=16, pointers=pointers, swaps=swaps)
    ids_BT, labels_BT = task.draw(7, np.random.default_rng(0))
    assert ids_BT.shape == (7, task.length) and task.vocab == FIRST_NAME + 32
    for ids, labels in zip(ids_BT.tolist(), labels_BT.tolist(), strict=True):
        holds, asked = _simulated(ids)
        assert ids.count(SWAP) == swaps
        assert len(set(holds)) == len(set(holds.values())) == pointers
        assert all(FIRST_NAME <= name < FIRST_NAME + 16 for name in holds)
        assert all(FIRST_NAME + 16 <= value < task.vocab for value in holds.values())
        assert len(set(asked)) == len(asked) == pointers // 2
        answers = [holds[name] for name in asked]
        assert labels == [-100] * (task.length - len(asked)) + answers


def test_a_ladder_adds_swaps_then_pointers() -> None:
    rungs = [(task.pointers, task.swaps) for task in ladder(20, 4, 20)]
    assert rungs == [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (6, 6), (8, 8), (12, 12), (16, 16)]
    assert [(x.names, x.pointers) for x in ladder(9, 2, 4)] == [(9, 2)] * 3 + [(9, 3), (9, 4)]
    for smallest in (1, 5):
        with pytest.raises(UserError, match="2 <= smallest <= largest"):
            ladder(4, smallest, 4)


def test_a_stream_goes_on_where_it_was_and_held_out_rows_are_others() -> None:
    task = PointerTask(names=8, pointers=4, swaps=4)

    def ids(stream: PointerStream) -> list[list[int]]:
        return next(stream).input_ids_BT.tolist()

    one, again = (PointerStream([task], 3, (0, 1)) for _ in range(2))
    first, second = ids(one), ids(one)
    assert first != second
    again.load_state_dict({"batches": 1})
    assert ids(again) == second and again.state_dict() == one.state_dict()
    others = [ids(PointerStream([task], 3, seed)) for seed in ((0, 2), (1, 1), None)]
    assert first not in others and others[0] != others[1]


@pytest.mark.parametrize(("mixers", "gate"), [("1:4", False), ("0:1", False), ("1:0", True)])
def test_variants_are_as_large_as_full_attention(mixers: str, gate: bool) -> None:
    sizes = argparse.Namespace(layers=5, heads=2, mlp=384)
    full = equal_config(sizes, 99, ["full"] * 5, 4)
    assert full.intermediate_size == 384
    config = equal_config(
        sizes, 99, ratio_mixers(*map(int, mixers.split(":")), 5), 4, sdpa_gate=gate
    )
    width_step = 8 * 3 * 128 * 5  # of all MLPs
    counts = [sum(p.numel() for p in LT2ForCausalLM(x).parameters()) for x in (full, config)]
    assert abs(counts[0] - counts[1]) <= width_step / 2 and config.intermediate_size < 384
    assert model_facts(config).parameters == counts[1]
    with pytest.raises(UserError, match="--mlp 8 leaves no room"):
        equal_config(argparse.Namespace(layers=5, heads=2, mlp=8), 99, ["gdn"] * 5, 4)


def test_ratios() -> None:
    assert ratio_mixers(1, 0, 2) == ["full", "full"] and ratio_mixers(0, 1, 2) == ["gdn"] * 2
    assert ratio_mixers(1, 4, 10).count("full") == 2
    assert ratio_mixers(1, 1, 4) == ["full", "gdn", "full", "gdn"]
    with pytest.raises(UserError, match="multiple of 5"):
        ratio_mixers(1, 4, 8)
    with pytest.raises(UserError, match="do not divide"):
        ratio_mixers(0, 0, 8)


def test_verdicts_are_those_of_students_t() -> None:
    """[1, 2, 3]: 2 ± 4.303 / sqrt(3) holds 0; [1, 2, 3, 4]: 2.5 ± 3.182 * 0.645 does not."""
    assert verdict([1, 2, 3]) == UNDECIDED
    assert verdict([1, 2, 3, 4]) == SEEN
    assert verdict([-1, -2, -3, -4]) == NOT_SEEN
    assert verdict([5.0, 5.0]) == UNDECIDED  # too few
    assert verdict([0, 0, 0]) == UNDECIDED
    found = compare("a claim", {0: 3.0, 1: 4.0, 2: 5.0, 7: 9.0}, {0: 1.0, 1: 2.0, 2: 3.0}, "x")
    assert (found.seeds, found.verdict, found.seen) == ("0, 1, 2", SEEN, "x: 2.000 ± 0.000")
    assert compare("a claim", {0: 1.0}, {1: 1.0}, "x").verdict == UNDECIDED


def climb(out: Path, *more: str) -> int:
    """One variant at toy size; every phase is passed unless ``more`` says otherwise."""
    small = ["--tiny", "--out", str(out), "--seeds", "0", "--variants", "gdn-looped"]
    return pointer_swap.main([*small, "--pass-accuracy", "0", *more])


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "gdn-looped-seed0" / "result.json").read_text())


def losses(out: Path) -> list[tuple[str, int, float]]:
    lines = (out / "gdn-looped-seed0" / "metrics.jsonl").read_text().splitlines()
    return [(x["stage"], x["step"], x["loss"]) for x in map(json.loads, lines)]


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("climb") / "out"
    assert climb(out) == 0
    return out


def test_a_climb(climbed: Path) -> None:
    found = result(climbed)
    assert [phase["n"] for phase in found["history"]] == [2, 2, 2, 3, 4]
    assert (found["largest"], found["sizes"], found["visits"]) == (4, 3, 10)
    rungs = [(1, 2, 0), (2, 2, 1), (3, 2, 2), (4, 3, 3), (5, 4, 4)]
    assert [x[:2] for x in losses(climbed)] == [
        (f"phase{phase} n={n} swaps={swaps}", step) for phase, n, swaps in rungs for step in (1, 2)
    ]
    assert not list(climbed.rglob("checkpoint"))
    claims = json.loads((climbed / "claims.json").read_text())["claims"]
    assert claims == []  # there is nothing to compare it with


def test_who_does_not_pass_stays(tmp_path: Path) -> None:
    assert climb(tmp_path, "--pass-accuracy", "1.1", "--steps", "6") == 0
    found = result(tmp_path)
    assert [phase["n"] for phase in found["history"]] == [2, 2, 2]
    assert (found["largest"], found["sizes"]) == (0, 0)


def test_rungs_with_fewer_swaps_lead_on_but_do_not_count(tmp_path: Path) -> None:
    assert climb(tmp_path, "--steps", "4") == 0
    found = result(tmp_path)
    assert [(x["swaps"], x["passed"]) for x in found["history"]] == [(0, True), (1, True)]
    assert (found["largest"], found["sizes"]) == (0, 0)


def test_a_climb_out_of_time_and_killed_ends_as_undisturbed(
    climbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert climb(out, "--minutes", "0") == 0
    said = capsys.readouterr().out
    assert "stopped after step 1 of 2" in said and "| not finished |" in said
    real, calls = LoopedObjective.train_step, [0]

    def train_step(self: Any, batch: Batch, backward: Callable[..., None], progress: float) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # the first step of the second phase
            signal.raise_signal(signal.SIGTERM)
        return real(self, batch, backward, progress)

    monkeypatch.setattr(LoopedObjective, "train_step", train_step)
    assert climb(out, "--minutes", "60") == 130
    assert not (out / "gdn-looped-seed0" / "result.json").exists()
    monkeypatch.undo()
    assert climb(out) == 0
    assert losses(out) == losses(climbed) and result(out) == result(climbed)


def test_accuracy_of_a_model_that_knows_one_value(climbed: Path) -> None:
    """It says the same whatever it reads: right where that value is asked for, counted by hand."""
    task = PointerTask(names=4, pointers=4, swaps=4)
    value = FIRST_NAME + task.names + 1
    spec = scratch_spec(task.vocab, layers=1, heads=1, loops=1, mlp=8, head_width=8)
    model = LT2ForCausalLM(LT2Config.from_spec(spec)).eval()
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.logits = lambda h_NC: torch.eye(task.vocab)[value].expand(len(h_NC), -1)
    share, error = pointer_climb.accuracy(model, task, 64, 64 * task.length, "fp32")
    labels_BT = next(PointerStream([task], 64, None)).labels_BT
    hits = [(row == value).sum().item() / task.asked for row in labels_BT]
    assert share == pytest.approx(np.mean(hits)) and 0.1 < share < 0.4
    assert error == pytest.approx(np.std(hits, ddof=1) / 8)


def test_a_folder_of_other_trials_is_refused_and_seeds_may_be_added(
    climbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert climb(climbed, "--lr", "1") == 2
    said = capsys.readouterr().err
    assert "lr = 0.001, this call asks for 1.0" in said and said.count("\n") == 1
    before = losses(climbed)
    assert climb(climbed, "--seeds", "0", "1", "2", "--variants", "gdn-looped", "gdn-once") == 0
    said = capsys.readouterr().out
    assert "gdn-looped, seed 0" not in said and losses(climbed) == before
    (claim,) = json.loads((climbed / "claims.json").read_text())["claims"]
    assert claim["claim"] == "looping takes Gated DeltaNet further"
    assert (claim["seeds"], claim["verdict"]) == ("0, 1, 2", UNDECIDED)  # all passed everything
    assert said.splitlines()[-1].startswith("| looping takes Gated DeltaNet further | sizes of")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> list[str]:
    """The options of a small text and its tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    documents = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) for _ in range(80))
    lines = (json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text("\n".join(lines))
    source = ["--data", str(folder / "text.jsonl"), "--heldout-share", "0.2"]
    return [*source, "--tokenizer", str(folder / "tokenizer"), "--tiny"]


def test_an_output_gates_trials(
    text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [*text, "--out", str(tmp_path), "--seeds", "0"]
    assert output_gate.main(call) == 0
    found = json.loads((tmp_path / "gated-seed0" / "result.json").read_text())
    for name in ("first_token", "largest", "rms"):
        assert len(found[name]) == 2 and all(x > 0 for x in found[name])
    assert found["loss"] < 5 and max(found["first_token"]) < 0.1
    rows = capsys.readouterr().out.splitlines()
    assert [r.split(" | ")[0] for r in rows if r.startswith(("| plain", "| gated"))] == [
        "| plain", "| plain", "| gated", "| gated",
    ]  # fmt: skip
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert len(claims) == 3 and {claim["verdict"] for claim in claims} == {UNDECIDED}
    assert output_gate.main(call) == 0  # only shown again
    assert "to do" not in capsys.readouterr().out
    with changed(Path(text[1])):
        assert output_gate.main(call) == 2
    assert f"content of data.source '{text[1]}'" in capsys.readouterr().err
    noted = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(noted | {"data": text[1]}))  # as it once was
    assert output_gate.main(call) == 0
    with holder(tmp_path):
        assert output_gate.main(call) == 2


def test_a_ratios_trials(
    text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ratio.main([*text, "--out", str(tmp_path), "--seeds", "0"]) == 0
    shown = capsys.readouterr().out
    for name in ("1:0", "1:4", "0:1"):
        found = json.loads((tmp_path / f"{name.replace(':', '-')}-seed0/result.json").read_text())
        assert (
            found["loss"] < 5
            and found["nll"] > 0
            and f"| {name} | {found['parameters']} |" in shown
        )
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert [claim["seeds"] for claim in claims] == ["0"] * 3
    assert ratio.main([*text, "--out", str(tmp_path / "x"), "--ratios", "1:x"]) == 2
    assert "expected full:gdn" in capsys.readouterr().err


def _small_decoder(positions: bool) -> LT2ForCausalLM:
    """One layer in two loops, three channels beside positions or none."""
    spec = scratch_spec(20, layers=1, heads=2, loops=2, mlp=8, head_width=4)
    if not positions:
        spec = replace(spec, layer_rope=(None,))
    model = LT2ForCausalLM(LT2Config.from_spec(spec)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()
    return model


def test_attention_on_the_first_token_is_that_of_plain_arithmetic() -> None:
    model = _small_decoder(positions=False)
    mixer, ids_BT = model.model.layers[0].mixer, torch.randint(0, 20, (2, 9))
    model.model.layers[0].mlp.down_proj.weight.zero_()
    mixer.o_proj.weight.zero_()  # so that both loops read the same
    h_BTC = model.model.embed_tokens.weight[ids_BT]
    norm = model.model.layers[0].pre_mixer_norm.weight
    x_BTC = h_BTC / (h_BTC.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    shares = []
    for x_TC in x_BTC:
        q_TC, k_TC = (x_TC @ w.weight.T for w in (mixer.q_proj, mixer.k_proj))
        for head in (slice(0, 4), slice(4, 8)):
            for query in range(4, 9):
                weights = [
                    float((q_TC[query, head] @ k_TC[key, head] / 2).exp())
                    for key in range(query + 1)
                ]
                shares.append(weights[0] / sum(weights))
    found = output_gate.look(model, [ids_BT[:1], ids_BT[1:]], "fp32")
    assert found["first_token"] == pytest.approx([np.mean(shares)] * 2, rel=1e-4)
    assert found["largest"] == pytest.approx([h_BTC.abs().max().item()] * 2)
    rms = max(row.square().mean().sqrt().item() for row in h_BTC)
    assert found["rms"] == pytest.approx([rms] * 2)


def test_the_stream_that_is_looked_at_is_that_of_the_forward_pass() -> None:
    model, ids_BT = _small_decoder(positions=True), torch.randint(0, 20, (1, 8))
    model.model.norm.weight.fill_(1.0)
    found = output_gate.look(model, [ids_BT], "fp32")
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    model(ids_BT)
    assert found["largest"] == pytest.approx([h_BTC.abs().max().item() for h_BTC in seen])
