"""The parts of PyTorch that are not public and that leanconv.torch uses: which of them this PyTorch has not."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
SOURCES = Path(__file__).resolve().parents[2] / "src" / "leanconv"


def private_parts() -> dict[str, set[str]]:
    """Dotted names below torch with a part that begins with an underscore, and the files that use them."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        known = {"torch": "torch"}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        names = {dotted for node in ast.walk(tree) if (dotted := _dotted(node, known))} | {*known.values()}
        for name in names:
            if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
                found.setdefault(name, set()).add(path.relative_to(SOURCES).as_posix())
    return found


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, known)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _there(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_this_pytorch_has_the_private_parts() -> None:
    """One that a new version has renamed or removed is named here, with the files to change."""
    parts = private_parts()
    assert len(parts) > 10 and "torch._C._get_tracing_state" in parts
    assert not (missing := {name: files for name, files in parts.items() if not _there(name)}), missing
    assert not _there("torch._C._no_such_thing") and not _there("torch._no_such_module.thing")
