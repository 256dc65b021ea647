"""The test of the tests: kernels broken on purpose must fail the same check that proves the whole ones.

Each break is a textual patch of one kernel header, applied in a copy of the kernels' folder. A patch whose text is no
longer in the header fails here: it would break nothing, and prove nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import emulator
import proof
import pytest
from cases import CASES

from leanconv.registry import ALGORITHMS
from leanconv.runtime.compile import KERNELS

#: How a break shows. Bad data may also be used as an address before it reaches the output.
FENCE = "use-after-poison|SEGV"
RACE = "a race: thread orders|misaligned|" + FENCE
WRONG = "error .* exceeds|between the rows|" + FENCE


@dataclass(frozen=True)
class Break:
    """Replace ``text``, which ``header`` has exactly ``times`` times, by ``by``; one of ``cases`` must tell ``how``."""

    name: str
    algorithm: str
    header: str
    text: str
    by: str
    how: str
    cases: tuple[str, ...]
    times: int = 1


def gemm(name: str, header: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "implicit_gemm", header, text, by, how, cases, times)


def cache(name: str, header: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "register_cache", header, text, by, how, cases, times)


LOADER, EPILOGUE, GEMM = "lib/tile_loader.cuh", "lib/epilogue.cuh", "implicit_gemm.cuh"
CACHE, WINDOWS, BORDER = "register_cache.cuh", "lib/row_windows.cuh", "lib/border.cuh"

BREAKS = (
    gemm("no barrier after the table of taps", GEMM, "__syncthreads();  // the pixel loader's table", "",
         RACE, "plain-nchw", "tails-nchw"),
    gemm("no barrier before the first step", GEMM, "cp_async_wait_group<stages - 2>();\n    __syncthreads();",
         "cp_async_wait_group<stages - 2>();", RACE, "plain-nchw", "plain-nhwc"),
    gemm("no barrier between steps", GEMM, "cp_async_wait_group<stages - 2>();\n                __syncthreads();",
         "cp_async_wait_group<stages - 2>();", RACE, "plain-nchw", "tails-nchw"),
    gemm("waits for one group too few", GEMM, "cp_async_wait_group<stages - 2>();",
         "cp_async_wait_group<stages - 1>();", RACE, "plain-nchw", "tails-nchw", times=2),
    gemm("never waits", GEMM, "cp_async_wait_group<stages - 2>();", ";", RACE, "plain-nchw", "tails-nchw", times=2),
    gemm("halo one column too wide", LOADER, "column < Problem::w", "column <= Problem::w",
         WRONG, "plain-nchw", times=2),
    gemm("halo one row too high", LOADER, "row >= 0", "row >= -1", WRONG, "plain-nhwc", times=2),
    gemm("filters past the end are read", LOADER, "if (k >= Problem::group_k) k = Problem::group_k - 1;", "",
         FENCE, "tails-nchw", "odd-nchw"),
    gemm("pixels past the end are read", LOADER, "first + at < count ? first + at : count - 1", "first + at",
         FENCE, "tails-nchw", "odd-nchw", times=2),
    gemm("ragged reduction unchecked", LOADER, "next + row < Reduction<Problem>::size", "true",
         WRONG, "tails-nchw", "odd-nchw"),
    gemm("pixels past the end are stored", EPILOGUE, "if (pixel < count) y[to]", "y[to]",
         FENCE, "odd-nchw", "tails-nchw"),
    gemm("filters past the end are stored", EPILOGUE, "k >= Problem::group_k", "false",
         FENCE, "odd-nchw", "tails-nchw"),
    gemm("bias of another filter", EPILOGUE, "bias[filter]", "bias[k]", WRONG, "groups-nchw"),
    cache("filter read before it is there", CACHE, "T(0);\n    }\n    __syncthreads();", "T(0);\n    }",
          RACE, "border-constant"),
    cache("staging without a barrier", WINDOWS, "__syncwarp();", "", RACE, "border-constant", times=2),
    cache("one staging buffer for two rows", WINDOWS, "staging.next();", "",
          RACE, "shape-7x7", "border-wrap-large", times=2),
    cache("inside test forgets the right halo", WINDOWS, "j + width + right <= plane.width", "true",
          WRONG, "border-constant", "shape-7x7"),
    cache("inside test forgets the left halo", WINDOWS, "j >= left", "true", WRONG, "shape-7x7"),
    cache("inside test one row too high", WINDOWS, "i >= anchor_y &&", "i + 1 >= anchor_y &&",
          WRONG, "shape-2x2", "shape-7x7"),
    cache("inside test one row too low", WINDOWS, "<= plane.height &&", "<= plane.height + 1 &&",
          WRONG, "shape-4x4", "shape-7x7", "shape-5x3", "shape-3x5"),
    cache("inside test forgets alignment", WINDOWS, "return reinterpret_cast<unsigned long long>(pointer) % 16 == 0",
          "return true || pitch == 0", "misaligned", "pitch-odd"),
    cache("columns past the end are stored", WINDOWS, "if (32 * k + lane < count)", "", WRONG, "border-constant"),
    cache("rows past the end are stored", CACHE, "if (i + p < height)\n", "\n", FENCE, "border-constant"),
    cache("reflect off by one", BORDER, "2 * extent - 1 - m", "2 * extent - 2 - m", WRONG, "border-reflect"),
    cache("reflect101 off by one", BORDER, ": 2 * extent - 2 - m", ": 2 * extent - 3 - m", WRONG, "border-reflect101"),
    cache("wrap without the modulo", BORDER, "return positive_modulo(i, extent);",
          "return i < 0 ? i + extent : i - extent;", FENCE, "border-wrap-over-image"),
    cache("constant border reads the image", BORDER, "int map(int, int) { return -1; }",
          "int map(int, int) { return 0; }", WRONG, "border-constant"),
    cache("filter shifted by one weight", CACHE, "* ring[(turn + p) % depth][k + e + c]",
          "* ring[(turn + p) % depth][k + e + c - (e > 0)]", WRONG, "border-constant"),
)  # fmt: skip


def broken_kernels(broken: Break, folder: Path) -> Path:
    """A copy of the kernels with the patch applied."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy)
    header = copy / broken.header
    text = header.read_text()
    found = text.count(broken.text)
    assert found == broken.times, (
        f"{broken.header} has {broken.text!r} {found} times, not {broken.times}: adapt the patch"
    )
    header.write_text(text.replace(broken.text, broken.by))
    return copy


@pytest.mark.parametrize("broken", [pytest.param(b, id=f"{b.algorithm}: {b.name}") for b in BREAKS])
def test_broken_kernel_is_caught(broken, tmp_path):
    algorithm = next(a for a in ALGORITHMS if a.name == broken.algorithm)
    kernels = broken_kernels(broken, tmp_path)
    problems = {case.name: case.problem for case in CASES}

    def check() -> None:
        for name in broken.cases:
            run = partial(emulator.run_plan, kernels=kernels)
            proof.check(algorithm, problems[name], run=run)

    with pytest.raises((emulator.EmulatorError, proof.WrongAnswer), match=broken.how):
        check()


def test_every_algorithm_is_broken_on_purpose():
    assert {b.algorithm for b in BREAKS} == {a.name for a in ALGORITHMS}


def test_a_patch_that_finds_nothing_fails(tmp_path):
    stale = gemm("stale", GEMM, "text that is not there", "", RACE, "plain-nchw")
    with pytest.raises(AssertionError, match="adapt the patch"):
        broken_kernels(stale, tmp_path)
