"""The invariants of every student: families x mixers x loops, on tiny random models."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FAMILIES, diagonal, tiny_model, tiny_spec, tokens

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.students.loop import make_schedule
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM, exit_probabilities
from ltconvert.convert.transfer import build_student

MIXERS = {
    "full": ["full", "full", "full"],
    "window": ["window", "window", "window"],
    "gdn": ["gdn", "gdn", "gdn"],
    "gdn_window": ["gdn_window", "gdn_window", "gdn_window"],
    "delta": ["kda", "deltanet", "kda"],
    "decay": ["retnet", "retnet", "mamba2"],
    "dsa": ["dsa", "dsa", "dsa"],
    "nsa": ["nsa", "nsa", "nsa"],
    "hybrid": ["gdn", "full", "window"],
    "moda": ["moda", "gdn_window", "moda"],
    "dreamer": ["full", "full", "full"],
}
SMALL = {"window_tokens": 5, "top_k_tokens": 6, "block_tokens": 2, "chosen_blocks": 2}
CASES: list[Any] = diagonal(FAMILIES, list(MIXERS), each=3)
# Loops with norms, biases and corrections of rank 3 of their own.
CASES += diagonal(FAMILIES, ["full tied", "hybrid tied"], each=3)
CASES += [("qwen2", f"{name} tied") for name in ("gdn_window", "delta", "decay", "dsa", "nsa")]
CASES += [
    ("huginn", name)
    for name in ("full", "hybrid", "gdn_window", "dsa", "moda", "dreamer", "hybrid tied")
]
CASES += [("olmo2", "gdn tied"), ("qwen2", "moda tied")]  # norms by kv head
# Dreamers of students with other mixers than full attention, their routing released.
DREAMERS = [
    ("llama", "gdn"),
    ("gemma2", "gdn_window"),
    ("ouro", "kda"),
    ("olmo2", "mamba2"),
    ("qwen2", "retnet"),
    ("qwen3", "deltanet"),
    ("gemma3", "window"),
    ("huginn", "gdn_window"),
]
DREAMERS = [(family, f"{kind} dreamer") for family, kind in DREAMERS]
CASES += DREAMERS
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}  # models run in fp64, RoPE tables are fp32


def student(family: str, mixers: str, loops: int = 2, **options: object) -> LT2ForCausalLM:
    mixers, tied = mixers.removesuffix(" tied"), mixers.endswith(" tied")
    spec = tiny_spec(family, num_loops=loops, tied_rank=3 if tied else None)
    if mixers.endswith("dreamer"):
        options["dreamer"] = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3}
    kind = mixers.removesuffix(" dreamer")
    model = tiny_model(
        spec,
        MIXERS.get(mixers, [kind] * 3),
        window_tokens=5,
        top_k_tokens=6,
        sdpa_gate=True,
        loop_residual=True,
        depth_linear_writes=True,
        depth_bias=0.5,
        **options,
    ).double()
    if kind != mixers:
        model.model.dreamer.set_release(1.0)
    return model


@pytest.mark.parametrize(("family", "mixers"), CASES)
def test_cached_equals_uncached(family: str, mixers: str) -> None:
    model, ids = student(family, mixers), tokens(2, 21)
    with torch.no_grad():
        whole = model(ids).logits
        cache = model.new_cache()
        pieces = [ids[:, :9], ids[:, 9:12], *ids[:, 12:].split(1, dim=1)]
        logits = torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)
    torch.testing.assert_close(logits, whole, **TOLERANCE)


@pytest.mark.parametrize(("family", "mixers"), CASES)
def test_left_padded_batch_equals_single_rows(family: str, mixers: str) -> None:
    model, lengths = student(family, mixers), (17, 4, 9)
    rows = [tokens(1, n, seed=n) for n in lengths]
    ids, mask = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    more = tokens(3, 3, seed=5)
    with torch.no_grad():
        cache = model.new_cache()
        batch = model(ids, attention_mask=mask, cache=cache).logits
        mask = torch.cat([mask, torch.ones(3, 3, dtype=torch.long)], dim=1)
        after = torch.cat(
            [
                model(more[:, t : t + 1], attention_mask=mask[:, : 18 + t], cache=cache).logits
                for t in range(3)
            ],
            dim=1,
        )
        for i, row in enumerate(rows):
            alone = model(torch.cat([row, more[i : i + 1]], dim=1)).logits[0]
            torch.testing.assert_close(batch[i, -row.shape[1] :], alone[:-3], **TOLERANCE)
            torch.testing.assert_close(after[i], alone[-3:], **TOLERANCE)


@pytest.mark.parametrize(("family", "mixers"), CASES)
def test_packed_equals_separate(family: str, mixers: str) -> None:
    model, ids = student(family, mixers), tokens(2, 23)
    cuts = ([0, 9, 10, 23], [0, 2, 15, 23])
    segments = torch.zeros(2, 23, dtype=torch.int32)
    for row, cut in enumerate(cuts):
        for document, (start, stop) in enumerate(pairwise(cut)):
            segments[row, start:stop] = document
    with torch.no_grad():
        packed = model(ids, segment_ids=segments).logits
        for row, cut in enumerate(cuts):
            for start, stop in pairwise(cut):
                alone = model(ids[row : row + 1, start:stop]).logits
                torch.testing.assert_close(packed[row : row + 1, start:stop], alone, **TOLERANCE)


@pytest.mark.parametrize(("family", "mixers"), CASES)
def test_right_padding_and_the_future_do_not_leak(family: str, mixers: str) -> None:
    model, ids = student(family, mixers), tokens(1, 15)
    changed = ids.clone()
    changed[:, 11:] = tokens(1, 4, seed=8)
    mask = torch.ones_like(ids)
    mask[:, 11:] = 0
    with torch.no_grad():
        expected = model(ids[:, :11]).logits
        torch.testing.assert_close(model(changed).logits[:, :11], expected, **TOLERANCE)
        torch.testing.assert_close(
            model(ids, attention_mask=mask).logits[:, :11], expected, **TOLERANCE
        )


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
@pytest.mark.parametrize("mixers", [*MIXERS, "hybrid tied", "gdn_window dreamer"])
def test_every_loop_count_has_its_own_cache_slots(mixers: str, loops: int) -> None:
    model, ids = student("ouro", mixers, loops), tokens(1, 8)
    with torch.no_grad():
        cache = model.new_cache()
        assert len(cache) == loops * 3 == model.config.num_hidden_layers
        model(ids[:, :7], cache=cache)
        last = model(ids[:, 7:], cache=cache).logits
        torch.testing.assert_close(last, model(ids).logits[:, 7:], **TOLERANCE)


@pytest.mark.parametrize("mixers", [*MIXERS, "full tied", "gdn_window tied"])
def test_prelude_and_coda_run_once(mixers: str) -> None:
    model = student("llama", mixers, 3, prelude_layers=1, coda_layers=1)
    visits = [(step.layer, step.loop) for step in model.model.schedule]
    assert visits == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2)]
    ids = tokens(1, 8)
    with torch.no_grad():
        cache = model.new_cache()
        split = [model(piece, cache=cache).logits for piece in ids.split(4, dim=1)]
        torch.testing.assert_close(torch.cat(split, dim=1), model(ids).logits, **TOLERANCE)


def test_slots_are_loop_times_layers_plus_layer() -> None:
    assert all(s.slot == s.loop * 5 + s.layer for s in make_schedule(5, 4))
    with pytest.raises(ValueError, match="at least one layer"):
        make_schedule(3, 2, prelude=2, coda=1)


@pytest.mark.parametrize("mixers", list(MIXERS))
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_cache_equals_without(mixers: str, beams: int) -> None:
    model, ids = student("ouro", mixers), tokens(2, 6)
    ids[0, :2] = 0
    arguments = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 7,
        "num_beams": beams,
        "pad_token_id": 0,
    }
    cached = model.generate(ids, do_sample=False, **arguments)
    plain = model.generate(ids, do_sample=False, use_cache=False, **arguments)
    assert cached.tolist() == plain.tolist()


@pytest.mark.parametrize("mixers", list(MIXERS))
def test_generation_goes_on_from_a_cache(mixers: str) -> None:
    model, ids = student("llama", mixers), tokens(1, 6)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    first = model.generate(
        ids, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    cache = getattr(first, "cache", None) or first.past_key_values
    name = "cache" if hasattr(first, "cache") else "past_key_values"
    second = model.generate(
        first.sequences, max_new_tokens=5, do_sample=False, pad_token_id=0, **{name: cache}
    )
    assert second.tolist() == whole.tolist()


def test_sampling_is_reproducible() -> None:
    model, ids = student("llama", "hybrid"), tokens(1, 6)
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(
            model.generate(
                ids, max_new_tokens=12, do_sample=True, top_p=0.9, pad_token_id=0
            ).tolist()
        )
    assert samples[0] == samples[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_a_student_that_keeps_all_layers_is_its_teacher(family: str, loops: int) -> None:
    teacher, ids = tiny_model(tiny_spec(family, num_loops=loops)), tokens(2, 19)
    options = {"sdpa_gate": True, "loop_residual": True}  # both neutral at the start
    with torch.no_grad():
        expected = teacher(ids).logits
        for share in (True, False):
            kept = build_student(teacher, ["full"] * 3, options, share=share)
            torch.testing.assert_close(kept(ids).logits, expected, atol=0, rtol=0)
        wide = build_student(teacher, ["window"] * 3, {"window_tokens": 19})
        torch.testing.assert_close(wide(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "mixers"),
    [
        *((family, name) for family in FAMILIES for name in ("hybrid", "hybrid tied")),
        ("huginn", "hybrid"),
        *(("llama", mixers) for mixers in ("delta", "decay")),
        ("qwen3", "moda"),
        ("qwen2", "dreamer"),
        *DREAMERS,
        *((family, mixers) for family in ("llama", "ouro") for mixers in ("dsa", "nsa")),
    ],
)
def test_a_reloaded_student_is_the_live_one(family: str, mixers: str, tmp_path: Path) -> None:
    model, ids = student(family, mixers).float(), tokens(1, 13)
    save_student(model, None, tmp_path, {"teacher": family})
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(load_student(tmp_path)(ids).logits, expected, atol=0, rtol=0)


def test_a_fresh_process_loads_students_as_they_were(tmp_path: Path) -> None:
    """One process for all: most of its time is the start. A tied head, an untied one in loops."""
    ids, folders = tokens(1, 13), []
    for family in ("llama", "ouro"):
        kinds = "hybrid", "hybrid tied", "delta", "decay", "dsa", "nsa", "gdn_window", "moda"
        for mixers in (*kinds, "kda dreamer", "gdn_window dreamer"):
            folders.append(tmp_path / f"{family} {mixers}")
            model = student(family, mixers).float()
            save_student(model, None, folders[-1], {"teacher": family})
            with torch.no_grad():
                torch.save((ids, model(ids).logits), folders[-1] / "expected.pt")
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        "from ltconvert.convert.checkpoint import load_student\n"
        "for folder in sys.argv[1:]:\n"
        # Banks that lie unaligned in a file's map round differently.
        "    if 'dreamer' in folder: m = load_student(folder)\n"
        "    else: m = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "    ids, expected = torch.load(folder + '/expected.pt')\n"
        "    with torch.no_grad(): assert torch.equal(m(ids).logits, expected), folder\n"
    )
    command = [sys.executable, "-P", "-c", code, *map(str, folders)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_exit_probabilities_by_hand() -> None:
    gates = torch.tensor([[[0.0, 1.0, -2.0, 5.0]]])
    leave = torch.sigmoid(gates[0, 0]).tolist()
    stay = [1 - p for p in leave]
    expected = [
        leave[0],
        leave[1] * stay[0],
        leave[2] * stay[0] * stay[1],
        stay[0] * stay[1] * stay[2],
    ]
    torch.testing.assert_close(exit_probabilities(gates)[0, 0], torch.tensor(expected))


@pytest.mark.parametrize("mixers", ["hybrid", "hybrid tied", "moda", "dreamer", "gdn dreamer"])
def test_gradient_checkpointing_changes_no_gradient(mixers: str) -> None:
    model, ids = student("ouro", mixers).train(), tokens(2, 11)
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for a, b in zip(plain, (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(a, b)


def test_a_foreign_cache_is_refused() -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match=r"model\.new_cache"):
        student("llama", "gdn")(tokens(1, 3), cache=DynamicCache())


def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been() -> None:
    model, ids = student("ouro", "full"), tokens(1, 12)
    with torch.no_grad():
        cache = model.new_cache()
        model(ids[:, :9], cache=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 6
        again = model(ids[:, 6:], cache=cache).logits
        torch.testing.assert_close(again, model(ids).logits[:, 6:], **TOLERANCE)


def test_a_window_of_one_token_caches_nothing() -> None:
    model = tiny_model(tiny_spec("llama"), ["window"] * 3, window_tokens=1).double()
    ids = tokens(2, 6)
    with torch.no_grad():
        cache = model.new_cache()
        steps = [model(piece, cache=cache).logits for piece in ids.split([3, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, **TOLERANCE)
    assert {layer.keys.shape[2] for layer in cache.layers} == {0}


@pytest.mark.parametrize("mixers", list(MIXERS))
def test_a_document_number_that_comes_back_is_another_document(mixers: str) -> None:
    model, ids = student("llama", mixers), tokens(1, 9)
    fresh, again = torch.tensor([[[0, 0, 0, 1, 1, 1, last, last, last]] for last in (2, 0)])
    with torch.no_grad():
        expected = model(ids, segment_ids=fresh).logits
        torch.testing.assert_close(model(ids, segment_ids=again).logits, expected, **TOLERANCE)


def test_positions_start_anew_in_each_document_beside_padding_too() -> None:
    model = student("llama", "full")
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [7, 7, 3, 3, 3, 3, 3, 3, 4]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1, 1, 0, 0]])
    expected = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 0, 0, 1, 0, 2, 3, 0, 0]])
    context = model.model.context(torch.zeros(2, 9, 32), attention_mask=keep, segment_ids=segments)
    cos, _ = context.rope["default"]
    table, _ = model.model._ropes["default"](expected)
    kept = keep.bool()
    assert torch.equal(cos[kept], table[kept])


def test_every_new_part_of_a_model_from_scratch_is_neutral() -> None:
    config = LT2Config.from_spec(tiny_spec("llama"), ["gdn", "full", "window"], sdpa_gate=True)
    for name, parameter in LT2ForCausalLM(config).named_parameters():
        if "mixer.gate_proj" in name:
            assert not parameter.any(), name


def test_losses_of_accumulated_batches_add_up_to_the_mean_over_their_labels() -> None:
    """As transformers' Trainer asks of a forward that takes keywords."""
    model, ids = student("llama", "full"), tokens(3, 8)
    labels = ids.clone()
    labels[0, :6] = -100
    whole = model(ids, labels=labels).loss
    count = (labels[:, 1:] >= 0).sum()
    parts = [
        model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count).loss
        for i in range(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("kind", ["window", "full", "dsa", "nsa"])
def test_another_model_may_draft(kind: str) -> None:
    """Greedy tokens stay what they are; refused drafts are taken back, past windows too."""
    small = {"window_tokens": 5, "top_k_tokens": 4, "block_tokens": 4, "chosen_blocks": 1}
    model, other = (tiny_model(tiny_spec(), [kind] * 3, seed=s, **small) for s in (0, 1))
    ids = tokens(1, 8)
    call = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **call)
    for assistant in (model, other):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **call), expected)
