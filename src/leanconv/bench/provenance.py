"""Where a figure comes from: revision, sources and kernels of a measurement, and the refusal of files that do not say.

Every results file has these in the record of its machine (`provenance`). Pages read files by `committed` and
`committed_record`, which refuse by name what cannot be traced.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from leanconv.bench import columns
from leanconv.bench.columns import SCHEMA
from leanconv.bench.results import Results
from leanconv.kernels import ALGORITHMS
from leanconv.perf.tables import source_version
from leanconv.runtime.files import read_bytes, read_json

#: The file below the results that lists those of earlier kernels which pages may still use, each with the reason.
OLDER = "older.json"
#: The file below the results that lists, for each comparison by scripts/compare_code.py, the versions before and after
#: of sources that changed and whose machine code did not. These are layers of the suites, without a bias or a residual:
#: what changed in layers that have such, a reason in `OLDER` says.
SAME_CODE = "same_code.json"
_PACKAGE = Path(__file__).resolve().parents[1]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IMPORT = re.compile(r"^from (leanconv\.kernels[\w.]*) import \(?([\w, \n]+)", re.MULTILINE)
_HEADER = re.compile(r'["/](\w+\.cuh)"')


def provenance(given_revision: str | None, gpu: bool = True) -> dict[str, Any]:
    """Schema, revision, whether files differ from it, sources and kernels, as the record of a machine has them.

    A ``given_revision`` says that the sources are those of this commit, without changes: for a machine without its
    history. Where git knows the commit, the sources are compared with it. ``source`` is git's hash of the package's
    folder, by which pages compare what was said with the commit. The kernels are those of layers, which networks have;
    suites and studies name theirs. Without a ``gpu`` no kernel was measured. Raises ValueError for a revision that is
    no full hash of a commit.
    """
    if given_revision is not None and not _COMMIT.fullmatch(given_revision):
        raise ValueError(f"revision={given_revision!r} is no commit: its hash has 40 hexadecimal digits")
    source = source_tree(_PACKAGE)
    if given_revision is None:
        found = revision()
    else:
        tree = _tree_of(given_revision, _PACKAGE)
        found = {"git_revision": given_revision, "git_dirty": bool(tree) and tree != source}
    return {"schema": SCHEMA, **found, "source": source, "kernels": kernels(of_layers()) if gpu else {}}


def revision() -> dict[str, Any]:
    """The git commit of the checkout that contains this package, and whether files differ from it."""
    try:
        _git(_PACKAGE, "ls-files", "--error-unmatch", "__init__.py")
        dirty = _git(_PACKAGE, "status", "--porcelain", "--untracked-files=no")
        return {"git_revision": _git(_PACKAGE, "rev-parse", "HEAD"), "git_dirty": bool(dirty)}
    except (OSError, subprocess.CalledProcessError):
        return {"git_revision": None, "git_dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def source_tree(folder: Path) -> str:
    """Git's hash of a folder of plain files, as ``git rev-parse COMMIT:FOLDER`` has it; byte code is left out."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and (inner := source_tree(path)) != _object("tree", b""):
            entries.append((f"{path.name}/", f"40000 {path.name}", inner))
        elif path.is_file() and path.suffix != ".pyc":
            entries.append((path.name, f"100644 {path.name}", _object("blob", path.read_bytes())))
    tree = b"".join(f"{entry}\0".encode() + bytes.fromhex(found) for _, entry, found in sorted(entries))
    return _object("tree", tree)


def _object(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def of_layers() -> set[str]:
    """The GPU algorithms that compute layers, not image filters."""
    return {each.stem for each in ALGORITHMS if each.solves == "conv2d"}


def kernels(stems: Collection[str] | None = None) -> dict[str, str]:
    """A hash of the kernels' sources for each of our GPU algorithms, or for those of ``stems`` that are any.

    The sources are the algorithm's own kernel, those that its host half launches besides, and all headers that these
    include. Comments and spaces do not count.
    """
    chosen = (each for each in ALGORITHMS if stems is None or each.stem in stems)
    return {each.stem: _version(type(each).__module__) for each in chosen}


@cache
def _version(module: str) -> str:
    names = {path.name: path.relative_to(_PACKAGE).as_posix() for path in (_PACKAGE / "kernels").glob("*/*.cuh")}
    _, family, stem = module.rsplit(".", 2)
    launched = {f"kernels/{family}/{stem}.cuh"}
    for each in _host_modules(module):
        text = Path(str(import_module(each).__file__)).read_text(encoding="utf-8")
        launched |= {names[name] for name in _HEADER.findall(text) if name in names}
    return source_version(*launched)


def _host_modules(module: str) -> set[str]:
    """A host half and those of leanconv.kernels that it imports, directly or not."""
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        text = Path(str(import_module(name).__file__)).read_text(encoding="utf-8")
        for source, imported in _IMPORT.findall(text):
            todo.append(source)
            todo += [inner for each in re.findall(r"\w+", imported) if (inner := f"{source}.{each}") in sys.modules]
    return found


def older(results: Path) -> dict[str, str]:
    """What the list of files of earlier kernels says, by ``<machine>/<name>.json``; nothing where there is no list."""
    path = results / OLDER
    return dict(read_json(read_bytes(path))) if path.is_file() else {}


def same_code(results: Path) -> list[dict[str, Any]]:
    """What the list of sources of equal machine code says, in the order of time; nothing where there is no list.

    Each entry has versions and those that came after them; under the name of an operation those whose code is equal for
    it, and not for others.
    """
    path = results / SAME_CODE
    return list(read_json(read_bytes(path))) if path.is_file() else []


def committed(path: Path, older: Mapping[str, str] = {}) -> Results:
    """The results of a suite, for a page. Raises ValueError, as `refuse` does, and for a file that is damaged."""
    results = Results.read(path)
    refuse(results.machine, path, older, measured=results.problems, op=results.op or "fprop")
    return results


def committed_record(path: Path, older: Mapping[str, str] = {}) -> dict[str, Any]:
    """Any other record, for a page: a dict with ``machine``, or with a machine's entries of its own."""
    record = columns.read(path)
    refuse(record["machine"] if isinstance(record.get("machine"), dict) else record, path, older)
    return record


def refuse(
    about: Mapping[str, Any], path: Path, older: Mapping[str, str] = {}, measured: Collection[str] | None = None,
    op: str | None = None,
) -> None:  # fmt: skip
    """Raise ValueError where the record ``about`` of a machine, in the file ``path``, cannot be traced.

    That is one of another schema; of a revision that is unknown, or that the git history at hand does not have; with
    files that differ from it; or of kernels that have changed since, unless only their sources did (`same_code`) or
    ``older`` lists ``<machine>/<name>.json``.
    A suite that ``measured`` nothing is refused, too. ``op`` is its operation.
    """
    commit, dirty = about.get("git_revision"), about.get("git_dirty")
    if about.get("schema") != SCHEMA:
        raise ValueError(f"{path} is of schema {about.get('schema')}, and pages are made of schema {SCHEMA}")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError(f"{path} is of an unknown revision: git_revision is {commit!r}, not the hash of a commit")
    if dirty is not False:
        raise ValueError(f"{path} is dirty: files differed from revision {commit} (git_dirty is {dirty!r})")
    tree = _tree_of(commit, path.resolve().parent)
    if tree == "":
        raise ValueError(f"{path} is of an unknown revision: this repository has no commit {commit}")
    if tree is not None and tree != about.get("source"):
        raise ValueError(f"{path} is dirty: its sources {about.get('source')} are not those of {commit}, {tree}")
    if measured is not None and not measured:
        raise ValueError(f"{path} is damaged: it has no problem")
    if not isinstance(about.get("kernels"), Mapping):
        raise ValueError(f"{path} is damaged: it does not say with which kernels it was measured")
    changed = changed_kernels(about, path.parent.parent, op)
    if changed and f"{path.parent.name}/{path.name}" not in older:
        raise ValueError(
            f"{path} is of earlier kernels: {', '.join(changed)} changed since; measure it anew, or list it in {OLDER} "
            "with a reason"
        )


def changed_kernels(about: Mapping[str, Any], results: Path, op: str | None = None) -> list[str]:
    """The kernels that a record was measured with and whose machine code has changed since; ``about``: its machine.
    ``op``: of what all its layers are; None where they are of several."""
    versions, today = dict(about.get("kernels", {})), kernels()
    for equal in same_code(results):
        mine = equal | equal.get(op or "", {})
        versions = {stem: mine.get(version, version) for stem, version in versions.items()}
    return [stem for stem, version in versions.items() if today.get(stem) != version]


@cache
def same_headers(commit: str) -> bool:
    """Whether all kernel headers are equal to those of a commit; False where git does not know it."""
    try:
        return not _git(_PACKAGE, "diff", "--name-only", commit, "--", "*.cuh")
    except (OSError, subprocess.CalledProcessError):
        return False


@cache
def _tree_of(commit: str, folder: Path) -> str | None:
    """Git's hash of the package's sources at a commit, by the history that ``folder`` lies in.

    Empty where the history has no such commit; None where there is no whole history of leanconv.
    """
    try:
        _git(folder, "ls-files", "--error-unmatch", ":/src/leanconv/__init__.py")
        if _git(folder, "rev-parse", "--is-shallow-repository") == "true":
            return None
    except (OSError, subprocess.CalledProcessError):
        return None
    try:
        return _git(folder, "rev-parse", "--verify", f"{commit}:src/leanconv")
    except subprocess.CalledProcessError:
        return ""
