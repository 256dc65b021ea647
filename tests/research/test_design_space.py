"""The exploration of direct_tiled's configurations: what is sampled, and the table and picture made from the times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leanconv.bench.suites import format_problem
from leanconv.kernels.direct.direct_tiled import PAPERS_BEST, DirectTiledConfig, block
from leanconv.problem import ConvProblem
from report import records
from research import design_space, pages
from research.design_space import SIZES, Study, layers, sample, shape, words
from tests.cases import TARGETS
from tests.made_up import ABOUT, filled


def made_up() -> dict[str, Any]:
    """Ten configurations a size; the time of each is its place in the sample, in ms, and the paper's comes second."""
    record: dict[str, Any] = {
        "machine": ABOUT,
        "sizes": {},
        "problems": {},
        "columns": design_space.COLUMNS,
        "rows": [],
    }
    for size, paper in zip(SIZES, PAPERS_BEST, strict=True):
        shapes, space = sample(size, 10, TARGETS[0])
        shapes.remove(paper)
        shapes.insert(1, paper)
        record["sizes"][str(size)] = {"layers": list(layers(size)), "space": space, "timed": len(shapes)}
        for name, problem in layers(size).items():
            record["problems"][name] = format_problem(problem)
            for place, each in enumerate(shapes):
                config = block(problem, TARGETS[0], *each)
                assert config is not None
                numbers = [value for _, value in config.constants()]
                record["rows"].append([name, *numbers, 1000.0 * (place + 1), 128, 0])
    return record


def test_a_sample_has_the_papers_configuration_and_is_the_same_each_time() -> None:
    for size in SIZES:
        shapes, space = sample(size, 25, TARGETS[0])
        assert len(shapes) == len(set(shapes)) == 25 < space
        assert set(PAPERS_BEST) <= set(shapes)
        assert shapes == sample(size, 25, TARGETS[0])[0]
        for problem in layers(size).values():
            configs = [block(problem, TARGETS[0], *each) for each in shapes]
            assert [shape(config) for config in configs if config is not None] == shapes


def test_the_papers_configurations_are_in_the_space() -> None:
    """F_TB, W x H, F_T x W_T, C_SH of its Table I, for filters of 3x3, 5x5 and 7x7."""
    for size, paper in zip(SIZES, PAPERS_BEST, strict=True):
        layer = ConvProblem(16, 64, 128, 128, 128, size, size)
        assert paper in {shape(config) for config in design_space.design_space(layer, TARGETS[0])}


def test_configurations_are_ranked_by_their_mean_over_the_layers() -> None:
    record = made_up()
    study = Study(record, 5)
    assert len(study.names) == 3 and len(study.tflops) == 10
    assert study.ranked()[1] == PAPERS_BEST[1]
    flops = [layers(5)[name].flops for name in study.names]
    mean = (flops[0] * flops[1] * flops[2]) ** (1 / 3)
    assert study.speed(study.ranked()[0]) == pytest.approx(mean / 1000 * 1e-6)
    assert words(PAPERS_BEST[1]) == "F_TB 32, 32 × 8, F_T 8, W_T 8, C_SH 1"
    # 5 taps of 8 x 8 outputs; three loads of pixels and ten of filters, of two cycles each
    assert study.intensity(PAPERS_BEST[1]) == pytest.approx(5 * 64 / (3 * 2 + 10 * 2))


def test_the_page_has_the_best_and_the_papers(tmp_path: Path) -> None:
    record = made_up()
    records.write(tmp_path, "design-space", record.pop("machine"), record.pop("rows"), **record)
    text = filled(tmp_path, "configurations design-space", "configurations-figure design-space", by=pages)
    assert "NVIDIA X, 2026-11-22, revision abc000000000." in text and "3×3: 10 of " in text
    sevens = "the paper's; calls: n128-c64-f128, n256-c32-f64"
    assert text.count("| the paper's") == 3 and f"| 7×7 | 2 | {words(PAPERS_BEST[2])} | {sevens} | 128 |" in text
    assert all(text.count(name) == 4 for name in ("n64-c32-f64", "n128-c64-f128")), (
        "in the head, and once for each size"
    )
    assert "](nvidia-x-design-space-configurations.png)" in text
    assert (tmp_path / "nvidia-x-design-space-configurations.png").stat().st_size > 10000


def test_a_row_holds_all_of_a_configuration() -> None:
    config = block(next(iter(layers(3).values())), TARGETS[0], *PAPERS_BEST[0])
    assert isinstance(config, DirectTiledConfig)
    assert design_space.COLUMNS[1:-3] == [name for name, _ in config.constants()]
