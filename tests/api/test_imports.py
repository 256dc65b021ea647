"""Who imports whom: no circles, and nothing of the wheel imports what stays outside it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules() -> dict[str, Path]:
    """Every module of leanconv, report and research by its name."""
    named = {}
    for base, package in ((ROOT / "src", "leanconv"), (ROOT, "report"), (ROOT, "research")):
        for path in (base / package).rglob("*.py"):
            named[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return named


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules among ``known`` that a file imports: at its top, inside functions, and for annotations alone.

    ``from package import name`` is an import of ``package.name`` where that is a module, else of the package.
    """
    wanted = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                wanted.add(module if module in known else str(node.module))
    return wanted & set(known)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, and the last the first; empty where there is no such circle."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return way[way.index(module) :]
        if module not in done:
            for other in sorted(graph[module]):
                if round_trip := walk(other, [*way, module]):
                    return round_trip
            done.add(module)
        return []

    for module in graph:
        if round_trip := walk(module, []):
            return round_trip
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    assert {"leanconv.api", "leanconv.bench.tables", "report.pages", "research.pages"} <= set(known)
    graph = {name: imports(path, known) for name, path in known.items()}
    assert "leanconv.cli.doctor" in graph["leanconv.cli.main"], "imports inside functions count"
    assert circle(graph) == []


def test_circles_are_seen() -> None:
    assert circle({"a": {"b", "d"}, "b": {"d"}, "c": {"e"}, "d": {"c"}, "e": {"d"}}) == ["d", "c", "e"]
    assert circle({"a": {"a"}}) == ["a"] and circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_wheel_does_without_what_is_not_in_it_and_the_report_without_research() -> None:
    known = modules()
    for package, apart in (("leanconv", ("report", "research")), ("report", ("research",))):
        for name, path in known.items():
            if name.startswith(package):
                others = {other for other in imports(path, known) if other.startswith(apart)}
                assert not others, f"{name} imports {others}"


def test_kernels_of_calls_do_without_those_of_studies() -> None:
    studied = {path.name for path in (ROOT / "research" / "kernels").glob("*.cuh")}
    assert studied
    for path in (ROOT / "src" / "leanconv" / "kernels").rglob("*.cuh"):
        included = set(re.findall(r"#\s*include [<\"](?:.*/)?([^/>\"]+)[>\"]", path.read_text(encoding="utf-8")))
        assert not studied & (included | {path.name}), path


def test_a_choice_reads_measurements_and_needs_neither_the_tuner_nor_pytorch() -> None:
    known = modules()
    reached, todo = set(), ["leanconv.call.choose"]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += imports(known[name], known)
    assert "leanconv.perf.tables" in reached
    assert not [name for name in reached if name.startswith(("leanconv.tuning", "leanconv.torch"))]


def test_only_the_command_line_needs_the_benchmark() -> None:
    known = modules()
    for name, path in known.items():
        if not name.startswith(("leanconv.bench", "leanconv.cli", "leanconv.__main__", "report", "research")):
            others = {other for other in imports(path, known) if other.startswith(("leanconv.bench", "leanconv.cli"))}
            assert not others, f"{name} imports {others}"


def test_the_modules_that_a_user_names_come_with_the_package() -> None:
    words = "import leanconv; print(leanconv.filters.box(1).tolist(), leanconv.ndimage.correlate([1], [2]).tolist())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=environment, check=True)
    assert told.stdout.split() == ["[[1.0]]", "[2]"]
