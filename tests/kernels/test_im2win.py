"""What im2win has beside its results: the tensor, element for element, and its fused form with runs, in every shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from leanconv.cpu.im2win import im2win, im2win_channels_last
from leanconv.kernels.papers.im2win import columns, tensor_elements, transform
from leanconv.kernels.simt import im2win_fused
from leanconv.problem import ConvProblem
from leanconv.runtime import compile as compiler
from tests import cases, emulator, proof, selection
from tests.cases import CONV_CASES, TARGETS
from tests.variants import NAMED, VARIANTS

FUSED = NAMED["im2win_fused"]
WITH_TENSOR = NAMED["im2win"]
TILED = ("implicit_gemm", "im2win", "im2win_fused")
TENSORS = [c for c in CONV_CASES if c.problem.n and not WITH_TENSOR.reasons(c.problem, TARGETS[0])]


def tensor_of(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    """The reference engine's tensor of the padded image, as many columns of it as the kernels keep."""
    top, bottom, left, right = problem.padding
    around = ((top, bottom), (left, right))
    shape = problem.r, problem.p, problem.stride[0], problem.dilation[0]
    if problem.layout == "NCHW":
        whole = im2win(np.pad(x, ((0, 0), (0, 0), *around)), *shape)
        return whole[..., : columns(problem) * problem.r]
    whole = im2win_channels_last(np.pad(x, ((0, 0), *around, (0, 0))), *shape)
    return whole[..., : columns(problem) * problem.r * problem.c]


@pytest.mark.parametrize("problem", selection.each_layer(TENSORS))
def test_the_transform_writes_the_references_tensor(problem):
    x = 1 + np.arange(np.prod(problem.x_shape), dtype=np.float32).reshape(problem.x_shape)
    expected = tensor_of(problem, x)
    written = np.full(tensor_elements(problem), np.nan, np.float32)
    emulator.run_launch(transform(problem), {"x": x, "workspace": written})
    np.testing.assert_array_equal(written.reshape(expected.shape), expected)


def test_transformed_problems_are_of_every_kind():
    problems = [c.problem for c in TENSORS]
    for layout in ("NCHW", "NHWC"):
        these = [p for p in problems if p.layout == layout]
        assert {tensor_elements(p) % 4 == 0 for p in these} == {True, False}
        assert min(map(tensor_elements, these)) < 256 and max(map(tensor_elements, these)) > 2**13
        assert any(columns(p) < p.w + p.padding[2] + p.padding[3] for p in these)
        assert any(p.padding[0] and p.stride[0] > 1 and p.dilation[0] > 1 for p in these)


@dataclass(frozen=True)
class Runs:
    """A problem for the kernel with runs, and what its configuration shall be like."""

    problem: ConvProblem
    tile: int
    split: int
    wide: bool

    @property
    def config(self) -> Any:
        """A tile with runs, whether it would be worth a try on this problem or not."""
        # Sorted, as only their speeds decide the order in which they stand there.
        tiles = sorted(im2win_fused.RUN_TILES, key=lambda c: (c.tile_k, c.tile_pixels))
        depth = im2win_fused.lines(self.problem) * self.problem.s
        tiles = [replace(tile, tile_reduction=depth, min_blocks=1) for tile in tiles]
        tiles = [tile for tile in tiles if im2win_fused.copies(self.problem, tile) <= im2win_fused.MOST_COPIES]
        config = tiles[self.tile % len(tiles)]
        split = self.split if config.thread_k % self.split == 0 else self.split // 2
        return replace(config, split=split)

    def __str__(self) -> str:
        p = self.problem
        how = f"split{self.config.split}{' wide' * self.wide}"
        return f"w{p.w} s{p.s} stride{p.stride[1]} left{p.padding[2]} dilation{p.dilation[1]} {how}"


def _runs() -> list[Runs]:
    found = []
    for i, (stride, left, whole) in enumerate(product((1, 2, 3, 4), range(5), (True, False))):
        # Counts that go their own ways, for both widths of copies.
        i = i // 2 + whole
        groups = 1 + i % 2
        problem = ConvProblem(
            n=2,
            c=groups * (3 + i % 5),
            h=6 + i % 3,
            w=(16, 20, 24)[i % 3] if whole else 17 + i % 3,
            k=groups * (5 + i % 4),
            r=1 + i % 3,
            s=(3, 2, 5, 1, 4, 3, 1)[i % 7],
            stride=(1 + i // 2 % 2, stride),
            padding=(i // 3 % 2, i % 3, left, i % 4),
            dilation=(1 + i // 4 % 2, 1 + i // 2 % 3),
            groups=groups,
            bias=i % 4 < 2,
            activation="relu" if i % 3 == 0 else None,
        )
        found.append(Runs(problem, i, (1, 2, 4, 8)[i // 3 % 4], i % 5 == 4))
    wide_filter = ConvProblem(1, 5, 4, 40, 6, 2, 13, padding=(1, 0, 4, 3))
    found += [Runs(wide_filter, 0, 1, False), Runs(replace(wide_filter, w=41), 1, 2, False)]
    return found


RUNS = _runs()
#: What ``make test`` plays: every second stride and padding, whole vectors and others by turns.
HALF = [runs for i, runs in enumerate(RUNS) if i % 4 in (0, 3)]


@pytest.mark.parametrize("runs", selection.marked(RUNS, HALF, lambda runs: ((runs,), str(runs))))
def test_runs_are_right_on_emulator(runs):
    config = runs.config

    def change(plan):
        return proof.wide_offsets(FUSED, runs.problem, config, TARGETS[0]) if runs.wide else plan

    proof.check(FUSED, runs.problem, config, kinds=cases.KINDS[:1], change=change)


def test_runs_are_not_offered_where_rounded_rows_outgrow_their_numbers():
    def runs(problem):
        return any(config.runs for config in FUSED.configs(problem, TARGETS[0]))

    narrow = ConvProblem(2**14, 1, 2**14, 2, 1, 1, 2)  # 2**28 outputs, one a row
    assert runs(replace(narrow, n=2**13)) and not runs(narrow)
    assert runs(replace(narrow, n=2**15)), "offsets of 64 bits number all pixels"


def test_a_row_of_the_tensor_too_long_is_refused():
    long = ConvProblem(1, 2**10, 3, 2**19, 4, 3, 3, layout="NHWC")
    refusing = {a.stem for a in VARIANTS if a.solves == "conv2d" and a.why_not(long, TARGETS[0])}
    assert {name for name in refusing if name.startswith("im2win")} == {"im2win", "im2win_basic"}


@pytest.mark.parametrize("name", ["im2win", "im2win_basic", "im2win_fused"])
def test_images_innermost_are_refused_by_name(name):
    algorithm = NAMED[name]
    assert algorithm.why_not(ConvProblem(8, 16, 12, 12, 16, 3, 3, layout="CHWN"), TARGETS[0]) == [
        "layout='CHWN' is neither 'NCHW' nor 'NHWC'"
    ]


def test_runs_are_of_every_kind():
    problems = [r.problem for r in RUNS]
    for whole in (True, False):
        these = [p for p in problems if (p.w % 4 == 0) == whole]
        assert {(p.stride[1], p.padding[2]) for p in these} >= set(product((1, 2, 3, 4), range(5)))
        assert {p.dilation[1] for p in these} == {1, 2, 3} and {p.groups for p in these} == {1, 2}
        assert {p.q % 4 for p in these} == {0, 1, 2, 3} and {p.s for p in these} > {1, 2, 3}
        assert {p.bias for p in these} == {True, False} and {p.activation for p in these} == {None, "relu"}
    for whole in (True, False):
        these = [r for r in RUNS if (r.problem.w % 4 == 0) == whole and not r.wide]
        assert {r.config.split for r in these} == {1, 2, 4, 8}
    configs = [r.config for r in RUNS]
    assert {c.thread_pixels for c in configs} == {8, 12} and any(r.wide and r.problem.w % 4 == 0 for r in RUNS)
    # Registers hold two runs where these are short, else one.
    floats = {-(-im2win_fused.run_length(r.problem) // 4) * r.config.thread_pixels for r in RUNS}
    assert min(floats) <= 24 < max(floats)
    # An uneven reduction, and blocks that are left without a part of theirs.
    steps = [
        (-(-r.problem.group_c * r.problem.r * r.problem.s // r.config.tile_reduction), r.config.split) for r in RUNS
    ]
    assert any(n % split for n, split in steps) and any(n < split for n, split in steps)


def test_no_configuration_has_more_copies_than_the_kernel_has_bits_for():
    """The kernel keeps a bit of 32 for each copy of a thread; rows of 81 pixels are copied one by one."""
    one_column = ConvProblem(2, 64, 20, 81, 64, 3, 1, stride=(1, 4))
    tiles = [replace(tile, tile_reduction=im2win_fused.lines(one_column)) for tile in im2win_fused.RUN_TILES]
    assert max(im2win_fused.copies(one_column, tile) for tile in tiles) > im2win_fused.MOST_COPIES
    assert not any(c.runs for c in FUSED.configs(one_column, TARGETS[0]))
    most = []
    for stride in (1, 2, 3, 4):
        problem = replace(one_column, s=2, stride=(1, stride))
        unsplit = [c for c in FUSED.configs(problem, TARGETS[0]) if c.runs and c.split == 1]
        largest = max(unsplit, key=lambda config: im2win_fused.copies(problem, config))
        most.append(im2win_fused.copies(problem, largest))
        # a static_assert of the kernel counts them too
        launch = FUSED.plan(problem, largest, TARGETS[0]).launches[0]
        emulator.build(compiler.source(launch), launch.symbol, launch.arguments)
    assert most and max(most) == im2win_fused.MOST_COPIES


def test_reductions_are_split_only_where_blocks_form_clusters():
    for case in CONV_CASES:
        for algorithm in VARIANTS:
            if algorithm.reasons(case.problem, TARGETS[0]):
                continue
            for target in TARGETS:
                if algorithm.reasons(case.problem, target):
                    continue
                clusters = {
                    launch.cluster
                    for config in algorithm.configs(case.problem, target)
                    for launch in algorithm.plan(case.problem, config, target).launches
                }
                assert clusters <= {1, 2, 4, 8} if target.clusters else clusters <= {1}
                if case.name.startswith("long-reduction") and algorithm.stem in TILED:
                    assert clusters == ({1, 2, 4, 8} if target.clusters else {1})
