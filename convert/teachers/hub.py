"""Fetching a teacher from the model hub, with the exact revision recorded."""

from __future__ import annotations

import os
from pathlib import Path

from ltconvert.errors import UserError, first_line

_SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
_SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
_PYTORCH = ["pytorch_model.bin", "pytorch_model-*.bin"]


def fetch(repo: str, revision: str | None) -> tuple[Path, str]:
    """``(local folder, commit)`` of a hub repository's small files; none of its code is fetched.

    Args:
        repo: ``owner/name``.
        revision: branch, tag or commit; None for the default branch.

    Raises:
        UserError: no such repository or revision, no access, no connection.
    """
    folder = _snapshot(repo, revision, _SMALL_FILES)
    return folder, folder.name


def fetch_weights(repo: str, commit: str) -> None:
    """Add the weights to what ``fetch`` got; safetensors where the repository has them.

    Raises:
        UserError: as ``fetch``.
    """
    folder = _snapshot(repo, commit, _SAFETENSORS)
    if not any(folder.glob("model*.safetensors")):
        _snapshot(repo, commit, _PYTORCH)


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types
        at = f" at revision {revision!r}" if revision else ""
        reason = f"{_reason(error)}; a folder of that name is not here either"
        raise UserError(f"cannot get {repo!r}{at} from the hub: {reason}") from error


def _reason(error: Exception) -> str:
    reasons = {
        "GatedRepoError": "its owner grants access on request: accept the terms, then log in with "
        "`hf auth login`",
        "RepositoryNotFoundError": "there is no such model, or it is private",
        "RevisionNotFoundError": "there is no such revision",
        "HFValidationError": "the name is not of the form owner/name",
    }
    for kind in type(error).__mro__:
        if kind.__name__ in reasons:
            return reasons[kind.__name__]
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "HF_HUB_OFFLINE is set and the local cache does not have it"
    return f"{first_line(error)} (no connection? a folder or a .gguf file works offline)"
