"""Random single edits of the host code, and whether tests see them: ``python scripts/mutate.py [COUNT [SEED]]``.

Each edit is one of: a comparison swapped, a constant changed by one, a condition negated, a return dropped, an argument
dropped. The tests that mutation_map.json has for the edited module run until one fails, and then all others of their
files; an edit that they all pass lives. No more than one in ten may. The edit is made in a copy of the checkout, never
here.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import mutation_map
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/leanconv")
#: Edits that change nothing anybody could see, as they are printed.
EQUIVALENT = {
    # None counts as false as well
    "arrays/base.py: return dropped: return False",
    # of columns behind the last one there is none to be written
    "cpu/single_channel.py: constant changed: 0 in seen = max(0, min(width - left, problem.w))",
    # rows are copied on to columns of the image's type, and float64 holds what they hold
    "cpu/single_channel.py: argument dropped: np.zeros((height, width), image.dtype)",
    # an origin for each axis was asked for just before
    "ndimage/windows.py: argument dropped: zip(along, origins, strict=True)",
    # of all parts the last is taken
    "plan.py: argument dropped: self.function.rsplit('::', 1)",
}
#: A test that takes so long waits for ever.
SECONDS = 60
OLD = "mutation_map.json is older than the code: python scripts/mutation_map.py"

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
    """An edit in each of so many modules: the module, the edit in words, the module's new text.

    Hashes decide, and no state of a generator: a change of one module leaves the edits of the others as they are.
    """

    def rank(text: str) -> int:
        return zlib.crc32(f"{seed} {text}".encode())

    modules = [SOURCE / name for name in mutation_map.modules()]
    found: list[tuple[Path, str, str]] = []
    for path in sorted(modules, key=lambda path: rank(path.as_posix())):
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
        lines = text.splitlines()
        words = [
            f"{path.relative_to(SOURCE).as_posix()}: {kind}: {ast.unparse(node).splitlines()[0][:80]}"
            for node, kind, _ in inner
        ]
        for place in sorted(range(len(inner)), key=lambda place: rank(words[place])):
            node, _, other = inner[place]
            said = words[place]
            if isinstance(node, ast.Constant):
                said += f" in {lines[node.lineno - 1].strip()}"
            made = changed(text, node, other)
            if said not in EQUIVALENT and compiles(made):
                found.append((path, said, made))
                break
        if len(found) == count:
            break
    return found


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class Copy:
    """A copy of the checkout, where edits are made and tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: tests that pass without an edit
        self._passed: set[str] = set()
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache"))

    def lives(self, path: Path, made: str, tests: list[str]) -> bool:
        """Whether the tests pass with this text of a module. They have to with the text that it has."""
        if not self._passed.issuperset(tests):
            done = self._run(tests)
            if gone := self._gone(done):
                # parameters come and go: all that the function has now, in place of any (pytest does not take both)
                functions = {test.partition("[")[0] for test in gone}
                named = ((test.partition("[")[0], test) for test in tests)
                tests = list(dict.fromkeys(name if name in functions else test for name, test in named))
                done = self._run(tests)
                if self._gone(done):
                    raise SystemExit(f"{done.stderr}\n{OLD}")
            if done.returncode:
                raise SystemExit(f"{done.stdout}\ntests of {path} fail without an edit, and would see any")
            self._passed.update(tests)
        original = (self.folder / path).read_text(encoding="utf-8")
        self._write(path, made)
        try:
            return not self._run(tests).returncode
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        """NOTE: a compiled module counts as that of any text of the same second and size."""
        for compiled in (self.folder / path).parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        (self.folder / path).write_text(text, encoding="utf-8")

    def _run(self, tests: list[str]) -> subprocess.CompletedProcess[str]:
        options = ["-q", "-x", f"--timeout={SECONDS}", "-m", "not exhaustive", "--assert=plain"]
        command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *tests]
        where = {"PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{self.folder}"}
        return subprocess.run(command, cwd=self.folder, env=os.environ | where, capture_output=True, text=True)

    def _gone(self, done: subprocess.CompletedProcess[str]) -> set[str]:
        """Tests that were asked for and are not there. With an edit there may be none at all: that is seen, too."""
        if done.returncode != pytest.ExitCode.USAGE_ERROR:
            return set()
        lines = (line.partition("ERROR: not found: ")[2] for line in done.stderr.splitlines())
        return {line.removeprefix(f"{self.folder}{os.sep}") for line in lines if line}


def run(count: int = 30, seed: int = 29) -> list[str]:
    """Make the edits one by one; returns those that live."""
    living = []
    tests = mutation_map.read()
    with tempfile.TemporaryDirectory() as temporary:
        copy = Copy(Path(temporary) / "copy")
        for path, words, made in chosen(count, seed):
            of_module = tests.get(path.relative_to(SOURCE).as_posix())
            if not of_module:
                raise SystemExit(f"{path} has no tests there. {OLD}")
            files = sorted({test.partition("::")[0] for test in of_module})
            alive = all(copy.lives(path, made, each) for each in (of_module, files))
            print("LIVES" if alive else "dies ", words, flush=True)
            living += [words] * alive
    return living


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    survivors = run(*numbers)
    print(f"{len(survivors)} live")
    raise SystemExit(10 * len(survivors) > (numbers or [30])[0])
