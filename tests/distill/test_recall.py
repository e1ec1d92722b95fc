"""Synthetic recall: exact lengths, places, and scores that are those of greedy decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec

from ltconvert.distill.evaluation.recall import (
    DEPTHS,
    answer_scores,
    recall_scores,
    retrieval_examples,
)
from ltconvert.distill.evaluation.recall_text import QUESTION
from ltconvert.errors import UserError

LENGTH = 400
ASK = QUESTION.split("{key}")[0]


def texts(tokenizer: Any, examples: Any) -> list[str]:
    return [tokenizer.decode(row) for row in examples.input_ids_BT.tolist()]


@pytest.mark.parametrize("kind", ["needle", "multikey"])
def test_rows_have_the_length_and_end_with_the_answer(tiny_tokenizer: Any, kind: Any) -> None:
    examples = retrieval_examples(tiny_tokenizer, LENGTH, 7, seed=3, kind=kind)
    assert examples.input_ids_BT.shape == (7, LENGTH) and len(examples) == 7
    assert examples.depth_B.tolist() == [*DEPTHS, *DEPTHS[:2]]
    for row, start in zip(examples.input_ids_BT, examples.answer_start_B, strict=True):
        prompt, answer = tiny_tokenizer.decode(row[:start]), tiny_tokenizer.decode(row[start:])
        key = prompt.split(ASK)[1].split(" is")[0]
        assert f"The secret number of the {key} is{answer}." in prompt
        assert prompt.count("is" + answer + ".") == 1
        assert prompt.count("The secret number of") == {"needle": 2, "multikey": 5}[kind]
        assert answer.startswith(" ") and len(answer) == 5 and answer[1:].isdigit()


def test_the_statement_lies_where_the_depth_says(tiny_tokenizer: Any) -> None:
    examples = retrieval_examples(tiny_tokenizer, 1000, 5)
    places = [text.index("The secret number") for text in texts(tiny_tokenizer, examples)]
    # About 250 of the characters are statement and question.
    for place, depth in zip(places, DEPTHS, strict=True):
        assert abs(place / (1000 - 160) - depth) < 0.15


def test_same_seed_same_examples_and_more_examples_keep_the_first(tiny_tokenizer: Any) -> None:
    few = retrieval_examples(tiny_tokenizer, LENGTH, 3, seed=1).input_ids_BT
    more = retrieval_examples(tiny_tokenizer, LENGTH, 6, seed=1).input_ids_BT
    other = retrieval_examples(tiny_tokenizer, LENGTH, 3, seed=2).input_ids_BT
    assert torch.equal(few, more[:3]) and not torch.equal(few, other)


def test_a_tokenizer_that_begins_with_bos_keeps_it(tiny_tokenizer: Any) -> None:
    def with_bos(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    rows = retrieval_examples(with_bos, LENGTH, 2).input_ids_BT
    assert rows.shape == (2, LENGTH) and rows[:, 0].tolist() == [1, 1]
    assert int((rows == 1).sum()) == 2


def test_too_short_a_length_says_what_is_needed(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"recall at 50 tokens is too short.*recall_lengths_tokens"):
        retrieval_examples(tiny_tokenizer, 50, 1)
    with pytest.raises(UserError, match="unknown kind of recall 'haystack'"):
        retrieval_examples(tiny_tokenizer, LENGTH, 1, kind="haystack")  # type: ignore[arg-type]


class Repeater(torch.nn.Module):
    """Continues with what followed the last occurrence of the two latest tokens, by looking back.

    ``sight``: how many tokens back it can look.
    """

    def __init__(self, sight: int) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.sight = sight

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 97)
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(len(ids) - logits_to_keep, len(ids)):
                window = max(0, at - self.sight)
                logits[row, at, self.next_token(ids[window : at + 1])] = 9.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    @staticmethod
    def next_token(ids: list[int]) -> int:
        for length in range(12, 0, -1):
            for at in range(len(ids) - length - 1, -1, -1):
                if ids[at : at + length] == ids[-length:]:
                    return ids[at + length]
        return 0


def test_a_model_that_copies_is_right_and_a_short_sighted_one_is_not(tiny_tokenizer: Any) -> None:
    lengths = [300, 400]
    for sight, expected in ((1000, 1.0), (20, 0.0)):
        found = recall_scores(Repeater(sight), tiny_tokenizer, lengths, 5, kinds=["needle"])
        for length in lengths:
            score = found["needle"][str(length)]
            assert score["accuracy"] == expected and score["examples"] == 5
            assert list(score["by_depth"]) == ["0", "0.25", "0.5", "0.75", "1"]
    near = recall_scores(Repeater(200), tiny_tokenizer, [400], 5, kinds=["needle"])
    by_depth = [cell["accuracy"] for cell in near["needle"]["400"]["by_depth"].values()]
    assert by_depth[0] == 0.0 and by_depth[-1] == 1.0


@torch.inference_mode()
def test_exact_is_what_greedy_decoding_gives(tiny_tokenizer: Any) -> None:
    model = tiny_model(tiny_spec(), ["gdn", "full", "gdn"])
    examples = retrieval_examples(tiny_tokenizer, 300, 4)
    rows = []
    for row, start in zip(examples.input_ids_BT, examples.answer_start_B.tolist(), strict=True):
        rows.append(
            model.generate(
                row[None, :start], max_new_tokens=300 - start, do_sample=False, eos_token_id=96
            )[0]
        )
    exact, nll = answer_scores(model, examples)
    own = [torch.equal(a, b) for a, b in zip(rows, examples.input_ids_BT, strict=True)]
    assert exact.tolist() == own == [False] * 4
    # The model's own continuation in the answer's place is found exact.
    examples.input_ids_BT.copy_(torch.stack(rows))
    assert answer_scores(model, examples)[0].tolist() == [True] * 4
    logits = model(input_ids=examples.input_ids_BT).logits.double().log_softmax(-1)
    start = int(examples.answer_start_B[0])
    target = examples.input_ids_BT[0, start:]
    expected = -logits[0, start - 1 : -1].gather(1, target[:, None]).mean()
    assert answer_scores(model, examples)[1][0] == pytest.approx(float(expected), rel=1e-4)
    assert nll.shape == (4,)
