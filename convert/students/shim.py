"""What AutoModel needs beside a saved config.json: a module that names the installed classes.

transformers copies the source of a model with code of its own into every folder; a student's
folder only points at ltconvert.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_NAME = "lt2_student"
_SOURCE = '''"""Points transformers at the installed ltconvert package."""

from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM

__all__ = ["LT2Config", "LT2ForCausalLM"]
'''
_AUTO_MAP = {
    "AutoConfig": f"{_NAME}.LT2Config",
    "AutoModelForCausalLM": f"{_NAME}.LT2ForCausalLM",
}
_CAUSAL_LM = "LT2ForCausalLM"
# `transformers serve` looks the first of these up among transformers' own classes, without regard
# to the auto_map; this one heeds it.
_SERVED = "AutoModelForCausalLM"


def add_shim(config: Any, folder: str | os.PathLike[str]) -> None:
    """Write the module and let a config that is about to be saved there name it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_NAME}.py").write_text(_SOURCE, encoding="utf-8")
    config.auto_map = dict(_AUTO_MAP)
    if config.architectures == [_CAUSAL_LM]:
        config.architectures = [_SERVED, _CAUSAL_LM]
