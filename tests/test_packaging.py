"""The wheel holds every subpackage and data file, and no generic top-level name leaks out."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ltconvert

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("convert", "distill", "kernels", "recipes")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_every_subpackage_is_listed(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    found = {"ltconvert"} | {
        ".".join(("ltconvert", *init.parent.relative_to(ROOT).parts))
        for source in SOURCES
        for init in (ROOT / source).rglob("__init__.py")
    }
    assert set(listed) == found
    assert listed == sorted(listed)


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without `__init__.py` works in an editable install and is missing from the wheel."""
    for source in SOURCES:
        for module in (ROOT / source).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_every_data_file_is_declared(project: dict[str, Any]) -> None:
    """Files that are not Python reach the wheel only by a pattern of their own package."""
    declared = project["tool"]["setuptools"]["package-data"]
    for source in SOURCES:
        for file in (ROOT / source).rglob("*"):
            if file.is_dir() or file.suffix in {".py", ".pyc"}:
                continue
            package = ".".join(("ltconvert", *file.parent.relative_to(ROOT).parts))
            assert any(file.match(pattern) for pattern in declared.get(package, [])), file


@pytest.mark.parametrize("name", ["cli", "errors", *SOURCES])
def test_no_generic_top_level_name(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is None or ROOT not in Path(spec.origin or "").resolve().parents


def test_version_is_the_changelogs() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert versions[0] == ltconvert.__version__


def test_constraints_pin_every_dependency(project: dict[str, Any]) -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"{line!r} is no pin"
            pins[_normal(name)] = version
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["test"]]
    missing = {_normal(re.split(r"[<>=!~\[; ]", line)[0]) for line in wanted} - set(pins)
    assert missing == {"triton"}  # its version belongs to the build of torch


def test_set_up_names_no_registry() -> None:
    """Where packages come from is the machine's own affair."""
    for name in ("Makefile", ".ci/run", "constraints.txt", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|--(extra-)?index|--find-links", text), name


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
