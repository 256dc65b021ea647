"""The blocks of the documents: what fills them, what they say where nothing was measured; docs/performance.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import columns, default_path
from leanconv.bench.results import Results
from report import pages, records
from report.__main__ import main
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]


def test_files_of_whole_suites_in_their_order(tmp_path: Path) -> None:
    results = made_up.in_nhwc()
    assert records.table((["x", "y"], [["1", "2"]])) == "| x | y |\n|---|---|\n| 1 | 2 |"
    path = default_path(results, partial=False, root=tmp_path)
    assert path == tmp_path / "nvidia-h200" / "im2win-nhwc.json"
    results.write(path)
    results.write(default_path(results, partial=True, root=tmp_path))
    assert pages.suites(tmp_path) == [path], "a part of a suite is no result to publish"
    other = default_path(replace(results, suite="winograd1d", layout="NCHW"), partial=False, root=tmp_path)
    results.write(other)
    assert other.stem == "winograd1d-nchw" and pages.suites(tmp_path) == [path, other]
    relaxed = replace(results, suite="opencnn", layout="NCHW", precision="relaxed")
    named = {
        default_path(measured, partial=False, root=tmp_path, suffix=suffix).stem
        for measured in (relaxed, made_up.in_chwn(relaxed), replace(made_up.in_chwn(relaxed), precision=None))
        for suffix in ("", "-ablation")
    }
    assert named == {
        "opencnn-relaxed", "opencnn-relaxed-ablation", "opencnn-chwn-relaxed", "opencnn-chwn-relaxed-ablation",
        "opencnn-chwn", "opencnn-chwn-ablation",
    }  # fmt: skip
    further = default_path(made_up.in_chwn(relaxed), partial=False, root=tmp_path)
    made_up.in_chwn(relaxed).write(further)
    assert pages.suites(tmp_path) == [path, further, other]
    gradient = default_path(replace(results, op="wgrad"), partial=False, root=tmp_path)
    replace(results, op="wgrad").write(gradient)
    assert gradient.stem == "im2win-nhwc-wgrad" and gradient in pages.suites(tmp_path)
    assert Results.read(further).precision == "relaxed"


def test_no_committed_suite_is_left_out_of_the_tables() -> None:
    """But a suite that no peer computes, and the few layers that the cost model alone needs."""
    folder = ROOT / "benchmarks/results"
    files = (
        path for path in folder.glob("*/*.json") if not path.stem.endswith("-part")
    )  # of a single problem: not kept
    every = {path.stem for path in files if "suite" in columns.read(path)}
    assert every - {path.stem for path in pages.suites(folder)} == {"resnet-50-nhwc-int8", "batch-1-depthwise-tf32"}


def test_a_block_without_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for what in set(pages.MAKERS) - {"suites", "older", "peers", "below"}:
        with pytest.raises(ValueError, match=f"page.md: block '{what} a-file': .*there is no file a-file.json"):
            made_up.filled(tmp_path, f"{what} a-file")


def test_blocks_of_another_layout_say_where_the_peers_ran(tmp_path: Path) -> None:
    for results in (made_up.in_nhwc(), made_up.in_chwn(made_up.in_nhwc())):
        results.write(default_path(results, False, tmp_path))
    told = "cuDNN and PyTorch have no layout CHWN: they take the same numbers in NCHW and NHWC. × is "
    assert told in made_up.filled(tmp_path, "standings im2win-chwn")
    assert "have no layout" not in made_up.filled(tmp_path, "standings im2win-nhwc")


def test_every_command_that_is_named_exists() -> None:
    texts = [ROOT / "Makefile", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "report").glob("*.*")]
    named = {word for path in texts for word in re.findall(r"-m report ([a-z-]+)", path.read_text(encoding="utf-8"))}
    assert named == {
        "at-scale",
        "cpu",
        "first-calls",
        "large",
        "layers",
        "modes",
        "numerics",
        "older",
        "pages",
        "refit",
    }
    for word in named:
        with pytest.raises(SystemExit) as stopped:
            main([word, "--help"])
        assert not stopped.value.code


# blocks of documents

PAGE = """# A page

Words before.

<!-- made: standings im2win together=im2win,im2win_fused -->
old
<!-- /made -->

Words between.

<!-- made: speed-figure im2win -->
<!-- /made -->
<!-- made: speeds im2win-nhwc algorithms=im2win -->
<!-- /made -->
"""


def test_blocks_are_filled_and_nothing_else(tmp_path: Path) -> None:
    suite = made_up.suite()
    pytest.importorskip("matplotlib")
    docs, results = tmp_path / "docs", tmp_path / "results"
    page = docs / "algorithms" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    suite.write(default_path(suite, False, results))
    made_up.in_nhwc().write(default_path(made_up.in_nhwc(), False, results))
    assert [*pages.fill_all(docs, results)] == [page]
    text = page.read_text()
    assert "NVIDIA H200, 2026-01-02, revision 0123456789ab." in text and "old" not in text
    assert "| best of im2win, im2win_fused | 2 | 2.83 (2.00) |" in text
    (link,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    picture = (page.parent / link).resolve()
    assert picture == (docs / "pictures" / "nvidia-h200-im2win-speed.png").resolve() and picture.exists()
    assert "| a | 1.00 | 1.00 | 1.00 | – |" in text
    outside = re.sub(r"(<!-- made[^\n]*\n).*?(<!-- /made)", r"\1\2", text, flags=re.DOTALL)
    assert outside == PAGE.replace("old\n", "")
    before = page.stat().st_mtime_ns
    assert [*pages.fill_all(docs, results)] == []
    assert page.read_text() == text and page.stat().st_mtime_ns == before, "what is right stays as it is"


def test_blocks_that_are_not_understood_are_named(tmp_path: Path, capsys: Any) -> None:
    suite = made_up.suite()
    page = tmp_path / "page.md"
    suite.write(default_path(suite, False, tmp_path))
    for block in ("poem im2win", "standings", "speeds im2win"):
        page.write_text(made_up.blocks(block))
        with pytest.raises(SystemExit) as stopped:
            main(["pages", "--docs", str(tmp_path), "--results", str(tmp_path)])
        assert stopped.value.code == 2
        assert f"page.md: block '{block}'" in capsys.readouterr().err


def test_committed_documents_hold_the_committed_figures() -> None:
    """``make docs`` has been run after the last results file came."""
    found = 0
    for page in pages.texts(ROOT / "docs"):
        text = page.read_text(encoding="utf-8")
        made = pages.fill(text, page, ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures", draw=False)
        assert made == text, f"{page.relative_to(ROOT)} is not what `make docs` makes"
        found += text.count("<!-- made: ")
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} shows {link}, which is not there"
    assert found >= 8
