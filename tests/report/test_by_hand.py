"""No figure is written by hand: what finds them, and that there are none."""

from __future__ import annotations

from pathlib import Path

from tests.report.by_hand import figures, files

PAGE = """# A page

It is 4.8 times as fast, takes 15.0 ms and 30 % of the power, at an error of 3e-4 and
2.5
times the speed of 3×3 filters; limits are 1e-4. It is twice as fast.

`2.5 times` is code, and <!-- figure: opencnn auto/pytorch mean -->4.25<!-- /figure --> times is a field.

<!-- made: standings opencnn -->
| 4.8× |
<!-- /made -->

<!-- counted -->

Of 67 TFLOP/s. Each pixel is read 9 times.

It takes 3 µs more.

## Parts

### Without a ring

1.4 times slower.

Explored: H200, 2026-11-18, revision 9c62bc8; no results file.

### With one

1.3 times slower.
"""


def test_figures_by_hand_are_found_in_pages(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    found = [line.partition(" in: ")[0].partition(".md:")[2] for line in figures(page)]
    wanted = ["3: '4.8 times'", "3: '15.0 ms'", "3: '30 %'", "3: '3e-4'", "4: '2.5 times'", "5: 'twice as fast'"]
    assert found == [*wanted, "17: '3 µs'", "29: '1.3 times'"]
    page.write_text("## A section\n\nExplored: some day, and 3 times as fast.\n", encoding="utf-8")
    assert [line.partition(".md:")[2] for line in figures(page)] == [
        "3: Explored without a date and a revision: Explored: some day, and 3 times as fast."
    ]


def test_figures_by_hand_are_found_in_comments(tmp_path: Path) -> None:
    header = tmp_path / "kernel.cuh"
    header.write_text(
        "// Takes 9 times as many bytes as\n"
        "// a copy.\n"
        "float x = 1.5; // 2.5 times slower\n"
        "\n"
        "// figure: opencnn tensor_gemm/lean mean = 4.25\n"
        "// and 12 % more\n"
        "//\n"
        "// Explored (H200, 9c62bc8): two stages 1.1 times slower.\n"
        "int percent = 12 % 5;\n"
    )
    assert [line.partition(" in: ")[0].partition(".cuh:")[2] for line in figures(header)] == [
        "1: '9 times as'", "3: '2.5 times'", "6: '12 %'"
    ]  # fmt: skip
    module = tmp_path / "module.py"
    module.write_text('''"""Does it 1.5 times as fast."""\n\nx = "2 % of it"  # takes 3 µs\n''', encoding="utf-8")
    assert [line.partition(" in: ")[0].partition(".py:")[2] for line in figures(module)] == [
        "1: '1.5 times'", "3: '3 µs'"
    ]  # fmt: skip


def test_no_figure_is_written_by_hand() -> None:
    assert [figure for path in files() for figure in figures(path)] == []
