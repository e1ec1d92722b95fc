"""Hub data sets, streamed: nothing is downloaded before it is read, in the data set's own order.

The saved position is the `datasets` library's own state plus a number of records after it.
Some versions of that library stop advancing their state after a resume; then the number grows
instead, so that a second resume continues exactly as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ltconvert.distill.data.documents import Document, record_document
from ltconvert.errors import UserError, first_line
from ltconvert.recipes.data import DataSettings

Cursor = dict[str, Any]


class HubSource:
    """A streamed data set. Cursors are {"epoch", "state", "skip", "record"}, small and JSON-able.

    "record" counts those before the cursor, for messages; cursors of earlier versions have none.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.name = settings.source
        self.fingerprint = f"{settings.source}/{settings.hub_config}/{settings.hub_split}"
        self._settings = settings
        self._dataset = _load(settings)
        self._live: Cursor | None = None
        self._records: Iterator[dict[str, Any]] = iter(())

    def start(self) -> Cursor:
        """The first document of the first epoch."""
        return _first_of(0)

    def read(self, cursor: Cursor, count: int) -> tuple[list[Document], Cursor]:
        """Up to `count` documents from `cursor`, and the cursor after them."""
        if cursor != self._live:
            self._open(cursor)
        records = self._take(count)
        if len(records) < count:
            following = _first_of(cursor["epoch"] + 1)
            self._live = None
        else:
            following = self._advance(cursor, count)
            self._live = following
        documents = (
            record_document(record, self._settings, self._place(cursor, offset))
            for offset, record in enumerate(records)
        )
        return [document for document in documents if document is not None], following

    def _place(self, cursor: Cursor, offset: int) -> str:
        """Where a record stands, from 1; the data set alone where that is not known."""
        before = cursor.get("record")
        return self.name if before is None else f"{self.name}, record {before + offset + 1}"

    def _open(self, cursor: Cursor) -> None:
        self._dataset = _load(self._settings)  # a fresh one: no state of an earlier iteration
        if cursor["state"] is not None:
            self._dataset.load_state_dict(cursor["state"])
        self._records = iter(self._dataset)
        self._take(cursor["skip"])

    def _take(self, count: int) -> list[dict[str, Any]]:
        try:
            return list(itertools.islice(self._records, count))
        except Exception as error:
            raise _hub_error(self._settings, error) from error

    def _advance(self, cursor: Cursor, count: int) -> Cursor:
        before, state = cursor.get("record"), self._dataset.state_dict()
        following = {**cursor, "record": None if before is None else before + count}
        if state == cursor["state"]:
            return {**following, "skip": cursor["skip"] + count}
        return {**following, "state": state, "skip": 0}


def _first_of(epoch: int) -> Cursor:
    return {"epoch": epoch, "state": None, "skip": 0, "record": 0}


def _load(settings: DataSettings) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            settings.source, settings.hub_config, split=settings.hub_split, streaming=True
        )
    except Exception as error:
        raise _hub_error(settings, error) from error


def _hub_error(settings: DataSettings, error: Exception) -> UserError:
    return UserError(
        f"data.source {settings.source!r} is no file or folder here, and reading it from the hub "
        f"failed: {first_line(error)}"
    )
