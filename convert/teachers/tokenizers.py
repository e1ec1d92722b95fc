"""Loading a teacher's tokenizer and checking it against the embedding."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ltconvert.convert.teachers.gguf_file import GGUFFile
from ltconvert.convert.teachers.ouro import CHAT_TEMPLATE, FAMILY_NAME
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError, first_line

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def folder_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a checkpoint folder; None when it has none. No remote code is run.

    Raises:
        UserError: the files do not make a tokenizer.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # AutoTokenizer asks for a config that it knows; the files may well stand on their own.
        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception:
            raise UserError(
                f"cannot read the tokenizer in {folder}: {first_line(error)}"
            ) from error


def gguf_tokenizer(file: GGUFFile) -> Any | None:
    """The tokenizer inside a GGUF file, or None; kept in the user's cache, as making it is slow.

    Raises:
        UserError: transformers cannot make one of it.
    """
    if "tokenizer.ggml.tokens" not in file.metadata:
        return None
    from transformers import AutoTokenizer

    kept = cache_folder() / "tokenizers" / file.header_digest[:32]
    if kept.is_dir():
        return AutoTokenizer.from_pretrained(kept)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:
        raise UserError(f"cannot read the tokenizer in {file.path}: {first_line(error)}") from error
    _keep(tokenizer, kept)
    return tokenizer


def cache_folder() -> Path:
    """Where ltconvert keeps what it can make again: XDG_CACHE_HOME/ltconvert."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltconvert"


def fit_tokenizer(tokenizer: Any, spec: TeacherSpec) -> str | None:
    """Complete a tokenizer for its family, check its ids; a remark where a part is unusable.

    An embedding with more rows than the tokenizer has ids is a padded vocabulary, and fine.

    Raises:
        UserError: ordinary or special ids have no row in the embedding.
    """
    if spec.family == FAMILY_NAME and not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer.get_vocab()
    outside = {token for token, i in ids.items() if i >= spec.vocab_size}
    needed = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    # Gemma 3's text models share a tokenizer whose image token lies past their embedding.
    if not outside:
        return None
    if outside - set(tokenizer.get_added_vocab()) or outside & needed:
        raise UserError(
            f"tokenizer and model do not match: ids go up to {max(ids.values())}, "
            f"the embedding has {spec.vocab_size} rows; give the tokenizer of this checkpoint"
        )
    return (
        f"{len(outside)} added tokens have no row in the embedding and cannot be used: "
        f"{', '.join(sorted(outside)[:3])}"
    )


def _keep(tokenizer: Any, folder: Path) -> None:
    """Write whole, then rename; a cache that cannot be written is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError:
        return
    try:
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
