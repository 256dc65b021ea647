"""The page on openCNN says what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from leanconv.call.explain import NOMINAL
from leanconv.kernels.simt.winograd2d import SquareSpeeds, Winograd2dConfig
from leanconv.kernels.winograd_matrices import matrices
from leanconv.options import Layout

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "opencnn.md").read_text(encoding="utf-8")


def test_matrices_are_those_of_the_generator() -> None:
    made = matrices(2, 3)
    for name, rows in (("Aᵀ", made.at), ("G", made.g), ("Bᵀ", made.bt)):
        words = " ".join(f"({', '.join(map(str, row))})" for row in rows)
        assert f"| {name} | {words} |" in TEXT


def test_block_is_that_of_the_default_configuration() -> None:
    config = Winograd2dConfig()
    assert f"**A block** takes {config.tile_k} filters and {config.tiles} tiles" in TEXT
    sums = f"{config.thread_k} filters × {config.thread_tiles} tiles, {config.thread_k * config.thread_tiles} sums"
    assert sums in " ".join(TEXT.split())
    assert config.lane_states == 2 and "A warp has two states" in TEXT
    narrow = Winograd2dConfig(lane_states=1, thread_tiles=8)
    assert narrow.tiles == config.tiles and f"the block {narrow.threads} threads" in " ".join(TEXT.split())
    wide = Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8)
    assert f"block {wide.tile_k} filters and {wide.tiles} tiles in {wide.threads // 32} warps" in TEXT


def test_shares_of_the_layouts_are_those_of_the_fastest_blocks() -> None:
    shares = SquareSpeeds.of(NOMINAL).shares
    best = {layout: max(filter(None, shares[layout])) for layout in get_args(Layout)}
    words = (
        f"reached {best['CHWN']:.0%} of the multiply-adds that an H200 could issue in CHWN, {best['NHWC']:.0%} in NHWC"
    )
    assert f"{words} and {best['NCHW']:.0%} in NCHW".replace("%", " %") in " ".join(TEXT.split())


def test_page_has_every_measured_table() -> None:
    for suite in ("opencnn", "opencnn-chwn"):
        for what in ("families", "speeds"):
            assert f"<!-- made: {what} {suite} " in TEXT
    assert "<!-- made: targets opencnn -->" in TEXT
    for block in ("ablation opencnn-ablation algorithm=winograd2d", "ablation-figure opencnn-ablation"):
        assert f"<!-- made by research: {block} -->" in TEXT
