"""docs/performance.md: networks by mode, what a call picks on each suite, files of earlier kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import default_path, provenance
from leanconv.bench.results import Results
from report import modes, network_tables, pages, records
from report.fields import Fields
from tests import made_up

FIELD = "It is <!-- figure: im2win best/lean mean -->3.16<!-- /figure --> times as fast.\n"


def suite() -> Results:
    """What a call picks beside peers on two layers, of which one has no PyTorch."""
    results = made_up.in_nhwc()
    results.rows += [
        made_up.timed("a", "leanconv:auto", 12.0, workspace_bytes=500, prepared_bytes=40),
        made_up.timed("b", "leanconv:auto", 10.0, error=3e-7),
        made_up.timed("a", "torch-tf32-nhwc", 6.0, error=3e-4),
    ]
    results.rows = [row for row in results.rows if (row.problem, row.engine) != ("b", "torch-fp32-nhwc")]
    return results


def test_a_suite_is_a_line_of_what_a_call_picks(tmp_path: Path) -> None:
    suite().write(default_path(suite(), False, tmp_path))
    filters = replace(made_up.suite(), suite="filters", layout=None)
    pairs = (("leanconv:auto", 10.0), ("torch", 20.0), ("npp:border", 40.0))
    filters.rows = [made_up.timed("wide", engine, us) for engine, us in pairs]
    path = default_path(filters, False, tmp_path)
    filters.missing = ["narrow", "long"]
    filters.write(path)
    text = made_up.filled(tmp_path, "suites every-suite")
    assert "\n\nNVIDIA H200, 2026-01-02, revision 0123456789ab.\n\n" in text
    only = made_up.filled(tmp_path, "suites filters")
    assert "| filters | 80 |" in only and "im2win" not in only
    # PyTorch in NCHW is the quicker one
    assert "| im2win NHWC | 12 | 11 | 0.25 (0.25) | TF32 0.50 (0.50) | 3.0e-07 / 1.0e-07 | 540 / 0 |" in text
    # what was not run is missing too, and what the run left out of the suite
    assert "| filters | 80 | 79 | one channel 2.00 (2.00) | NPP 4.00 (4.00) | 1.0e-07 / 1.0e-07 | 0 / 0 |" in text


def test_what_a_suite_leaves_out_and_loses_is_said(tmp_path: Path) -> None:
    """A layer whose peer is wrong counts in no ratio, and stands below the table with what it would make of them."""
    rows = [made_up.timed(name, "leanconv:auto", 10.0) for name in "ab"]
    rows += [made_up.timed("a", "torch-fp32-nhwc", 20.0), made_up.timed("b", "torch-tf32-nhwc", 4.0)]
    rows += [
        made_up.timed("b", f"torch-fp32-{layout}", us, error=3e-3) for layout, us in (("nhwc", 5.0), ("nchw", 7.0))
    ]
    replace(suite(), rows=rows).write(default_path(suite(), False, tmp_path))
    text = made_up.filled(tmp_path, "suites every-suite")
    assert "| im2win NHWC | 12 | 11 | 2.00 (2.00) | TF32 0.40 (0.40) |" in text
    assert "| im2win NHWC | b | 1.0e-07 / 3.0e-03 | 0.50 | 2.00 (2.00) | 1.00 (0.50) |" in text
    assert "| PyTorch, TF32 | im2win NHWC 0.40 (0.40) |" in made_up.filled(tmp_path, "below every-suite")
    rows.append(made_up.timed("a", "torch-tf32-nhwc", 4.0))
    replace(suite(), rows=rows).write(default_path(suite(), False, tmp_path))
    assert "| im2win NHWC | 12 | 11, 10 |" in made_up.filled(tmp_path, "suites every-suite")
    assert "2 of the suite's 12 layers were run." in made_up.filled(tmp_path, "standings im2win-nhwc")


def test_a_suite_at_level_tf32_is_not_compared_with_strict_fp32(tmp_path: Path) -> None:
    tf32 = replace(suite(), precision="tf32")
    tf32.write(default_path(tf32, False, tmp_path))
    text = made_up.filled(tmp_path, "suites every-suite")
    assert "| im2win NHWC tf32 | 12 | 11 | – | TF32 0.50 (0.50) | 3.0e-07 / 3.0e-04 | 540 / 0 |" in text


def test_where_a_pick_was_not_measured_the_fastest_without_a_workspace_stands_for_it(tmp_path: Path) -> None:
    about = {key: value for key, value in made_up.MACHINE.items() if key not in ("schema", "kernels")}
    rows = [
        made_up.timed("a", "leanconv", 4.0, workspace_bytes=500),
        made_up.timed("a", "leanconv", 10.0),
        made_up.timed("a", "torch-fp32-nhwc", 20.0),
    ]
    path = default_path(suite(), False, tmp_path)
    replace(suite(), machine=about, rows=rows).write(path)
    (tmp_path / "older.json").write_text(json.dumps({f"{path.parent.name}/{path.name}": "nothing was picked."}))
    text = made_up.filled(tmp_path, "suites every-suite")
    assert "| im2win NHWC * | 12 | 11 | 2.00 (2.00) | – | 1.0e-07 / 1.0e-07 | 0 / 0 |" in text


def test_networks_are_lines_by_mode_and_way(tmp_path: Path) -> None:
    times = {"torch_graph_us": 30.0, "leanconv_graph_us": 10.0, "torch_eager_us": 9.0, "leanconv_eager_us": 10.0}
    times["torch_nchw_graph_us"] = 31.0
    peaks = {"torch_peak_bytes": 2 * 10**6, "leanconv_peak_bytes": 10**6, "packed_bytes": 10**5}
    rows: list[dict[str, Any]] = [
        {"network": "a", "mode": "fp32", "pass": "forward", **times, **peaks},
        {"network": "b", "mode": "16-bit", "pass": "forward", "torch_graph_us": 5.0, "leanconv_graph_us": 10.0},
        {"network": "b", "mode": "fp32", "pass": "training", "torch_eager_us": 12.0, "leanconv_eager_us": 10.0},
    ]
    records.write(tmp_path, "modes", made_up.ABOUT, rows)
    text = made_up.filled(tmp_path, "modes modes")
    assert "NVIDIA X, 2026-11-22, revision abc000000000." in text
    last = "| geometric mean | 3.00 of 1 | 0.90 of 1 |"
    assert f"| network | graph | eager |\n|---|---|---|\n| a | 3.00 | 0.90 |\n{last}\n" in text
    assert "**Forward pass, 16 bits**\n\n| network | graph |\n|---|---|\n| b | 0.50 |" in text
    assert "**Training step, strict FP32**\n\n| network | eager |\n|---|---|\n| b | 1.20 |" in text
    text = made_up.filled(tmp_path, "short modes networks=b,a")
    assert "| b | – | – | 0.50 / – | 1.20 | – | – | – |\n" in text
    assert "| a | 3.00 / 0.90 | – | – | – | – | – | 1.10 MB / 2.00 MB |" in text, "packed filters count"
    text = made_up.filled(tmp_path, "slower modes")
    lines = "| b, forward pass, 16 bits | graph | 0.50 |\n| a, forward pass, strict FP32 | eager | 0.90 |\n"
    assert "\n2 of 4 times:\n" in text and f"| what | way | × |\n|---|---|---|\n{lines}" in text
    with pytest.raises(ValueError, match="there is nothing to draw"):
        made_up.filled(tmp_path, "networks-figure modes")


def test_fused_networks_are_compared_with_what_torch_compile_makes(tmp_path: Path) -> None:
    us = {"torch_fused_us": 40.0, "leanconv_fused_us": 10.0, "torch_compile_us": 20.0}
    both = {"torch_backend_us": 21.0, "leanconv_backend_us": 7.0}
    rows: list[dict[str, Any]] = [
        {"network": "vgg16", "mode": "fp32", "pass": "forward", **us, **both},
        {"network": "vgg16", "mode": "16-bit", "pass": "forward", **us},
        {"network": "unet", "mode": "fp32", "pass": "forward", **us, "leanconv_fused_us": 2.5},
        {"network": "edsr", "mode": "fp32", "pass": "forward", "torch_fused_us": 40.0, "leanconv_fused_us": 10.0},
    ]
    records.write(tmp_path, "modes", made_up.ABOUT, rows)
    text = made_up.filled(tmp_path, "fused modes")
    heads = [f"strict FP32: {each}" for each in ("`fuse`, × PyTorch", "`fuse`, × torch.compile")]
    assert f"| network | {' | '.join(heads)} | strict FP32: backend, × torch.compile |" in text
    lines = "| vgg16 | 4.00 | 2.00 | 3.00 |\n| unet | 16.0 | 8.00 | – |\n| geometric mean of 1 | 4.00 | 2.00 | 3.00 |"
    assert lines in text and "edsr" not in text
    # the fused times alone are of another run
    records.write(
        tmp_path, "modes", made_up.ABOUT, [rows[0] | {"fused_revision": "b" * 40, "fused_date": "2026-02-03"}]
    )
    assert "| vgg16 | 4.00 | – | 3.00 |" in made_up.filled(tmp_path, "fused modes")
    records.write(tmp_path, "modes", made_up.ABOUT, rows[3:])
    with pytest.raises(ValueError, match="there is nothing to"):
        made_up.filled(tmp_path, "fused modes")


def test_what_networks_draw_is_shown_where_the_card_told_it(tmp_path: Path) -> None:
    sides = {"torch": (8000.0, 700), "leanconv": (6000.0, 600), "fused": (4000.0, 500)}
    told = {f"{who}_sustained_us": us for who, (us, _) in sides.items()}
    told |= {f"{who}_watts": watts for who, (_, watts) in sides.items()}
    when = {"sustained_revision": "b" * 40, "sustained_date": "2026-02-03T00:00:00"}
    row: dict[str, Any] = {"network": "vgg16", "mode": "16-bit", "pass": "forward", "batch": 4, **told, **when}
    silent = {name: each for name, each in row.items() if "watts" not in name} | {"network": "unet"}
    records.write(tmp_path, "modes", made_up.ABOUT, [row, silent])
    text = made_up.filled(tmp_path, "network-energy modes")
    cells = "2000 / 700 / 1.4e+03 | 1500 / 600 / 900 | 1000 / 500 / 500 | 1.56 | 2.80"
    assert f"| vgg16 | 16 bits | {cells} |" in text and "unet" not in text
    assert "NVIDIA X, 2026-02-03, revision bbbbbbbbbbbb." in text
    records.write(tmp_path, "modes", made_up.ABOUT, [silent])
    with pytest.raises(ValueError, match="there is nothing to"):
        made_up.filled(tmp_path, "network-energy modes")


def test_networks_that_all_modes_have_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = {"pass": "forward", "torch_graph_us": 30.0, "leanconv_graph_us": 10.0}
    rows = [{"network": "unet", "mode": mode, **times} for mode in modes.MODES]
    record = {"machine": made_up.ABOUT, "rows": [*rows, rows[0] | {"network": "vgg16"}]}
    network_tables.picture(record, tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()
    assert "<!-- unet -->" in shown and "<!-- vgg16 -->" not in shown
    assert all(f"<!-- {name} -->" in shown for name in ("PyTorch = 1", "leanconv, 16 bits", "leanconv, TF32 allowed"))


def test_files_of_earlier_kernels_say_why(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    path = default_path(made_up.suite(), False, results)
    replace(made_up.suite(), machine=made_up.MACHINE | {"kernels": {"im2win": "earlier"}}).write(path)
    for block in ("standings im2win", "suites every-suite"):
        with pytest.raises(ValueError, match=rf"page.md: block '{block}': .*im2win.json is of earlier kernels: im2win"):
            pages.fill(made_up.blocks(block), page, results, tmp_path)
    with pytest.raises(ValueError, match=r"page.md: figure 'im2win best/lean mean': .*im2win.json is of earlier kern"):
        Fields(results).fill(FIELD, page)
    (results / "older.json").write_text(json.dumps({"nvidia-h200/im2win.json": "only comments changed, we say."}))
    assert "\nNot measured anew yet: only comments changed, we say.\n" in pages.fill(
        made_up.blocks("standings im2win"), page, results, tmp_path
    )
    text = pages.fill(made_up.blocks("older every-file"), page, results, tmp_path)
    assert "- `nvidia-h200/im2win.json`: only comments changed, we say." in text
    # of a long reason a block has a link
    (results / "older.json").write_text(json.dumps({"nvidia-h200/im2win.json": "We say. " * 40}))
    folders = (page, "docs/"), (tmp_path / "docs/algorithms/page.md", "../"), (tmp_path / "README.md", "docs/")
    for other, to in folders:
        filled = pages.fill(made_up.blocks("standings im2win"), other, results, tmp_path / "docs/pictures")
        assert f"or choices: [which]({to}performance.md#files-of-earlier-kernels)" in filled and "We say" not in filled
    assert "We say. We say." in pages.fill(made_up.blocks("older every-file"), page, results, tmp_path)
    (results / "older.json").write_text(json.dumps({"nvidia-h200/im2win.json": "We say.\nMore.\nAnd more."}))
    listed = pages.fill(made_up.blocks("older every-file"), page, results, tmp_path)
    assert "- `nvidia-h200/im2win.json`: We say.\n  - More.\n  - And more." in listed
    (results / "older.json").write_text(json.dumps({"nvidia-h200/im2win.json": "only comments changed, we say."}))
    with pytest.raises(ValueError, match="the page does not say that only comments changed, we say"):
        Fields(results).fill(FIELD, page)
    assert Fields(results).fill(text + FIELD, page) == text + FIELD
    assert Fields(results).fill("// figure: im2win best/lean mean = 1\n", Path("a.cuh")).endswith(" = 3.16\n")


def test_files_from_before_schemas_are_used_only_if_they_are_listed(tmp_path: Path) -> None:
    about = {key: value for key, value in made_up.MACHINE.items() if key not in ("schema", "kernels")}
    records.write(tmp_path, "modes", about | {"git_revision": "abc0123"}, [{"network": "a", "us": 1.0}])
    with pytest.raises(ValueError, match="modes.json is of schema None"):
        Fields(tmp_path).figure("modes network=a us mean")
    (tmp_path / "older.json").write_text(json.dumps({"nvidia-h200/modes.json": "two GPUs were not at hand."}))
    assert Fields(tmp_path).figure("modes network=a us mean") == "1"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"git_dirty": True}, "is dirty"),
        ({"git_dirty": None}, "is dirty"),
        ({"git_revision": "abc"}, "is of an unknown revision"),
        ({"schema": provenance.SCHEMA + 1}, "is of schema"),
        ({"kernels": None}, "is damaged"),
    ],
)
def test_files_that_cannot_be_traced_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    page = tmp_path / "page.md"
    replace(made_up.suite(), machine=made_up.MACHINE | changes).write(default_path(made_up.suite(), False, tmp_path))
    records.write(tmp_path, "modes", made_up.MACHINE | changes, [{"network": "a", "us": 1.0}])
    for block in ("standings im2win", "suites every-suite", "modes modes"):
        with pytest.raises(ValueError, match=f"page.md: block '{block}': .*json.* {said}"):
            pages.fill(made_up.blocks(block), page, tmp_path, tmp_path)
    for words in ("im2win best/lean mean", "modes network=a us mean"):
        with pytest.raises(ValueError, match=f"page.md: figure '{words}': .*json.* {said}"):
            Fields(tmp_path).fill(f"<!-- figure: {words} -->1<!-- /figure -->", page)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = default_path(made_up.suite(), False, tmp_path)
    made_up.suite().write(path)
    path.write_text(path.read_text()[:-300])
    with pytest.raises(ValueError, match=r"page.md: figure 'im2win best/lean mean'.*im2win.json"):
        Fields(tmp_path).fill(FIELD, tmp_path / "page.md")
    with pytest.raises(ValueError, match=r"page.md: block 'standings im2win'.*im2win.json"):
        pages.fill(made_up.blocks("standings im2win"), tmp_path / "page.md", tmp_path, tmp_path)


def test_rows_of_another_revision_are_refused(tmp_path: Path) -> None:
    rows = [{"network": "a", "us": 1.0, "revision": "1" * 40}, {"network": "b", "us": 1.0}]
    records.write(tmp_path, "modes", made_up.MACHINE, rows)
    with pytest.raises(ValueError, match="modes.json has rows of other revisions: 1111"):
        Fields(tmp_path).figure("modes network=a us mean")


def test_a_step_that_strict_fp32_was_not_measured_of_is_a_line_too(tmp_path: Path) -> None:
    about = {"gpus": 1, "seed": 0, "problem": "vgg16-b256-128", "optimiser": "adam", "loss": 0.5}
    rows = [
        about | {"engine": "leanconv", "us": 60000.0, "peak_bytes": 2**20},
        about | {"engine": "torch-tf32-nhwc", "us": 48000.0, "peak_bytes": 2**20},
        about | {"engine": "leanconv", "us": 60000.0, "problem": "alone"},
    ]
    records.write(tmp_path, "training", made_up.ABOUT, rows, images="made up")
    text = made_up.filled(tmp_path, "training training")
    assert "| vgg16-b256-128 | adam | 60.0 | – | 48.0 | – | 0.80 | – | 1 / – | – / – | 0.5 / – |" in text
    assert "alone" not in text
