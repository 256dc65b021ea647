"""Figures in texts: what their words say, what is refused, and that all committed ones are those of the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import default_path
from report import pages
from report.__main__ import main
from report.fields import Fields, fill_sources
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"network": "a", "mode": "fp32", "torch_us": 9000.0, "our_us": 3000.0, "peak_bytes": 38_000_000, "taken": 7},
    {"network": "b", "mode": "fp32", "torch_us": 8000.0, "our_us": 1000.0, "peak_bytes": 1000, "taken": 8},
    {"network": "a", "mode": "tf32", "torch_us": 500.0, "error": 2.94e-4, "peers": {"torch-fp32": 40.0}},
]
ENGINES = [
    {"network": "a", "engine": "leanconv", "us": 100.0},
    {"network": "a", "engine": "torch-nchw", "us": 300.0},
    {"network": "a", "engine": "torch-nhwc", "us": 250.0},
    {"network": "b", "engine": "leanconv", "us": 100.0},
    {"network": "b", "engine": "torch-nchw", "us": 1000.0},
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Files of a suite in two layouts and of two records."""
    suite = made_up.suite()
    suite.rows += [
        made_up.row("narrow", "leanconv:auto", "im2win_fused", 40, error=2e-7),
        made_up.row("narrow", "leanconv:prepared", "im2win", 25, 500),
    ]
    suite.write(default_path(suite, False, tmp_path))
    nhwc = made_up.in_nhwc()
    nhwc.write(default_path(nhwc, False, tmp_path))
    for name, rows in (("modes", ROWS), ("networks", ENGINES)):
        (tmp_path / "nvidia-h200" / f"{name}.json").write_text(json.dumps({"machine": made_up.MACHINE, "rows": rows}))
    return tmp_path


@pytest.mark.parametrize(
    "words, figure",
    [
        ("im2win best/lean mean", "3.16"),  # 50/10 and 30/15
        ("im2win best/lean least", "2.00"),
        ("im2win best/lean most", "5.00"),
        ("im2win best/lean most only=w*", "2.00"),
        ("im2win best/lean count", "2"),
        ("im2win best/cudnn least", "0.62"),  # 50/80 and 30/15
        ("im2win-nhwc best/others mean", "1.55"),
        ("im2win-nhwc others name", "PyTorch"),
        ("im2win auto/lean mean", "4.00"),
        ("im2win auto/lean missing", "1"),
        ("im2win im2win:prepared/im2win mean", "1.25"),
        ("im2win im2win/im2col most", "6.00"),
        ("im2win auto us", "25.0"),
        ("im2win im2win workspace-mean", "550"),
        ("im2win auto error only=narrow", "2.0e-07"),
        ("im2win best tflops-most", "50.0"),
        ("im2win lean missing", "0"),
        ("im2win-nhwc best/pytorch mean", "1.55"),  # 3/10 in NCHW and 80/10
        ("im2win-nhwc best/pytorch-same mean", "4.00"),  # 20/10 and 80/10
        ("im2win-nhwc best/pytorch least", "0.30"),
        ("modes network=a,mode=fp32 torch_us/our_us mean", "3.00"),
        ("modes mode=fp32 torch_us/our_us mean", "4.90"),
        ("modes mode=* torch_us/our_us missing", "1"),
        ("modes mode=fp32,network=a torch_us mean in=ms", "9.00"),
        ("modes mode=fp32,network=a our_us/torch_us mean in=%", "33"),
        ("modes mode=fp32 peak_bytes most", "38.0 MB"),
        ("modes mode=fp32 taken least", "7"),
        ("modes mode=tf32 error most", "2.9e-04"),
        ("modes mode=tf32 torch_us/peers.torch-fp32 mean", "12.5"),
        ("networks engine=leanconv/torch-* us mean", "5.00"),  # 250/100, the quicker layout, and 1000/100
        ("networks engine=leanconv/torch-*,network=a us mean", "2.50"),
    ],
)
def test_figures(results: Path, words: str, figure: str) -> None:
    assert Fields(results).figure(words) == figure


@pytest.mark.parametrize(
    "words, said",
    [
        ("absent auto/pytorch mean", "there is no file"),
        ("im2win winograd3d/lean mean", "the file has no rows of 'winograd3d'"),
        ("im2win im2win:packed/lean mean", "the file has no rows of 'im2win:packed'"),
        ("im2win auto/tf32 mean", "no layer has rows of both auto and tf32"),
        ("im2win best/lean median", "'median' is no statistic"),
        ("im2win best colour", "'colour' is none of us, "),
        ("im2win best us", "2 layers have it"),
        ("im2win best us only=conv", "no layer is called 'conv'"),
        ("im2win best", "FILE WHO[/AGAINST] STAT"),
        ("modes mode=fp32 mean", "FILE KEY=PATTERN"),
        ("modes mode=fp64 torch_us mean", "no row is mode=fp64"),
        ("modes made=fp32 torch_us mean", "no row has 'made'"),
        ("modes mode=fp32 their_us mean", "there are no such rows"),
    ],
)
def test_what_there_is_not_is_named_with_its_page(results: Path, words: str, said: str, capsys: Any) -> None:
    docs = results / "docs"
    docs.mkdir()
    (docs / "page.md").write_text(f"It is <!-- figure: {words} -->1.00<!-- /figure --> times as fast.\n")
    with pytest.raises(SystemExit) as stopped:
        main(["pages", "--docs", str(docs), "--results", str(results), "--sources", str(docs)])
    told = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 2 and f"page.md: figure {words!r}: " in told and said in told


def test_fields_of_pages_and_comments_are_filled(results: Path) -> None:
    docs, sources = results / "docs", results / "src"
    docs.mkdir()
    sources.mkdir()
    page, readme, header = docs / "page.md", results / "README.md", sources / "kernel.cuh"
    field = "<!-- figure: im2win best/lean\nmean -->{}<!-- /figure -->"
    for text in (page, readme):
        text.write_text(f"It is {field.format('9.99')} times as fast, at least {field.format('')} times.\n")
    header.write_text("// Measured   figure: im2win best/lean mean only=* = 1 MB more\nint figure: x = 3;\n")
    fields = Fields(results)
    assert [*pages.fill_all(docs, results, fields)] == [readme, page]
    assert [*fill_sources(sources, fields)] == [header]
    for text in (page, readme):
        assert (
            text.read_text() == f"It is {field.format('3.16')} times as fast, at least {field.format('3.16')} times.\n"
        )
    assert header.read_text() == "// Measured   figure: im2win best/lean mean only=* = 3.16 more\nint figure: x = 3;\n"
    assert [*pages.fill_all(docs, results, fields)] == [] and [*fill_sources(sources, fields)] == []
    changed = replace(made_up.suite(), rows=[r for r in made_up.suite().rows if r.problem == "wide"])
    changed.write(default_path(changed, False, results))
    assert [*pages.fill_all(docs, results, Fields(results))] == [readme, page] and "2.00" in page.read_text()


def test_committed_texts_have_the_committed_figures() -> None:
    fields = Fields(ROOT / "benchmarks" / "results")
    sources = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".cuh", ".py"))
    for page in (*pages.texts(ROOT / "docs"), *sources):
        text = page.read_text(encoding="utf-8")
        assert fields.fill(text, page) == text, f"{page.relative_to(ROOT)} is not what `make docs` makes"
