"""Where a figure comes from: what a results file records, and what pages refuse by name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leanconv
from leanconv.bench import Results, provenance, run_suite
from leanconv.bench.suites import Case
from leanconv.kernels import ALGORITHMS
from leanconv.perf.tables import source_version
from leanconv.problem import ConvProblem
from leanconv.runtime import cache
from tests import made_up

COMMIT = "0123456789" * 4


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(("git", "-C", str(folder), *settings, *words), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def traced(**changes: Any) -> dict[str, Any]:
    """The record of a machine as it is written at a clean commit."""
    kernels = provenance.kernels(["im2win_fused", "implicit_gemm"])
    about = {"schema": provenance.SCHEMA, "git_revision": COMMIT, "git_dirty": False, "source": "a", "kernels": kernels}
    return made_up.MACHINE | about | changes


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "nvidia-h200" / "im2win.json"
    replace(made_up.suite(), machine=traced(**changes)).write(path)
    return path


# the hash of kernels


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The version of a kernel that includes a header, given the text of both."""
    monkeypatch.setattr(cache, "INCLUDE", tmp_path)

    def version(text: str, header: str = "int a;\n") -> str:
        (tmp_path / "b.cuh").write_text(header)
        (tmp_path / "a.cuh").write_text('#include "b.cuh"\n' + text)
        cache.headers.cache_clear()
        source_version.cache_clear()
        return source_version("a.cuh")

    yield version
    cache.headers.cache_clear()
    source_version.cache_clear()


def test_a_header_that_does_not_exist_has_no_hash(kernel: Any) -> None:
    with pytest.raises(FileNotFoundError, match="no kernel header 'c.cuh'"):
        source_version("c.cuh")


def test_a_kernels_hash_is_of_its_code_and_its_headers_without_comments(kernel: Any) -> None:
    plain = kernel("int x = 1;\n")
    assert kernel("// Measured 3 times\n\nint x = 1;  /* or\n so */\n") == plain
    assert kernel("int x = 2;\n") != plain and kernel("int x = 1;\n", "int b;\n") != plain


def test_a_string_is_not_a_comment(kernel: Any) -> None:
    assert kernel('f("http://a"); g();') != kernel('f("http://b"); g();')
    assert kernel(r'f("\"//a"); g();') != kernel(r'f("\"//b"); g();')
    assert kernel("f('\"'); // a") == kernel("f('\"'); // b")
    assert kernel('f("a/*"); g("*/");') != kernel('f("a/*"); h("*/");')


def test_every_algorithm_has_a_hash_with_what_it_launches_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(provenance.kernels()) == {each.stem for each in ALGORITHMS}
    assert set(provenance.kernels(["direct", "nothing"])) == {"direct"}
    hashed: list[set[str]] = []
    monkeypatch.setattr(provenance, "source_version", lambda *names: (hashed.__iadd__([set(names)]), "")[1])
    provenance._version.__wrapped__("leanconv.kernels.hopper_fp32.tensor_gemm")
    names = {Path(name).name for name in hashed[0]}
    assert {"tensor_gemm.cuh", "tensor_filters.cuh", "speculative_filters.cuh", "input_gradient.cuh"} <= names
    assert all((Path(leanconv.__file__).parent / name).is_file() for name in hashed[0])


# what is recorded


def test_the_hash_of_the_sources_is_gits(tmp_path: Path) -> None:
    files = {"b/x.py": "1", "b.py": "2", "b-c/y.cuh": "3", "a.json": "{}"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    tree = git(tmp_path, "write-tree")
    (tmp_path / "b" / "__pycache__").mkdir()
    (tmp_path / "b" / "__pycache__" / "x.cpython-312.pyc").write_bytes(b"1")
    folder = tmp_path / ".git"
    folder.rename(tmp_path.with_suffix(".git"))
    assert provenance.source_tree(tmp_path) == tree
    (tmp_path / "b.py").write_text("3")
    assert provenance.source_tree(tmp_path) != tree


def test_a_given_revision_is_a_clean_checkout_unless_git_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    source = provenance.source_tree(provenance._PACKAGE)
    # without a history, without that commit in it, of the same sources, of others
    for tree, dirty in ((None, False), ("", False), (source, False), ("a" * 40, True)):
        monkeypatch.setattr(provenance, "_tree_of", lambda commit, folder, tree=tree: tree)
        about = provenance.provenance(COMMIT)
        assert (about["git_revision"], about["git_dirty"]) == (COMMIT, dirty)
        assert about["schema"] == provenance.SCHEMA and about["source"] == source
    for here in {"git_revision": None, "git_dirty": None}, {"git_revision": COMMIT, "git_dirty": True}:
        monkeypatch.setattr(provenance, "revision", lambda here=here: here)
        assert here.items() <= provenance.provenance(None).items()
    with pytest.raises(ValueError, match="revision='abc' is no commit"):
        provenance.provenance("abc")


def test_a_run_records_the_kernels_that_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("layer", ConvProblem(1, 4, 9, 10, 6, 3, 3))
    done = run_suite([case], device="cpu", quick=True, engines=("leanconv",), progress=False)
    assert done.machine["kernels"] == {} and done.machine["schema"] == provenance.SCHEMA


# what pages refuse


def test_a_traced_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert provenance.committed(path) == Results.read(path)
    assert provenance.committed_record(path)["suite"] == "im2win"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"git_dirty": True}, "is dirty: files differed"),
        ({"git_dirty": None}, "is dirty: .*git_dirty is None"),
        ({"git_revision": None}, "of an unknown revision: git_revision is None"),
        ({"git_revision": "abc"}, "of an unknown revision: git_revision is 'abc'"),
        ({"schema": 0}, "of schema 0, and .* schema 2"),
        ({"schema": None}, "of schema None"),
        ({"kernels": None}, "is damaged: it does not say with which kernels"),
        ({"kernels": {"im2win_fused": "0"}}, "of earlier kernels: im2win_fused changed since"),
        ({"kernels": {"gone": "0"}}, "of earlier kernels: gone changed since"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    path = written(tmp_path, **changes)
    for read in (provenance.committed, provenance.committed_record):
        with pytest.raises(ValueError, match=rf"im2win\.json.* {rule}"):
            read(path)
    listed = {"nvidia-h200/im2win.json": "the kernels' layout moved"}
    if "earlier kernels" in rule:
        assert provenance.committed(path, listed).rows and provenance.committed_record(path, listed)
    else:
        with pytest.raises(ValueError, match=rule):
            provenance.committed(path, listed)


def test_sources_of_equal_code_are_followed(tmp_path: Path) -> None:
    path = written(tmp_path, kernels={"im2win_fused": "a", "implicit_gemm": "x"})
    today = provenance.kernels(("im2win_fused", "implicit_gemm"))
    listed = path.parent.parent / provenance.SAME_CODE
    listed.write_text(json.dumps([{"a": "b", "x": today["implicit_gemm"]}, {"b": today["im2win_fused"]}]))
    assert provenance.committed(path).rows
    # in the order of time
    listed.write_text(json.dumps([{"b": today["im2win_fused"]}, {"a": "b", "x": today["implicit_gemm"]}]))
    with pytest.raises(ValueError, match="of earlier kernels: im2win_fused changed since"):
        provenance.committed(path)


def test_code_that_is_equal_for_one_operation_is_followed_for_that_alone(tmp_path: Path) -> None:
    path = written(tmp_path, kernels={"im2win_fused": "a"})
    today = provenance.kernels(("im2win_fused",))["im2win_fused"]
    listed = path.parent.parent / provenance.SAME_CODE
    listed.write_text(json.dumps([{"a": "b"}, {"dgrad": {"b": "c"}, "fprop": {"b": today}}]))
    assert provenance.committed(path).rows, "a suite without a word for it is of forward passes"
    about = {"kernels": {"im2win_fused": "a"}}
    assert provenance.changed_kernels(about, path.parent.parent, "fprop") == []
    for op in ("dgrad", "wgrad", None):
        assert provenance.changed_kernels(about, path.parent.parent, op) == ["im2win_fused"]
    with pytest.raises(ValueError, match="of earlier kernels: im2win_fused changed since"):
        provenance.committed_record(path)


def test_which_code_is_equal_is_found_by_operation() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    try:
        compare_code = importlib.import_module("compare_code")
    finally:
        sys.path.pop()

    def found(version: str, *code: str) -> dict[str, Any]:
        keys = ("conv:n1,NHWC limit None", "conv:n1,NHWC,dgrad limit None", "conv:n1,NHWC,wgrad limit None")
        return {
            "kernels": {"one": version}, "headers": {"one": {"one.cuh": f"{version} header"}},
            "picked": dict.fromkeys(keys, "one"),
            "code": {key: {"auto": [[1, each]]} for key, each in zip(keys, code, strict=True)},
            "choices": {f"{key} again": ["one", [[len(code[1])]]] for key in keys[1:2]},
        }  # fmt: skip

    before, after = found("old", "x", "y", "z"), found("new", "x", "o", "z")
    equal = {"old": "new", "old header": "new header"}
    assert compare_code.equal_code(before, found("new", "x", "y", "z")) == equal
    assert compare_code.equal_code(before, after) == {}
    by_op = {op: compare_code.equal_code(before, after, op) for op in ("fprop", "dgrad", "wgrad")}
    assert by_op == {"fprop": equal, "dgrad": {}, "wgrad": equal}
    # a problem whose code was not compared has other launches
    other = found("new", "x", "y", "z") | {"choices": found("new", "x", "yy", "z")["choices"]}
    assert compare_code.equal_code(before, other) == compare_code.equal_code(before, other, "dgrad") == {}
    assert compare_code.equal_code(before, other, "fprop") == equal
    # the list keeps what results files name
    entries: list[dict[str, Any]] = [
        {"a": "b", "x": "y"},
        {"b": "c", "y": "z", "fprop": {"c": "no"}},
        {"fprop": {"c": "d"}},
    ]
    assert compare_code.in_use(entries, {"a", "q"}) == [{"a": "c"}, {"fprop": {"c": "d"}}]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_text()
    row = '"problem":"narrow"'
    assert row in whole
    for broken in (whole[:900], "[]", "{}", whole.replace(row, row.replace("narrow", "gone"))):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"im2win\.json"):
            provenance.committed(path)
    path.write_text(whole[:900])
    with pytest.raises(ValueError, match=r"im2win\.json is damaged"):
        provenance.committed_record(path)
    replace(made_up.suite(), machine=traced(), problems={}, rows=[]).write(path)
    with pytest.raises(ValueError, match=r"im2win\.json is damaged: it has no problem"):
        provenance.committed(path)


def test_a_revision_is_looked_up_where_there_is_a_history(tmp_path: Path) -> None:
    package = tmp_path / "src" / "leanconv"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit, tree = git(tmp_path, "rev-parse", "HEAD"), provenance.source_tree(package)
    results = tmp_path / "benchmarks" / "results"
    assert provenance.committed(written(results, git_revision=commit, source=tree)).rows
    with pytest.raises(ValueError, match=f"unknown revision: this repository has no commit {COMMIT}"):
        provenance.committed(written(results))
    with pytest.raises(ValueError, match=f"is dirty: its sources a are not those of {commit}"):
        provenance.committed(written(results, git_revision=commit))
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{tmp_path}", str(tmp_path / "shallow"))
    assert provenance.committed(written(tmp_path / "shallow")).rows, "a shallow history does not have every commit"


def test_the_list_of_files_of_earlier_kernels_is_read(tmp_path: Path) -> None:
    assert provenance.older(tmp_path) == {}
    (tmp_path / "older.json").write_text('{"nvidia-h200/modes.json": "a reason"}')
    assert provenance.older(tmp_path) == {"nvidia-h200/modes.json": "a reason"}
