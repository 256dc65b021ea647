"""Comparisons with the peers, tables, plots, and the ceilings that shares are of."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from leanconv.bench import geometric_mean, tables
from leanconv.bench.ceilings import Ceilings
from leanconv.bench.format import quantity, size
from leanconv.bench.results import Results, right
from leanconv.bench.suites import dense_filter
from leanconv.bench.tables import detail, legend, put_legend, summary
from leanconv.problem import ConvProblem
from tests import made_up

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CEILINGS = Ceilings(fp32_tflops=50.0, tf32_tflops=400.0, copy_tbytes=4.0, how="made up")


def test_peers_are_grouped_and_wrong_answers_are_not_compared_with() -> None:
    results = made_up.in_nhwc()
    own = results.own("a")
    assert own is not None and own.algorithm == "good"
    peers = {name: row.us for name, row in results.peers("a").items()}
    assert peers == {"lean": 30.0, "lean, own layout": 40.0, "best": 5.0, "PyTorch": 3.0, "PyTorch, same layout": 20.0}
    assert results.ratios("PyTorch, same layout") == [2.0, 8.0] and results.ratios("PyTorch") == [0.3, 8.0]
    assert results.ratios("best") == [0.5]


def test_an_answer_is_measured_by_the_precision_that_was_asked_for() -> None:
    rounded = replace(made_up.in_nhwc().rows[0], error=3e-4)
    assert not right(rounded)
    assert right(replace(rounded, precision="tf32")) and not right(replace(rounded, precision="tf32", error=3e-3))


def test_peers_without_the_layout_are_compared_with_in_their_own() -> None:
    results = made_up.in_chwn(made_up.in_nhwc())
    peers = {name: row.us for name, row in results.peers("a").items()}
    assert peers == {"lean": 30.0, "best": 5.0, "PyTorch": 3.0}, "the faster of PyTorch's layouts, none in our own"
    notes = "\n".join(legend(results))
    assert "cuDNN and PyTorch have no layout CHWN: they take the same numbers in NCHW and NHWC" in notes
    assert "PyTorch in the faster of its layouts" in notes and "in the problem's layout" not in notes
    other = "\n".join(legend(made_up.in_nhwc()))
    assert "in the problem's layout" in other and "have no layout" not in other


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([5.0]) == pytest.approx(5.0)
    for bad in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="positive values"):
            geometric_mean(bad)


def test_tables() -> None:
    results = made_up.in_nhwc()
    columns, lines = summary(results)
    by_name = {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
    assert by_name["a"]["× lean"] == "3.00" and by_name["b"]["× lean"] == "–"
    assert by_name["geometric mean"]["× PyTorch, same layout"] == "4.00"
    assert by_name["a"]["× PyTorch"] == "0.30", "a ratio below one is printed like the others"
    assert by_name["a"]["algorithm"] == "good" and by_name["a"]["of ceiling"] == "50% fp32"
    assert [line[3] for line in detail(results)[1][:3]] == ["1.00", "2.00", "3.00"]
    assert "99 registers, 0 B spilled" in str(detail(results))


def test_results_without_own_rows_show_the_peers() -> None:
    results = made_up.in_nhwc()
    results.rows = [row for row in results.rows if row.engine != "leanconv"]
    columns, lines = summary(results)
    assert "PyTorch, µs" in columns and lines[1][columns.index("PyTorch, µs")] == "80.0"


def test_plot_draws_each_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leanconv.bench.plots import plot, speeds, unit

    results = made_up.in_nhwc()
    assert list(speeds(results)) == ["leanconv", "lean", "lean, own layout", "best", "PyTorch", "PyTorch, same layout"]
    assert unit(results) == "TFLOP/s" and speeds(results)["PyTorch"] == {"a": 1.0, "b": 1.0}
    plot(results, tmp_path / "bars.svg")
    assert "geometric" not in (tmp_path / "bars.svg").read_text() and len(list(tmp_path.iterdir())) == 1
    plot(results, tmp_path / "deep" / "bars")
    assert (tmp_path / "deep" / "bars").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        plot(results, tmp_path / "deep" / "bars.xyz")
    assert len(list((tmp_path / "deep").iterdir())) == 1
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(replace(results, rows=[]), tmp_path / "none.png")


def test_curves_draw_filters_over_their_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leanconv.bench.plots import curves

    results = Results.read(RESULTS / "nvidia-h200" / "filters.json")
    curves(results, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(text in drawn for text in ("<!-- leanconv", "<!-- NPP", "<!-- 8192", "<!-- the ceiling"))
    with pytest.raises(ValueError, match="nothing to plot"):
        curves(replace(results, rows=[]), tmp_path / "none.png")


def test_figures_are_written_for_people() -> None:
    assert [quantity(v) for v in (0.0418, 1.234, 12.34, 123.4, 12345.6, 0.0, None)] == [
        "0.0418", "1.23", "12.3", "123", "12346", "0.00", "–",
    ]  # fmt: skip
    assert [size(v) for v in (0, 1024, 153_000_000, 2_035_040_768, None)] == ["0", "1.02 kB", "153 MB", "2.04 GB", "–"]


def test_ceiling_is_the_one_that_binds() -> None:
    layer = ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1))
    assert CEILINGS.bound(layer) == "fp32" and CEILINGS.bound(layer, "tf32") == "tf32"
    assert CEILINGS.floor_us(layer, "fp32") == pytest.approx(layer.flops / 50e6)
    picture = dense_filter(1, 8192, 8192, 3, 3)
    assert CEILINGS.bound(picture) == "copy"
    assert CEILINGS.floor_us(picture, "fp32") == pytest.approx(2 * 4 * 8192**2 / 4e6)


def test_what_was_measured_twice_is_kept_once() -> None:
    first, second = made_up.in_nhwc(), made_up.in_nhwc()
    first.failed = [{"problem": "b", "engine": "x", "reason": "interrupted"}]
    first.missing = ["b", "c"]
    second.problems = {"b": second.problems["b"]}
    second.rows = [replace(row, us=1.0) for row in second.rows if row.problem == "b"]
    joined = first.joined(second, ["c", "b", "a"])
    assert [*joined.problems] == ["b", "a"] and joined.missing == ["c"] and not joined.failed
    with pytest.raises(ValueError, match="do not go together: precision is None in one, 'relaxed' in the other"):
        first.joined(replace(second, precision="relaxed"), ["a"])
    both = [replace(results, precision="relaxed") for results in (first, second)]
    assert both[0].joined(both[1], ["a", "b"]).precision == "relaxed"
    assert [row.us for row in joined.of("b")] == [1.0, 1.0] and joined.of("a") == first.of("a")


def test_a_legend_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets of a warning are no markup of the console."""
    text = StringIO()
    monkeypatch.setattr(tables, "legend", lambda results: ["took [bold]12[/bold] of [3]"])
    put_legend(Console(file=text, width=80), None)  # type: ignore[arg-type]
    assert text.getvalue() == "took [bold]12[/bold] of [3]\n"


def test_tables_are_whole_on_a_narrow_terminal() -> None:
    """No word is cut: what has no room follows in a table of its own, with the layers' names again."""
    results = Results.read(RESULTS / "nvidia-h200" / "im2win.json")
    content = detail(results)
    parts = tables.in_parts(content, 3, 80)
    assert len(parts) > 1 and all(columns[:3] == content[0][:3] for columns, _ in parts)
    assert [name for columns, _ in parts for name in columns[3:]] == content[0][3:]
    for width in (80, 200):
        out = StringIO()
        tables.put(Console(file=out, width=width), "every engine", content, 3)
        shown = out.getvalue()
        assert "…" not in shown and max(map(len, shown.splitlines())) <= width
        assert all(word in shown for line in content[1] for cell in line[3:] for word in cell.split())
