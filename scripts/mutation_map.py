"""Which tests run the functions of each module of the host code: ``python scripts/mutation_map.py`` writes
mutation_map.json, which scripts/mutate.py reads.

It runs `make test`'s tests in one process, some twenty minutes. Functions that run in other processes are not noted.
``python scripts/mutation_map.py tests/kernels/test_new.py`` runs these alone, and adds what the map lacks: new modules.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/leanconv"
MAP = ROOT / "scripts/mutation_map.json"
#: Each function has so many tests that run it: the cheapest, those that run little else, and one of so many files.
TESTS_EACH = 3
#: By module, tests that run it in a process of their own, which is not looked into.
STARTED = {"cli/command_line.py": ("tests/cli/test_cli.py::test_a_terminal_of_ascii",)}
#: Modules that no test here runs.
WITHOUT_TESTS = {
    "__main__.py": "it runs in processes of its own",
}
#: Tests of one function that take longer in all are chosen one by one.
SECONDS_TOGETHER = 2.0

_OURS = f"{SOURCE}/"
#: A test, its seconds, and the functions that it has run, as ``call/choose.py:choose``.
Record = tuple[str, float, list[str]]


class Recorder:
    """A plugin of pytest that notes each test's time and the functions that it runs."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._run: set[CodeType] = set()

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        # NOTE: what others' code refers to would be kept alive, and a test looks at that
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self._run.add(frame.f_code)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._run.clear()
        begin = time.perf_counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            # Python 3.10 has no qualified names of code
            names = {
                f"{Path(code.co_filename).relative_to(SOURCE)}:{getattr(code, 'co_qualname', code.co_name)}"
                for code in self._run
            }
            self.records.append((item.nodeid, time.perf_counter() - begin, sorted(names)))


def joined(records: Iterable[Record]) -> list[Record]:
    """The same with one record for all parameters of a test's function, unless they take long together."""
    functions: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        functions[record[0].partition("[")[0]].append(record)
    found: list[Record] = []
    for name, each in functions.items():
        seconds = sum(record[1] for record in each)
        if seconds > SECONDS_TOGETHER:
            found += each
        else:
            found.append((name, seconds, sorted({function for record in each for function in record[2]})))
    return sorted(found, key=lambda record: record[1])


def chosen(records: Iterable[Record]) -> dict[str, list[str]]:
    """The tests of each module, the cheapest first."""
    every = joined(records)
    place = {test: number for number, (test, _, _) in enumerate(every)}
    size = {test: len(functions) for test, _, functions in every}
    running: dict[str, list[str]] = defaultdict(list)
    for test, _, functions in every:
        for function in functions:
            running[function].append(test)
    modules: dict[str, set[str]] = defaultdict(set)
    for function, tests in running.items():
        # of each file one, for another file looks at something else; and those that run little else
        of_files = {test.partition("::")[0]: test for test in reversed(tests)}.values()
        alone = sorted(tests, key=size.__getitem__)
        modules[function.partition(":")[0]].update(tests[:TESTS_EACH], alone[:TESTS_EACH])
        modules[function.partition(":")[0]].update(sorted(of_files, key=place.__getitem__)[:TESTS_EACH])
    for module, started in STARTED.items():
        modules[module].update(started)
    last = len(place)
    return {module: sorted(modules[module], key=lambda test: place.get(test, last)) for module in sorted(modules)}


def written(modules: dict[str, list[str]]) -> str:
    """As JSON that names each test once: ``tests``, and by module their numbers there, a module a line."""
    tests = sorted({test for each in modules.values() for test in each})
    numbers = {test: number for number, test in enumerate(tests)}
    lines = [f'  "{module}": {json.dumps([numbers[test] for test in each])}' for module, each in modules.items()]
    joint = ",\n"
    return f'{{\n "tests": {json.dumps(tests, indent=1)},\n "modules": {{\n{joint.join(lines)}\n }}\n}}\n'


def modules() -> list[str]:
    """Those that have tests: all of the host code but what merely names others, and `WITHOUT_TESTS`."""
    found = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    return sorted(set(found) - set(WITHOUT_TESTS))


def read() -> dict[str, list[str]]:
    """The tests of each module, as they are committed, without those that are no longer there."""
    content = json.loads(MAP.read_text(encoding="utf-8"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in ROOT.glob("tests/*/test_*.py")}

    def is_there(test: str) -> bool:
        file, *_, name = test.partition("[")[0].split("::")
        return f"def {name}(" in texts.get(file, "")

    tests = content["tests"]
    return {
        module: [tests[number] for number in each if is_there(tests[number])]
        for module, each in content["modules"].items()
    }


def with_new(known: dict[str, list[str]], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is known, without modules that are gone, and what was found of those that have no tests."""
    return {module: known.get(module) or found[module] for module in modules() if module in {*known, *found}}


if __name__ == "__main__":
    recorder, given = Recorder(), sys.argv[1:]
    marks = "not exhaustive and not slow and not gpu"
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "--assert=plain", "--ignore=tests/research"]
    # which fails until this has run
    options += ["--deselect", "tests/report/test_mutations.py::test_the_map_is_as_old_as_the_code"]
    if pytest.main([*options, *(given or [str(ROOT / "tests")])], plugins=[recorder]):
        raise SystemExit("tests fail: nothing is written")
    tests = chosen(recorder.records)
    MAP.write_text(written(with_new(read(), tests) if given else tests), encoding="utf-8")
