"""Compare what two revisions launch: which kernels are chosen, and their machine code. Needs NVRTC, no GPU.

``python scripts/compare_code.py REVISION`` collects the launches of that revision, in a worktree of its own and by its
own copy of this file, and of the working tree, then lists every difference; it exits with 1 where there is one.
``--write FILE`` only collects, ``--like FILE`` the sample of another one, ``--family NAME`` the code of one family,
``--most N`` a smaller sample; ``--files BEFORE AFTER`` only compares. ``--record`` adds the versions of sources whose
code is equal wherever it was compared to benchmarks/results/same_code.json, so that figures hold for the new sources.
With ``--anew`` problems whose words with their limit match a pattern do not count: no results file of before has them.

Two things are compared for an H200. Choices: for every problem of all suites, in every layout, operation, element type
and precision, the launches that ``auto`` takes by the cost model (grid, block, shared memory, cluster). Code: the
compiled instructions and constants of ``auto`` and of every algorithm that can run it, for a sample of the problems
that has every algorithm in each of them. Names of kernels, headers and constants do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Bytes of workspace that a choice may take besides none: what training allows gradients of filters.
LIMITS = (None, 32 << 20)
OPS = ("fprop", "dgrad", "wgrad")
#: Problems sampled for each algorithm that ``auto`` takes, and for every algorithm that can run them; launches that are
#: compiled at most for each way of asking, beside those of the first problems of each algorithm that ``auto`` takes.
EACH, EACH_OF_ALL, MOST_LAUNCHES, ALWAYS = 5, 3, 60, 2


def problems() -> Iterator[tuple[str, list[Any]]]:
    """Every way of asking, in words, and the problems of all suites that are asked so."""
    from leanconv.bench.suites import load_suite, suite_layout, suite_names

    filters = [case.problem for name in suite_names() if suite_layout(name) is None for case in load_suite(name)]
    yield "filter2d", filters
    ways: list[dict[str, str]] = []
    for op in OPS:
        ways += [{"layout": layout, "op": op} for layout in ("NCHW", "NHWC", "CHWN")]
        for layout in ("NCHW", "NHWC"):
            ways += [{"layout": layout, "op": op, "dtype": dtype} for dtype in ("float16", "bfloat16")]
            ways += [{"layout": layout, "op": op, "precision": level} for level in ("ieee", "relaxed", "tf32")]
    ways += [{"layout": layout, "op": "fprop", "dtype": "int8"} for layout in ("NCHW", "NHWC")]
    for way in ways:
        found = []
        for name in suite_names():
            of_volumes = name == "conv3d" and way["layout"] == "CHWN"  # a layout of images
            if suite_layout(name) is not None and not of_volumes:
                found += [case.problem for case in load_suite(name, **way)]  # type: ignore[arg-type]
        yield " ".join(way.values()), list(dict.fromkeys(found))


def shape(launch: Any) -> list[int]:
    """The numbers of a launch."""
    return [launch.grid, launch.block, launch.shared_bytes, launch.cluster]


def collect(
    file: Path, like: Path | None = None, family: str | None = None, most_launches: int = MOST_LAUNCHES
) -> None:
    """Write what this checkout launches; with ``like`` the code of the problems that another one has sampled, with
    ``family`` only that of its kernels, with ``most_launches`` so many for each way of asking.
    """
    os.environ["LEANCONV_TUNING"] = "off"
    from leanconv import words
    from leanconv.bench.provenance import kernels
    from leanconv.call.choose import NoAlgorithmError, choose, consider
    from leanconv.call.explain import NOMINAL
    from leanconv.kernels import ALGORITHMS
    from leanconv.perf.tables import source_version
    from leanconv.runtime import cache
    from leanconv.runtime.threads import cores

    sampled = json.loads(like.read_text())["code"] if like else None
    choices: dict[str, Any] = {}
    code: dict[str, dict[str, list[Any]]] = {}
    every_launch: dict[str, Any] = {}
    headers: dict[str, dict[str, str]] = {}  # of each algorithm, with their versions
    picked: dict[str, str] = {}  # the algorithm that `auto` takes
    for way, found in problems():
        for limit in LIMITS if "wgrad" in way else LIMITS[:1]:
            last: Counter[str] = Counter()
            most = len(every_launch) + most_launches
            for problem in found:
                key = f"{words.format_problem(problem)} limit {limit}"
                try:
                    chosen = choose(problem, NOMINAL, "auto", limit)
                except NoAlgorithmError:
                    choices[key] = ["none", []]
                    continue
                plan = chosen.plan(problem, NOMINAL)
                choices[key] = [chosen.algorithm.stem, [shape(each) for each in plan.all_launches]]
                last[chosen.algorithm.stem] += 1
                if sampled is not None:
                    if key not in sampled:
                        continue
                    every = len(sampled[key]) > 1
                elif last[chosen.algorithm.stem] > (EACH if len(every_launch) <= most else ALWAYS):
                    continue
                else:
                    every = last.total() <= EACH_OF_ALL and len(every_launch) <= most
                able = {"auto": chosen}
                for algorithm in ALGORITHMS if every else ():
                    if algorithm.solves == problem.kind and not algorithm.reasons(problem, NOMINAL):
                        name, prepared = algorithm.stem, algorithm.prepared_bytes(problem)
                        able[name] = consider(algorithm, problem, NOMINAL, name, limit)
                        able[f"{name} without workspace"] = consider(algorithm, problem, NOMINAL, name, prepared)
                code[key], picked[key] = {}, chosen.algorithm.stem
                for name, candidate in able.items():
                    if candidate.config is None or family not in (None, candidate.algorithm.family):
                        continue
                    launches = candidate.plan(problem, NOMINAL).all_launches
                    names = [cache.key(each, NOMINAL.arch) for each in launches]
                    every_launch.update(zip(names, launches, strict=True))
                    mine = headers.setdefault(candidate.algorithm.stem, {})
                    mine |= {each.header: source_version(each.header) for each in launches}
                    code[key][name] = [[*shape(e), n] for e, n in zip(launches, names, strict=True)]
    print(f"{file}: {len(choices)} choices; compiling {len(every_launch)} launches", file=sys.stderr)
    with ThreadPoolExecutor(cores()) as pool:
        compiled = pool.map(lambda each: cache.compiled(each, NOMINAL.arch), every_launch.values())
        hashes = {
            name: f"{each.code} {each.registers} registers {each.spill_bytes} spilled"
            for name, each in zip(every_launch, compiled, strict=True)
        }
    for by_name in code.values():
        for launches in by_name.values():
            for each in launches:
                each[-1] = hashes[each[-1]]
    found = {"kernels": kernels(), "headers": headers, "picked": picked, "choices": choices, "code": code}
    file.write_text(json.dumps(found, indent=0))


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the differences; returns how many there are."""
    lines = []
    for key, (name, launches) in before["choices"].items():
        now = after["choices"].get(key)
        if now is None or now[1] != launches:
            lines.append(f"choice: {key}: {name} {launches} -> {now}")
    equal = total = 0
    for key, by_name in before["code"].items():
        now = after["code"].get(key, {})
        found = {json.dumps(launch) for launches in now.values() for launch in launches}
        for name, launches in by_name.items():
            for i, launch in enumerate(launches):
                total += 1
                same = json.dumps(launch) in found if name != "auto" else launch in now.get("auto", [])
                equal += same
                if not same:
                    lines.append(f"code: {key}: {name}, launch {i}: {launch}")
    print("\n".join(lines))
    print(f"{len(before['choices'])} choices, {total} launches, {equal} of equal code, {len(lines)} differences")
    return len(lines)


def equal_code(before: dict[str, Any], after: dict[str, Any], op: str = "") -> dict[str, str]:
    """The version before and the one after of sources that changed and whose machine code did not.

    Those of an algorithm and of each of its kernels, where all launches that both samples have are equal, and where no
    problem that it is chosen for has other launches; with ``op`` those of this operation.
    """
    differ, compared = set(), set()
    for key, (stem, launches) in before["choices"].items():
        now = after["choices"].get(key, [])
        if (not op or _op_of(key) == op) and now[:1] == [stem] and now[1:] != [launches]:
            differ.add(stem)
    for key, by_name in before["code"].items():
        if op and _op_of(key) != op:
            continue
        for name, launches in by_name.items():
            now = after["code"].get(key, {}).get(name)
            stem = before["picked"][key] if name == "auto" else name.removesuffix(" without workspace")
            if now is not None and not (name == "auto" and after["picked"][key] != stem):
                (compared if launches == now else differ).add(stem)
    found = {}
    for stem in sorted(compared - differ):
        found[before["kernels"][stem]] = after["kernels"].get(stem, "")
        for header, version in before["headers"][stem].items():
            if not any(header in before["headers"][other] for other in differ):
                found[version] = after["headers"].get(stem, {}).get(header, "")
    return {old: new for old, new in found.items() if new not in ("", old)}


def _op_of(key: str) -> str:
    """The operation of a problem in words."""
    given = key.partition(" ")[0].split(",")
    return next((op for op in ("dgrad", "wgrad") if op in given), "fprop")


def record(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Add what is equal to the list that pages go by: in all operations, and by operation what is equal in that alone.
    Of earlier versions those stay that results files name."""
    found: dict[str, Any] = equal_code(before, after)
    for op in OPS:
        alone = {old: new for old, new in equal_code(before, after, op).items() if old not in found}
        found |= {op: alone} if alone else {}
    path = ROOT / "benchmarks/results/same_code.json"
    entries = [*(json.loads(path.read_text()) if path.is_file() else []), found]
    path.write_text(json.dumps(in_use(entries, _versions()), indent=0) + "\n")
    count = sum(len(each) if isinstance(each, dict) else 1 for each in found.values())
    print(f"{path}: {count} versions of sources whose code is equal")


def in_use(entries: list[dict[str, Any]], used: set[str]) -> list[dict[str, Any]]:
    """What such a list says of the versions ``used``, in two entries: in all operations, and then by operation."""

    def last(version: str, op: str = "") -> str:
        for entry in entries:
            version = (entry | entry.get(op, {})).get(version, version)
        return version

    every = {version: last(version) for version in sorted(used) if last(version) != version}
    by_op = {op: {last(each): last(each, op) for each in sorted(used) if last(each, op) != last(each)} for op in OPS}
    return [every, {op: pairs for op, pairs in by_op.items() if pairs}]


def _versions() -> set[str]:
    """The versions of kernels that the results files name."""
    found = set[str]()
    for path in (ROOT / "benchmarks/results").rglob("*.json"):
        record = json.loads(path.read_text())
        machines = record.values() if isinstance(record, dict) else ()
        for about in (record, *(each for each in machines if isinstance(each, dict))):
            if isinstance(about, dict) and isinstance(about.get("kernels"), dict):
                found |= set(map(str, about["kernels"].values()))
    return found


def of_revision(revision: str, file: Path) -> None:
    """Collect in a worktree of a revision, by its own copy of this file."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, revision], cwd=ROOT, check=True)
        try:
            run = [sys.executable, f"{folder}/scripts/compare_code.py", "--write", str(file)]
            subprocess.run(run, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": f"{folder}/src"})
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def main() -> int:
    """Collect, compare, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--like", type=Path, metavar="FILE", help="sample what this file has sampled")
    parser.add_argument("--family", help="compile only the kernels of this family (all choices are compared)")
    parser.add_argument("--most", type=int, default=MOST_LAUNCHES, help="launches for each way of asking")
    parser.add_argument("--files", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--record", action="store_true", help="note the sources of equal code")
    parser.add_argument(
        "--anew", nargs="*", default=(), metavar="PATTERN", help="problems that were measured anew: left out"
    )
    given = parser.parse_args()
    if given.write:
        collect(given.write, given.like, given.family, given.most)
        return 0
    if given.files:
        before, after = given.files
    elif given.revision:
        folder = Path(tempfile.mkdtemp())
        before, after = folder / "before.json", folder / "after.json"
        of_revision(given.revision, before)
        collect(after, before)
    else:
        parser.error("give a revision, --write or --files")
    both = json.loads(before.read_text()), json.loads(after.read_text())
    for part, pattern in product(("choices", "code"), given.anew):
        both[0][part] = {key: each for key, each in both[0][part].items() if not fnmatchcase(key, pattern)}
    if given.record:
        record(*both)
    return int(compare(*both) > 0)


if __name__ == "__main__":
    sys.exit(main())
