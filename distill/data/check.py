"""A look at the text before a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltconvert.distill.data.content import WHOLE_BYTES
from ltconvert.distill.data.documents import Document, Split
from ltconvert.distill.data.files import FilesSource, find_files
from ltconvert.distill.data.sources import Documents, empty_split, on_hub, open_source
from ltconvert.distill.data.tokens import Encoder
from ltconvert.distill.data.topics import TopicsSource
from ltconvert.distill.data.unpack import is_packed
from ltconvert.recipes.data import DataSettings


def check_local(settings: DataSettings) -> None:
    """Refuse local text that cannot be read or has no document for one of the splits.

    Opens file after file until each split has a document, and no packed one: to unpack it may take
    long. Hub data sets are left alone.

    Raises:
        UserError: what is wrong.
    """
    path = Path(settings.source).expanduser()
    if on_hub(settings) or (path.exists() and any(map(is_packed, find_files(path)))):
        return
    found: set[bool] = set()
    for document in _documents(settings):
        found.add(document.heldout)
        if len(found) == 2:
            return
    split: Split = "heldout" if found == {False} else "train"
    raise empty_split(open_source(settings), split, settings.heldout_share)


def check_every_document(settings: DataSettings, tokenizer: Any) -> None:
    """Refuse local text that a run would stop at in its middle, a chat without a rendering too.

    Of a corpus of more than 256 MiB, unpacked, documents of so many bytes, evenly spaced. Hub data
    sets are left alone.

    Raises:
        UserError: names file and line, and what to do.
    """
    if on_hub(settings) or settings.source == TopicsSource.name:
        return
    source = FilesSource(Path(settings.source).expanduser(), settings)
    encoder = Encoder(tokenizer)
    share = min(1.0, WHOLE_BYTES / max(1, source.size_bytes))
    count = math.ceil(share * len(source))
    for number in range(count):
        document = source[number * len(source) // count]
        if document is not None:
            encoder.render(document)


def _documents(settings: DataSettings) -> Iterator[Document]:
    """In the source's own order; one file after the other is opened."""
    for part in _parts(settings):
        documents = (part[index] for index in range(len(part)))
        yield from (document for document in documents if document is not None)


def _parts(settings: DataSettings) -> Iterator[Documents]:
    if settings.source == TopicsSource.name:
        yield TopicsSource(settings.heldout_share)
        return
    path = Path(settings.source).expanduser()
    if not path.exists():
        open_source(settings)  # refuses it
    for file in find_files(path):
        yield FilesSource(file, settings)
