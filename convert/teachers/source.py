"""Where a teacher comes from: one reference string, four kinds of place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ltconvert.convert.teachers import folder as folders
from ltconvert.convert.teachers import gguf_names, hub, tokenizers
from ltconvert.convert.teachers.family import Config
from ltconvert.convert.teachers.gguf_file import GGUFFile
from ltconvert.convert.teachers.packaged import PACKAGED, find_packaged
from ltconvert.errors import UserError


@dataclass(frozen=True)
class Source:
    """A place that holds a teacher.

    Attributes:
        name: short name for people and file names.
        kind: ``"package"``, ``"gguf"``, ``"folder"`` or ``"hub"``.
        location: the reference as given, or what it resolves to.
        path: the folder or the GGUF file on this machine.
        revision: package version or hub commit, where there is one.
    """

    name: str
    kind: str
    location: str
    path: Path
    revision: str | None = None

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The opened file of a GGUF source, else None."""
        return GGUFFile(self.path) if self.path.is_file() else None

    @cached_property
    def config(self) -> Config:
        """The published config, or what a GGUF file's metadata stand for."""
        if self.gguf is not None:
            return gguf_names.read_config(self.gguf)
        return folders.read_config(self.path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """``(canonical name, tensor)`` of every stored tensor; a hub's are fetched first."""
        if self.kind == "hub":
            hub.fetch_weights(self.location, str(self.revision))
        if self.gguf is not None:
            return gguf_names.tensors(self.gguf, self.config)
        return folders.tensors(self.path, self.config)

    def tokenizer(self) -> Any | None:
        """The tokenizer that comes with it, or None."""
        if self.gguf is not None:
            return tokenizers.gguf_tokenizer(self.gguf)
        return tokenizers.folder_tokenizer(self.path)

    def stored_bytes(self) -> int | None:
        """Size of the weight files; None where they are not on this machine."""
        if self.gguf is not None:
            return self.path.stat().st_size
        try:
            return sum(file.stat().st_size for file in folders.weight_files(self.path))
        except UserError:
            return None


def resolve(reference: str, *, revision: str | None = None) -> Source:
    """The source that a reference names; of a hub id only the small files are fetched.

    Args:
        reference: the name of a packaged teacher, a ``.gguf`` file, a model folder, or a hub id.
        revision: of a hub id: branch, tag or commit.

    Raises:
        UserError: it names none of these.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, "folder", str(path.resolve()), path.resolve())
    if reference.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"there is no GGUF file {reference}")
        return Source(path.stem, "gguf", str(path.resolve()), path.resolve())
    if path.is_file():
        raise UserError(f"{reference} is a file, but no .gguf file; give the folder of a model")
    if reference in PACKAGED:
        file, version = find_packaged(reference)
        return Source(reference, "package", PACKAGED[reference].distribution, file, version)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", reference):
        folder, commit = hub.fetch(reference, revision)
        return Source(reference.split("/")[1], "hub", reference, folder, commit)
    raise UserError(
        f"no teacher {reference!r}: expected a model folder, a .gguf file, a hub id owner/name, "
        f"or one of the packaged teachers ({', '.join(PACKAGED)})"
    )
