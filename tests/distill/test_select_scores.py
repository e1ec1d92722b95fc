"""Scores of the selection methods against whole forwards written out here, and their cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec
from selection_case import Visits, hybrid, kl, packed, pair, probe

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.evaluation.recall import answer_scores
from ltconvert.distill.selection import compare, kl_fast, kl_greedy, recall
from ltconvert.distill.selection.probe import Probe
from ltconvert.kernels.linear_kl import linear_scores


@pytest.mark.parametrize(
    ("family", "loops"), [("llama", 1), ("llama", 2), ("ouro", 2), ("ouro", 3), ("gemma2", 1)]
)
def test_kl_fast_equals_whole_forwards(family: str, loops: int) -> None:
    teacher, student = pair(family, num_loops=loops)
    batches = [packed(), packed(seed=2, padding=4)]
    scores = kl_fast.rank(probe(teacher, student, batches))
    count = len(teacher.model.layers)
    everything = set(range(count))
    none = kl(teacher, hybrid(teacher, student, []), batches)
    for layer in range(count):
        damage = kl(teacher, hybrid(teacher, student, list(everything - {layer})), batches)
        gain = none - kl(teacher, hybrid(teacher, student, [layer]), batches)
        assert scores.columns["damage"][layer] == pytest.approx(damage, rel=1e-4, abs=1e-6)
        assert scores.columns["gain"][layer] == pytest.approx(gain, rel=1e-4, abs=1e-6)
    assert scores.facts["student_kl"] == pytest.approx(none, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_comparison_in_chunks_equals_the_kernel_and_skips_padded_columns(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "default_chunk", lambda vocab: 7)  # chunks that do not divide 30
    teacher, student = pair(family)
    for model in (teacher, student):
        model.requires_grad_(False)
    hidden = torch.randn(3, 30, 32, generator=torch.Generator().manual_seed(5))
    cap = teacher.config.final_softcap
    found = compare.kl_sums(student, list(hidden[:2]), teacher, hidden[2])
    for mine, students_NC in zip(found, hidden[:2], strict=True):
        heads = student.head_weight, teacher.head_weight
        kernel = linear_scores(
            students_NC,
            heads[0],
            hidden[2],
            heads[1],
            torch.zeros(30, dtype=torch.long),
            student_softcap=cap,
            teacher_softcap=cap,
        )
        assert mine == pytest.approx(float(kernel.kl_N.double().sum()), rel=1e-5)
    small = tiny_model(tiny_spec(family, vocab_size=80)).requires_grad_(False)
    narrow = compare.kl_sums(small, [hidden[0]], teacher, hidden[2])
    p, q = (
        model.logits(x)[:, :80].double().log_softmax(-1)
        for model, x in ((teacher, hidden[2]), (small, hidden[0]))
    )
    assert narrow[0] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


def test_prelude_and_coda_are_scored_from_their_own_place() -> None:
    spec = {"num_loops": 2, "num_layers": 4, "layer_rope": ("default",) * 4}
    teacher, _ = pair(layer_windows=(None,) * 4, **spec)
    options = {"prelude_layers": 1, "coda_layers": 1}
    student = build_student(teacher, ["gdn"] * 4, options).eval()
    batches = [packed()]
    scores = kl_fast.rank(probe(teacher, student, batches, direction="restore"))
    none = kl(teacher, student, batches)
    for layer in range(4):
        mixers = ["full" if i == layer else "gdn" for i in range(4)]
        restored = build_student(teacher, mixers, options).eval()
        gain = none - kl(teacher, restored, batches)
        assert scores.columns["gain"][layer] == pytest.approx(gain, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("direction", ["remove", "restore", "both"])
def test_each_direction_measures_what_it_says(direction: str) -> None:
    teacher, student = pair()
    scores = kl_fast.rank(probe(teacher, student, [packed()], direction=direction))
    wanted = {"remove": ["damage"], "restore": ["gain"], "both": ["damage", "gain", "mean_rank"]}
    assert list(scores.columns) == wanted[direction]
    main = scores.columns[scores.main]
    best_first = sorted(range(3), key=lambda i: -main[i] if scores.higher_is_better else main[i])
    assert scores.ranking == best_first


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3", "ouro"])
def test_a_mixer_that_equals_full_attention_scores_exactly_zero(family: str) -> None:
    teacher, student = pair(family)
    student.model.layers[1].mixer = teacher.model.layers[1].mixer
    scores = kl_fast.rank(probe(teacher, student, [packed()]))
    assert scores.columns["damage"][1] == 0.0
    assert scores.columns["gain"][1] == 0.0
    assert scores.columns["damage"][0] > 0.0


@pytest.mark.parametrize(("num_layers", "loops"), [(2, 1), (5, 1), (4, 2), (3, 3)])
def test_kl_fast_computes_what_lies_before_a_layer_once(num_layers: int, loops: int) -> None:
    changes = {"layer_rope": ("default",) * num_layers, "layer_windows": (None,) * num_layers}
    teacher, student = pair(num_layers=num_layers, num_loops=loops, **changes)
    visits, batches = Visits(teacher, student), [packed(rows=1), packed(rows=1, seed=2)]
    whole, n, t = num_layers * loops, num_layers, loops
    bound = n * (1 - 1 / (2 * t)) + 1  # for T = 1: N / 2 + 1
    for direction, references in (("remove", 1), ("restore", 2), ("both", 2)):
        before = visits.count
        scores = kl_fast.rank(probe(teacher, student, batches, direction=direction))
        forwards = (visits.count - before) / whole / len(batches)
        assert scores.cost.forwards == pytest.approx(forwards * len(batches))
        # Whole passes of the teacher, and of the student where it is the base, are shared by all.
        ways = 2 if direction == "both" else 1
        a_direction = (forwards - references) / ways
        assert a_direction == pytest.approx(n - (n - 1) / (2 * t))
        assert a_direction <= bound


def test_greedy_equals_brute_force() -> None:
    changes = {"layer_rope": ("default",) * 4, "layer_windows": (None,) * 4}
    teacher, student = pair(num_layers=4, **changes)
    batches = [packed(), packed(seed=2)]
    scores = kl_greedy.rank(probe(teacher, student, batches, keep=3))
    picked: list[int] = []
    base = kl(teacher, hybrid(teacher, student, []), batches)
    for _ in range(3):
        rest = [i for i in range(4) if i not in picked]
        after = {i: kl(teacher, hybrid(teacher, student, [*picked, i]), batches) for i in rest}
        best = min(rest, key=lambda i: after[i])
        assert scores.columns["gain"][best] == pytest.approx(base - after[best], rel=1e-4, abs=1e-6)
        base = after[best]
        picked.append(best)
    assert scores.ranking[:3] == picked
    assert scores.facts["kl_after_picks"][-1] == pytest.approx(base, rel=1e-4)
    assert scores.history == [sorted(picked[: n + 1]) for n in range(3)]


def test_greedy_over_answers_equals_brute_force(tiny_tokenizer: Any) -> None:
    """KL where a number is answered, read off the texts themselves."""
    teacher, student = pair(max_position_embeddings=1024)
    settings = {"method": "recall-greedy", "seq_len_tokens": 400, "recall_examples": 4}
    given = probe(teacher, student, [], tokenizer=tiny_tokenizer, keep=2, **settings)
    examples = recall.example_batches(given)
    given = replace(given, batches=[recall.as_batch(x) for x in examples])
    scores = kl_greedy.rank(given)

    def on_answers(model: LT2ForCausalLM) -> float:
        found = []
        for part in examples:
            with torch.no_grad():
                p_BTV, q_BTV = (
                    m(part.input_ids_BT).logits.double().log_softmax(-1) for m in (teacher, model)
                )
            kl_BT = (p_BTV.exp() * (p_BTV - q_BTV)).sum(-1)
            for row, start in enumerate(part.answer_start_B.tolist()):
                answer = tiny_tokenizer.decode(part.input_ids_BT[row, start:])
                assert answer.strip().isdigit()
                found += kl_BT[row, start - 1 : -1].tolist()
        return sum(found) / len(found)

    assert scores.facts["student_kl"] == pytest.approx(
        on_answers(hybrid(teacher, student, [])), rel=1e-4
    )
    singles = [on_answers(hybrid(teacher, student, [i])) for i in range(3)]
    first = min(range(3), key=singles.__getitem__)
    assert scores.ranking[0] == first
    pairs = {i: on_answers(hybrid(teacher, student, [first, i])) for i in {0, 1, 2} - {first}}
    assert scores.ranking[1] == min(pairs, key=pairs.__getitem__)
    assert scores.facts["kl_after_picks"] == pytest.approx(
        [singles[first], min(pairs.values())], rel=1e-4
    )


def test_greedy_counts_its_cost() -> None:
    teacher, student = pair()
    visits = Visits(teacher, student)
    scores = kl_greedy.rank(probe(teacher, student, [packed()], keep=2))
    assert scores.cost.forwards == pytest.approx(visits.count / 3)


@pytest.fixture(scope="module")
def recall_probe_of() -> Callable[..., Probe]:
    def make(tokenizer: Any, **settings: Any) -> Probe:
        teacher, student = pair(max_position_embeddings=1024)
        settings = {"seq_len_tokens": 400, "recall_examples": 6} | settings
        return probe(teacher, student, [], tokenizer=tokenizer, **settings)

    return make


def test_recall_equals_whole_forwards(recall_probe_of: Any, tiny_tokenizer: Any) -> None:
    given = recall_probe_of(tiny_tokenizer)
    scores = recall.rank(given)
    parts = recall.example_batches(given)
    assert len(parts) > 1
    everything = set(range(given.num_layers))

    def brute(model: LT2ForCausalLM) -> tuple[float, float]:
        exact, nll = zip(*(answer_scores(model, part) for part in parts), strict=True)
        return float(torch.cat(exact).float().mean()), -float(torch.cat(nll).mean())

    accuracy, log_prob = brute(given.teacher)
    assert scores.facts["teacher_log_prob"] == pytest.approx(log_prob, rel=1e-5)
    for layer in everything:
        model = hybrid(given.teacher, given.student, list(everything - {layer}))
        worse_accuracy, worse = brute(model)
        drop = scores.columns["log_prob_drop"][layer]
        assert drop == pytest.approx(log_prob - worse, rel=1e-3, abs=1e-5)
        assert scores.columns["accuracy_drop"][layer] == pytest.approx(accuracy - worse_accuracy)


def test_recall_is_zero_for_an_equal_mixer_and_counts_its_cost(
    recall_probe_of: Any, tiny_tokenizer: Any
) -> None:
    given = recall_probe_of(tiny_tokenizer, recall_examples=2)
    given.student.model.layers[0].mixer = given.teacher.model.layers[0].mixer
    visits = Visits(given.teacher, given.student)
    scores = recall.rank(given)
    assert scores.columns["log_prob_drop"][0] == 0.0
    assert scores.cost.forwards == pytest.approx(visits.count / 3)


def test_recall_too_short_names_its_own_setting(recall_probe_of: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"raise select\.seq_len_tokens"):
        recall.rank(recall_probe_of(tiny_tokenizer, seq_len_tokens=32))


def test_scores_are_the_same_every_time() -> None:
    found = [kl_fast.rank(probe(*pair(), [packed(), packed(seed=2)])).columns for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", [kl_fast, kl_greedy])
def test_a_killed_scoring_goes_on_to_the_same_result(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [packed(seed=seed) for seed in range(1, 5)]
    undisturbed = method.rank(probe(*pair(), batches, keep=2))
    score_batch, calls = method.score_batch, itertools.count()

    def killed(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        score_batch(*arguments)

    monkeypatch.setattr(method, "score_batch", killed)
    path = tmp_path / "partial.json"
    with pytest.raises(KeyboardInterrupt):
        method.rank(probe(*pair(), batches, keep=2, path=path))
    resumed = method.rank(probe(*pair(), batches, keep=2, path=path))
    assert next(calls) == len(batches) * (2 if method is kl_greedy else 1) + 1  # nothing twice
    for scores in (undisturbed, resumed):
        scores.cost.seconds = 0.0
    assert repr(resumed) == repr(undisturbed)


@pytest.mark.parametrize("method", [kl_fast, kl_greedy])
def test_a_settled_choice_ends_the_scoring(method: Any) -> None:
    teacher, student = pair()
    same = [packed() for _ in range(6)]  # the same batch again and again: nothing can change
    scores = method.rank(probe(teacher, student, same, stable_rounds=2))
    whole = method.rank(probe(teacher, student, same[:3]))
    assert scores.stopped_early
    assert not whole.stopped_early
    assert scores.cost.tokens == 3 * 34
    assert scores.ranking == whole.ranking
