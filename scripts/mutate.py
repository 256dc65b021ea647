"""Random single edits of the host code, and whether tests see them: ``python scripts/mutate.py [COUNT [SEED]]``.

Each edit is one of: a comparison swapped, a constant changed by one, a condition negated, a return dropped, an argument
dropped. The tests of the edited module's part run; an edit that they all pass lives, and is printed. The edit is made
in a copy of the checkout, never here.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/leanconv")
#: What sees edits of each folder first; of all others ``tests/api``.
TESTS = {
    "cli": ("tests/cli", "tests/tuning/test_tuning_cli.py"),
    "bench": ("tests/cli",),
    "cpu": ("tests/cpu", "tests/api/test_properties.py"),
    "kernels": ("tests/kernels/test_algorithms.py", "tests/kernels/test_input_gradient.py", "tests/api/test_choose.py"),
    "perf": ("tests/tuning", "tests/api/test_choose.py"),
    "tuning": ("tests/tuning",),
    "runtime": ("tests/runtime", "tests/api/test_first_calls.py"),
    "torch": ("tests/torch",),
}
#: Edits that change nothing anybody could see, as they are printed.
EQUIVALENT: frozenset[str] = frozenset()
#: A test that takes so long waits for ever.
SECONDS = 120

_SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def edits(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may take the place of a node, with its kind."""
    if isinstance(node, ast.Compare):
        ops = [_SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison swapped", ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant changed", ast.Constant(node.value + 1)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = ast.UnaryOp(ast.Not(), node.test)
        yield "condition negated", type(node)(**{**dict(ast.iter_fields(node)), "test": test})
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return dropped", ast.Expr(node.value)
    if isinstance(node, ast.Call) and (node.keywords or len(node.args) > 1):
        if node.keywords:
            yield "argument dropped", ast.Call(node.func, node.args, node.keywords[:-1])
        else:
            yield "argument dropped", ast.Call(node.func, node.args[:-1], [])


def changed(text: str, node: ast.AST, other: ast.AST) -> str:
    """The source with a node replaced; all else stays as it is written."""
    lines = text.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before = b"".join(lines[:first]) + lines[first][: node.col_offset]  # type: ignore[attr-defined]
    after = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])  # type: ignore[attr-defined]
    made = ast.unparse(ast.fix_missing_locations(other))
    indent = "\n" + " " * node.col_offset  # type: ignore[attr-defined]
    made = made.replace("\n", indent) if isinstance(node, ast.stmt) else f"({made})"
    return (before + made.encode() + after).decode()


def chosen(count: int, seed: int) -> list[tuple[Path, str, str]]:
    """So many edits: the module, the edit in words, the module's new text."""
    draw = random.Random(seed)
    modules = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCE).rglob("*.py") if path.name != "__init__.py")
    found: list[tuple[Path, str, str]] = []
    while len(found) < count:
        path = draw.choice(modules)
        text = (ROOT / path).read_text(encoding="utf-8")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        # not within f-strings, whose parts have no places of their own on older Pythons; nor annotations
        inner = [
            each
            for function in functions
            for statement in function.body
            for node in ast.walk(statement)
            if not isinstance(node, (ast.JoinedStr, ast.FormattedValue)) and "f'" not in ast.unparse(node)
            for each in ((node, *edit) for edit in edits(node))
        ]
        if not inner:
            continue
        node, kind, other = draw.choice(inner)
        words = f"{path.relative_to(SOURCE)}: {kind}: {ast.unparse(node).splitlines()[0][:80]}"
        made = changed(text, node, other)
        try:
            ast.parse(made)
        except SyntaxError:
            continue
        if words not in EQUIVALENT:
            found.append((path, words, made))
    return found


def lives(folder: Path, path: Path, made: str) -> bool:
    """Whether the tests pass with this text of a module, in a copy of the checkout."""
    original = (folder / path).read_text(encoding="utf-8")
    (folder / path).write_text(made, encoding="utf-8")
    own = sorted(each.relative_to(ROOT).as_posix() for each in ROOT.glob(f"tests/*/test_{path.stem}*.py"))
    tests = dict.fromkeys((*own, *TESTS.get(path.relative_to(SOURCE).parts[0], ("tests/api",))))
    marks = "not exhaustive and not slow and not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", str(SECONDS), "-m", marks, *tests]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return not subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode
    finally:
        (folder / path).write_text(original, encoding="utf-8")


def run(count: int = 30, seed: int = 29) -> list[str]:
    """Make the edits one by one; returns those that live."""
    living = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache"))
        for path, words, made in chosen(count, seed):
            alive = lives(folder, path, made)
            print("LIVES" if alive else "dies ", words, flush=True)
            living += [words] * alive
    return living


if __name__ == "__main__":
    survivors = run(*map(int, sys.argv[1:]))
    print(f"{len(survivors)} live")
