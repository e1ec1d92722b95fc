"""Imports go one way: cli -> distill -> convert -> kernels; recipes are read by cli and distill."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels", "errors"},
    "convert": {"convert", "kernels", "errors"},
    "recipes": {"recipes", "errors"},
    "distill": {"distill", "convert", "kernels", "recipes", "errors"},
    "errors": set(),
}
HEAVY = {"torch", "transformers", "datasets", "accelerate", "lm_eval", "numpy", "pydantic", "rich"}
MODULES = sorted(
    path
    for source in ("convert", "distill", "kernels", "recipes", ".")
    for path in (ROOT / source).glob("*.py" if source == "." else "**/*.py")
)


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; `top_level` leaves out functions and TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _run_at_import(tree) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)


def _part(path: Path) -> str:
    """The layer that a module belongs to; `cli_x.py` belongs to `cli`."""
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem.partition("_")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    allowed = MAY_IMPORT.get(_part(path))
    if allowed is None:  # cli may import everything; the root package imports nothing
        return
    for name in imports(path):
        if name.startswith("ltconvert."):
            assert name.split(".")[1] in allowed | {"__version__"}, f"imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_own_modules_are_imported_by_their_full_name(path: Path) -> None:
    """`import kernels` would load a second copy, or Hugging Face's package of that name."""
    bare = {name.split(".")[0] for name in imports(path)}
    assert not bare & {"cli", "convert", "distill", "kernels", "recipes", "errors"}


def test_nobody_imports_the_command_line() -> None:
    for path in MODULES:
        if _part(path) != "cli":
            assert not any(name.startswith("ltconvert.cli") for name in imports(path)), path


def test_command_line_imports_nothing_heavy() -> None:
    """What `ltconvert --help` loads: follow top-level imports from cli.py."""
    waiting, seen = ["cli"], set()
    while waiting:
        name = waiting.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name in seen or not path.is_file():
            path = ROOT / name.replace(".", "/") / "__init__.py"
            if name in seen or not path.is_file():
                continue
        seen.add(name)
        for imported in imports(path, top_level=True):
            assert imported.split(".")[0] not in HEAVY, f"{path} imports {imported}"
            if imported.startswith("ltconvert."):
                waiting.append(imported.removeprefix("ltconvert."))
            elif imported == "ltconvert":
                waiting.append("__init__")
    assert {"cli", "cli_session", "cli_output", "errors"} <= seen


def test_recipes_know_no_torch() -> None:
    for path in (ROOT / "recipes").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}, path
