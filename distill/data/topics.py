"""The embedded source `pydoc`: the English reference text in CPython's own ``pydoc_data.topics``.

About 350,000 characters (85,000 tokens) on Python 3.11, a little more on later versions; the
licence is the PSF's. No download, the same documents on every machine with one Python version.
"""

from __future__ import annotations

import hashlib
import itertools
import re

from ltconvert.distill.data.documents import Document, is_heldout
from ltconvert.errors import UserError

# Held-out pieces have this size, so that a few per cent of the text are several pieces.
_SECTION_CHARS = 3000
# A topic is left out when more than this share of its paragraphs stands in longer topics: `if`
# and `while` are parts of `compound`, and would be trained on and held out at once.
_COPIED_SHARE = 0.5


class TopicsSource:
    """Topics as documents; held-out sections are cut out of them and stand alone."""

    name = "pydoc"

    def __init__(self, share: float, topics: dict[str, str] | None = None) -> None:
        self._documents = topic_documents(topics or python_topics(), share)
        content = "\0".join(document.text for document in self._documents)
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]


def topic_documents(topics: dict[str, str], share: float) -> list[Document]:
    """Cut every topic at held-out sections: the runs between them are the documents."""
    documents = []
    for text in _without_copies(topics):
        runs = itertools.groupby(_sections(text), key=lambda section: is_heldout(section, share))
        documents += [Document("\n\n".join(run), heldout) for heldout, run in runs]
    return documents


def python_topics() -> dict[str, str]:
    """The reference text of this Python, by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split it off (python3-doc)
        raise UserError(
            "data.source 'pydoc' needs the module pydoc_data.topics, which this Python was built "
            "without; install your distribution's full Python, or name a file or data set"
        ) from None
    return topics


def _without_copies(topics: dict[str, str]) -> list[str]:
    """The topics that are not mostly part of a longer one, in the order of their names."""
    seen: set[str] = set()
    kept = {}
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {" ".join(part.split()) for part in _paragraphs(topics[name])}
        length = sum(map(len, paragraphs))
        copied = sum(len(part) for part in paragraphs & seen)
        if length and copied <= _COPIED_SHARE * length:
            kept[name] = topics[name].strip() + "\n"
        seen |= paragraphs
    return [kept[name] for name in sorted(kept)]


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _sections(text: str) -> list[str]:
    """Neighbouring paragraphs together, up to about `_SECTION_CHARS` characters."""
    sections: list[list[str]] = []
    size = _SECTION_CHARS
    for paragraph in _paragraphs(text):
        if size + len(paragraph) > _SECTION_CHARS:
            sections.append([])
            size = 0
        sections[-1].append(paragraph)
        size += len(paragraph)
    return ["\n\n".join(section) for section in sections]
