"""From `data.source` to blocks of documents with a cursor that says where to go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ltconvert.distill.data.documents import Document, Split
from ltconvert.distill.data.files import FilesSource
from ltconvert.distill.data.hub import HubSource
from ltconvert.distill.data.topics import TopicsSource
from ltconvert.distill.data.unpack import kind_of
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

Cursor = dict[str, Any]
BLOCK_DOCUMENTS = 32  # read and tokenised together


class Source(Protocol):
    """Documents of both splits, epoch after epoch, in blocks.

    A cursor is a small JSON-able dict with at least "epoch". `fingerprint` tells corpora apart.
    """

    name: str
    fingerprint: str

    def start(self) -> Cursor: ...

    def read(self, cursor: Cursor, count: int) -> tuple[list[Document], Cursor]: ...


class Documents(Protocol):
    """What can be read by index: local files and the embedded text."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document | None: ...


class ShuffledSource:
    """Indexed documents in a new order every epoch, given by the seeds; None: their own order."""

    def __init__(self, documents: Documents, seeds: tuple[int, ...] | None) -> None:
        self.name = documents.name
        self.fingerprint = documents.fingerprint
        self._documents = documents
        self._seeds = seeds
        self._order: tuple[int, np.ndarray] | None = None

    def start(self) -> Cursor:
        """The first document of the first epoch."""
        return {"epoch": 0, "position": 0}

    def read(self, cursor: Cursor, count: int) -> tuple[list[Document], Cursor]:
        """Up to `count` documents from `cursor`, and the cursor after them."""
        epoch, position = cursor["epoch"], cursor["position"]
        order = self._order_of(epoch)
        read = (self._documents[int(index)] for index in order[position : position + count])
        block = [document for document in read if document is not None]
        if position + count >= len(order):
            return block, {"epoch": epoch + 1, "position": 0}
        return block, {"epoch": epoch, "position": position + count}

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._seeds is None:
            return np.arange(len(self._documents))
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng([*self._seeds, epoch])
            self._order = epoch, random.permutation(len(self._documents))
        return self._order[1]


def open_source(settings: DataSettings, seeds: tuple[int, ...] | None = None) -> Source:
    """The source that `settings.source` names: `pydoc`, a file or folder, or a hub id.

    Args:
        seeds: numbers >= 0 that give the order of the documents (local sources only; hub data
            sets keep their own order); None: the source's own order.

    Raises:
        UserError: there is no such source, or there is nothing in it.
    """
    name = settings.source
    if name == TopicsSource.name:
        return ShuffledSource(TopicsSource(settings.heldout_share), seeds)
    path = Path(name).expanduser()
    if not path.exists():
        if _looks_like_path(name):
            raise UserError(f"data.source {name!r}: no such file or folder")
        return HubSource(settings)
    files = FilesSource(path, settings)
    if len(files) == 0:
        raise UserError(f"data.source {name!r} is empty: there is no document in it")
    return ShuffledSource(files, seeds)


def on_hub(settings: DataSettings) -> bool:
    """Whether the source is taken for a hub id: no file or folder here, and no path by its form."""
    name = settings.source
    here = name == TopicsSource.name or Path(name).expanduser().exists()
    return not here and not _looks_like_path(name)


def documents(settings: DataSettings, split: Split) -> Iterator[str]:
    """The texts of one split, once, in the source's own order; a chat as its plain contents.

    Raises:
        UserError: the split is empty.
    """
    found = False
    source = open_source(settings)
    for document in one_epoch(source, split):
        found = True
        yield document.text
    if not found:
        raise empty_split(source, split, settings.heldout_share)


def one_epoch(source: Source, split: Split) -> Iterator[Document]:
    """The documents of one split of the first epoch."""
    cursor = source.start()
    while cursor["epoch"] == 0:
        block, cursor = source.read(cursor, BLOCK_DOCUMENTS)
        yield from (document for document in block if document.in_split(split))


def empty_split(source: Source, split: Split, share: float) -> UserError:
    """The error for a split of the source that holds no document."""
    name = source.name
    if split == "train":
        return UserError(
            f"data.source {name!r}: no document with text is left to train on "
            f"(data.heldout_share is {share:g}): give more documents"
        )
    remedy = "there are no two that differ: give more documents"
    if _has_two(one_epoch(source, "train")):
        remedy = f"data.heldout_share is {share:g}: raise it, or give more documents"
    return UserError(f"data.source {name!r}: no document fell into the held-out split; {remedy}")


def _has_two(documents: Iterator[Document]) -> bool:
    """Whether two of them differ: copies of one are always in one split."""
    first = next(documents, None)
    return any(document != first for document in documents)


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or name.endswith("/")
        or kind_of(Path(name)) is not None
    )
