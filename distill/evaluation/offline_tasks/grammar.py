"""Minimal pairs of English sentences from templates: verbs, determiners, reflexives."""

from __future__ import annotations

import random

THINGS = (
    ("key", "keys"), ("letter", "letters"), ("picture", "pictures"), ("chair", "chairs"),
    ("bottle", "bottles"), ("ticket", "tickets"), ("window", "windows"), ("report", "reports"),
)  # fmt: skip
PEOPLE = (
    ("farmer", "farmers"), ("teacher", "teachers"), ("doctor", "doctors"), ("painter", "painters"),
    ("student", "students"), ("driver", "drivers"), ("singer", "singers"), ("lawyer", "lawyers"),
)  # fmt: skip
# Number first by subject: (singular, plural).
BE = (("is", "are"), ("was", "were"), ("has been", "have been"))
STATES = (
    "on the table",
    "in the kitchen",
    "by the door",
    "behind the house",
    "missing",
    "very old",
)
VERBS = (("likes", "like"), ("knows", "know"), ("sees", "see"), ("wants", "want"))
OBJECTS = ("the garden", "a new house", "the old town", "some fresh bread", "the answer")
PAST = ("praised", "hurt", "blamed", "introduced", "defended")


def pair(rng: random.Random) -> dict[str, str]:
    """``good`` and ``bad`` sentence, and the ``phenomenon`` that they differ in."""
    phenomenon, make = rng.choice(PHENOMENA)
    good, bad = make(rng)
    return {"good": good, "bad": bad, "phenomenon": phenomenon}


def _both(sentence: str, words: tuple[str, str], number: int) -> tuple[str, str]:
    """The sentence with the right and with the wrong form in its blank."""
    return sentence.format(words[number]), sentence.format(words[1 - number])


def _across_phrase(rng: random.Random) -> tuple[str, str]:
    """The keys near the bottle are missing: the nearer noun has the other number."""
    subject, other = rng.sample(THINGS, 2)
    number = rng.randint(0, 1)
    noun = f"The {subject[number]} near the {other[1 - number]}"
    return _both(f"{noun} {{}} {rng.choice(STATES)}.", rng.choice(BE), number)


def _across_clause(rng: random.Random) -> tuple[str, str]:
    """The farmer that the doctors praised likes the garden."""
    subject, other = rng.sample(PEOPLE, 2)
    number = rng.randint(0, 1)
    noun = f"The {subject[number]} that the {other[1 - number]} {rng.choice(PAST)}"
    return _both(f"{noun} {{}} {rng.choice(OBJECTS)}.", rng.choice(VERBS), number)


def _determiner(rng: random.Random) -> tuple[str, str]:
    """The teacher sold these chairs, not these chair."""
    number = rng.randint(0, 1)
    determiner = rng.choice((("this", "these"), ("that", "those")))[number]
    person = rng.choice(PEOPLE)[rng.randint(0, 1)]
    sentence = (
        f"The {person} found {determiner} {{}} {rng.choice(('yesterday', 'again', 'at home'))}."
    )
    return _both(sentence, rng.choice(THINGS), number)


def _reflexive(rng: random.Random) -> tuple[str, str]:
    """The girls near the boy blamed themselves, not herself."""
    child, other, pronoun = rng.choice((("girl", "boys", "herself"), ("boy", "girls", "himself")))
    number = rng.randint(0, 1)
    subject = f"{child}s near the {other[:-1]}" if number else f"{child} near the {other}"
    return _both(f"The {subject} {rng.choice(PAST)} {{}}.", (pronoun, "themselves"), number)


PHENOMENA = (
    ("agreement_across_phrase", _across_phrase),
    ("agreement_across_clause", _across_clause),
    ("determiner_noun", _determiner),
    ("reflexive", _reflexive),
)
