"""What tells a text from another one: the settings that name it, and a digest of its content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ltconvert.distill.data.files import find_files
from ltconvert.distill.data.topics import TopicsSource, python_topics
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings

CONTENT = "content"
WHOLE_BYTES = 256 << 20  # of a corpus; so much is read at most
BLOCK_BYTES = 1 << 20


def data_identity(settings: DataSettings) -> dict[str, Any]:
    """The data settings and ``content``, the digest of the text, where one is known.

    Compare with what an earlier call noted after ``as_recorded``.
    """
    digest = content_digest(settings)
    known = {} if digest is None else {CONTENT: digest}
    return settings.model_dump(mode="json") | known


def as_recorded(now: Mapping[str, Any], then: Mapping[str, Any] | None) -> dict[str, Any]:
    """``now`` in the words of an earlier call, as far as both may have meant the same text.

    A call that noted no content (a hub data set, or an earlier version) is compared without. Text
    that is gone is taken to be what it was: whoever has to read it will say so. The same files
    in another folder count as the same source.

    Args:
        now, then: from ``data_identity``; None: there was no earlier call.
    """
    if then is None:
        return dict(now)
    before, after = then.get(CONTENT), now.get(CONTENT)
    settings = {name: value for name, value in now.items() if name != CONTENT}
    if before is None:
        return settings
    if before == after:
        settings["source"] = then["source"]
    return settings | {CONTENT: before if after is None else after}


def content_digest(settings: DataSettings) -> str | None:
    """A digest of the text itself; None of hub data sets, and where there is nothing to read.

    Local files: their names below the source, sizes and bytes as they are stored (not their times),
    up to 256 MiB all of them. Of a larger corpus so much is read: of each file its share, in evenly
    spaced blocks of at most 1 MiB, the beginning and the end among them. A change that leaves every
    size as it was and lies between the blocks is not seen.

    Raises:
        UserError: a folder without supported files, or a file that may not be read.
    """
    if settings.source == TopicsSource.name:
        return _hashed([json.dumps(python_topics(), sort_keys=True).encode()])
    root = Path(settings.source).expanduser()
    return _hashed(_pieces(root)) if root.exists() else None


def _pieces(root: Path) -> Iterator[bytes]:
    """Names and sizes, then the bytes that are looked at, file after file."""
    files = find_files(root)
    sizes = [path.stat().st_size for path in files]
    names = [path.name if path == root else path.relative_to(root).as_posix() for path in files]
    yield json.dumps([names, sizes]).encode()
    share = min(1.0, WHOLE_BYTES / max(1, sum(sizes)))
    for path, size in zip(files, sizes, strict=True):
        try:
            with path.open("rb") as file:
                for start, length in blocks(size, math.ceil(share * size)):
                    file.seek(start)
                    yield file.read(length)
        except PermissionError as error:
            raise UserError(f"{path}: may not be read ({error.strerror})") from error


def blocks(size: int, wanted: int) -> Iterator[tuple[int, int]]:
    """(start, length) of blocks of a file that are ``wanted`` bytes together, evenly spaced.

    They do not overlap; the first one begins and the last one ends with the file.
    """
    count = max(2, math.ceil(wanted / BLOCK_BYTES))
    for index in range(count):
        first, last = index * wanted // count, (index + 1) * wanted // count
        gap = index * (size - wanted) // (count - 1)
        yield first + gap, last - first


def _hashed(pieces: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
