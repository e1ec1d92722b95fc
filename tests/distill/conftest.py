"""A toy case for the modules that name a ``FAMILY``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipeline_case import make_case

from ltconvert.convert.teachers.load import Teacher, load_teacher


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any
) -> Path:
    """A folder with a random teacher of the module's family and a text of its own language."""
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer, request.module.FAMILY)
    return folder


@pytest.fixture(scope="module")
def teacher(case: Path) -> Teacher:
    """The case's teacher."""
    return load_teacher(str(case / "teacher"))
