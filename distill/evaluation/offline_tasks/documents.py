"""Documents of the offline tasks. Each function is the ``custom_dataset`` of a YAML file beside it.

All text but the held-out one is made here, from fixed seeds: the same documents on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from datasets import Dataset, DatasetDict

from ltconvert.distill.evaluation.offline_tasks.grammar import pair
from ltconvert.distill.evaluation.recall_text import FILLER, KEYS, QUESTION, STATEMENT

Document = dict[str, str]
NEEDLE_SENTENCES = 32
LISTED_WORDS, BEGUN_WORDS, ASKED_WORDS = 16, 4, 4
CONTEXT_WORDS = 120
LEAST_WORDS = 8


def needle(documents: int = 100, sentences: int = NEEDLE_SENTENCES, **_: Any) -> DatasetDict:
    """A number stated once in filler text (about 400 tokens), asked for at the end.

    Args:
        documents, sentences: how many, and how long; ``metadata`` of lm-eval sets them.
    """
    return _made("needle", documents, lambda rng: _needle(rng, sentences))


def copying(documents: int = 100, words: int = LISTED_WORDS, **_: Any) -> DatasetDict:
    """A list of random words, begun a second time: its next words must follow."""
    return _made("copying", documents, lambda rng: _copying(rng, words))


def last_word(documents: int = 200, **_: Any) -> DatasetDict:
    """The last word of sentences of the held-out part of Python's reference text, with context.

    It is the held-out split of the data source ``pydoc`` at its default share, which no run with
    that share or a larger one trains on.
    """
    from ltconvert.distill.data import documents as texts
    from ltconvert.recipes.data import DataSettings

    found = [d for text in texts(DataSettings(), "heldout") for d in last_words(text)]
    random.Random("last_word").shuffle(found)
    return _dataset(found[:documents])


def minimal_pairs(documents: int = 200, **_: Any) -> DatasetDict:
    """Two sentences that differ in one word; ``gold`` is the place of the grammatical one.

    It is the first one in every other document: lm-eval takes the first of equal choices, and of
    those that are no numbers, so that a model without a preference is right in half of them.
    """
    made = _made("minimal_pairs", documents, pair)["test"]
    return DatasetDict(test=made.add_column("gold", [at % 2 for at in range(len(made))]))


def last_words(text: str) -> list[Document]:
    """``context`` and ``answer`` for every long enough sentence that ends in a plain word."""
    found: list[Document] = []
    before: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            words = sentence.split()
            ending = re.fullmatch(r"([a-z]{3,})\.", words[-1]) if words else None
            if ending and len(words) >= LEAST_WORDS:
                context = " ".join([*before, *words[:-1]][-CONTEXT_WORDS:])
                found.append({"context": context, "answer": ending[1]})
            before += words
    return found


def _needle(rng: random.Random, sentences: int) -> Document:
    key, value = rng.choice(KEYS), str(rng.randint(1000, 9999))
    text = [rng.choice(FILLER) for _ in range(sentences)]
    text.insert(rng.randint(0, sentences), STATEMENT.format(key=key, value=value))
    return {"context": " ".join([*text, QUESTION.format(key=key)]), "answer": value}


def _copying(rng: random.Random, words: int) -> Document:
    chosen = rng.sample(KEYS, words)
    asked = chosen[BEGUN_WORDS : BEGUN_WORDS + ASKED_WORDS]
    context = f"First list: {' '.join(chosen)}.\nThe same list: {' '.join(chosen[:BEGUN_WORDS])}"
    return {"context": context, "answer": " ".join(asked)}


def _made(name: str, count: int, make: Callable[[random.Random], Document]) -> DatasetDict:
    """``count`` documents, no two alike."""
    made: list[Document] = []
    for attempt in range(20 * count):
        document = make(random.Random(f"{name}/{attempt}"))
        if document not in made:
            made.append(document)
        if len(made) == count:
            break
    return _dataset(made)


def _dataset(documents: list[Document]) -> DatasetDict:
    return DatasetDict(test=Dataset.from_list(documents))
