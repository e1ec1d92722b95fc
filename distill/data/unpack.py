"""Compressed and parquet files as plain files that can be read at any offset.

A random document order needs random access, which neither gives. Such a file is unpacked once,
into ``<HF_HOME>/ltconvert/corpus`` (where ``datasets`` keeps its own copies), under a name made of
its path, size and time, and is found there by every later stage, resume and process.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ltconvert.distill.data.documents import missing_field
from ltconvert.errors import UserError, first_line
from ltconvert.recipes.data import DataSettings

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
COPIES = 2  # how they are written; with another number, earlier copies are not read any more
SUPPORTED = "jsonl, parquet, txt, md, rst; packed with gz, bz2, xz or zst"


def _open_zst(path: Path) -> IO[bytes]:
    """Arrow reads it, which `datasets` brings, and tells where a file is cut off."""
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


# All of them open for reading bytes by default.
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


def kind_of(path: Path) -> str | None:
    """`jsonl`, `text` or `parquet` by the name, a packing suffix left out; None: not supported."""
    name = path.name.lower()
    if path.suffix.lower() in OPENERS:
        name = name.removesuffix(path.suffix.lower())
    if name.endswith(JSON_SUFFIXES):
        return "jsonl"
    if name.endswith(TEXT_SUFFIXES):
        return "text"
    return "parquet" if path.suffix.lower() == ".parquet" else None


def is_packed(path: Path) -> bool:
    """Whether the file is read from an unpacked copy."""
    return path.suffix.lower() in OPENERS or kind_of(path) == "parquet"


def plain_file(path: Path, settings: DataSettings) -> Path:
    """`path` itself when it can be read at any offset, else its unpacked copy.

    Raises:
        UserError: the file is damaged, its packing is not readable here, or the disk is full.
    """
    if path.suffix.lower() in OPENERS:
        return _cached(path, "", lambda out: _unpack(path, out))
    if kind_of(path) == "parquet":
        fields = f"{settings.text_field}\0{settings.messages_field}"
        return _cached(path, fields, lambda out: _parquet_lines(path, settings, out))
    return path


def corpus_cache() -> Path:
    """Folder of unpacked copies; it can be deleted at any time."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "ltconvert" / "corpus"


def _cached(path: Path, variant: str, write: Callable[[IO[bytes]], None]) -> Path:
    status = path.stat()
    key = f"{COPIES}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{variant}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    target = corpus_cache() / digest
    if target.exists():
        return target
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as out:
            temporary = Path(out.name)
            write(out)
        os.replace(temporary, target)  # whole or not at all, also with several processes
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged or cut off ({error}); fetch or pack it again") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be unpacked into {target.parent} ({error}); "
            "set HF_HOME to a folder with room"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return target


def _unpack(path: Path, out: IO[bytes]) -> None:
    with OPENERS[path.suffix.lower()](path) as packed:
        try:
            shutil.copyfileobj(packed, out, 1 << 20)
        except OSError as error:
            if error.errno is None:  # bz2, gzip and Arrow report damage so, a full disk never
                raise EOFError(str(error)) from error
            raise


def _parquet_lines(path: Path, settings: DataSettings, out: IO[bytes]) -> None:
    """Write the text and messages columns as one JSON object a line.

    Raises:
        UserError: there is no such column, or it holds bytes that are no text.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        wanted = (settings.messages_field, settings.text_field)
        columns = [name for name in table.schema_arrow.names if name in wanted]
        if not columns:
            raise missing_field(table.schema_arrow.names, settings, str(path))
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for record in batch.to_pylist():
                out.write(json.dumps(record, default=_as_text).encode() + b"\n")
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: bytes that are not UTF-8 in the columns {', '.join(columns)}; "
            "set data.text_field to a column of texts"
        ) from None
    except pyarrow.ArrowException as error:
        raise EOFError(first_line(error)) from error


def _as_text(value: Any) -> str:
    """What JSON has no form for; bytes are text of a file that does not say so, as many do not."""
    return value.decode() if isinstance(value, bytes) else str(value)
