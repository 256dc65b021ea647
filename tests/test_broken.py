"""The test of the tests: kernels broken on purpose must fail the same check that proves the whole ones.

Each break is a textual patch, applied in a copy of the kernels' folder, in whichever header has the text. A patch whose
text is no longer there fails here: it would break nothing, and prove nothing.
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
    """Replace ``text``, which all headers have ``times`` times, by ``by``: one of ``cases`` must tell ``how``."""

    name: str
    algorithm: str
    text: str
    by: str
    how: str
    cases: tuple[str, ...]
    times: int = 1


def gemm(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "implicit_gemm", text, by, how, cases, times)


def cache(name: str, text: str, by: str, how: str, *cases: str, times: int = 1) -> Break:
    return Break(name, "register_cache", text, by, how, cases, times)


BREAKS = (
    gemm("no barrier after the table of taps", "__syncthreads();  // the pixel loader's table", "",
         RACE, "plain-nchw", "tails-nchw"),
    gemm("no barrier before the first step", "    __syncthreads();\n        read(0, 0);",
         "    read(0, 0);", RACE, "plain-nchw", "plain-nhwc"),
    gemm("no barrier between steps", "    __syncthreads();\n                    read(step + 1, 0);",
         "    read(step + 1, 0);", RACE, "plain-nchw", "tails-nchw"),
    gemm("waits for one group too few", "cp_async_wait_group<stages - 2>();",
         "cp_async_wait_group<stages - 1>();", RACE, "plain-nchw", "tails-nchw", times=2),
    gemm("never waits", "cp_async_wait_group<stages - 2>();", ";", RACE, "plain-nchw", "tails-nchw", times=2),
    gemm("halo one column too wide", "column < Problem::w", "column <= Problem::w",
         WRONG, "plain-nchw", times=2),
    gemm("halo one row too high", "row >= 0 && row < Problem::h", "row >= -1 && row < Problem::h",
         WRONG, "plain-nhwc", times=2),
    gemm("filters past the end are read", "if (k >= Problem::group_k) k = Problem::group_k - 1;", "",
         FENCE, "tails-nchw", "odd-nchw"),
    gemm("pixels past the end are read", "first + at < count ? first + at : count - 1", "first + at",
         FENCE, "tails-nchw", "odd-nchw", times=2),
    gemm("ragged reduction unchecked", "size % depth == 0 || next + at < size", "true",
         WRONG, "tails-nchw", "odd-nchw"),
    gemm("pixels past the end are stored", "pixel < count ? 4 : 0", "4",
         FENCE, "odd-nchw", "tails-nchw"),
    gemm("filters past the end are stored", "if (k >= Problem::group_k) continue;", "",
         FENCE, "odd-nchw", "tails-nchw"),
    gemm("bias of another filter", "bias[filter]", "bias[k]", WRONG, "groups-nchw"),
    cache("input rows and filter read before they are there",
          "cp_async_wait_group<0>();\n    __syncthreads();\n\n", "cp_async_wait_group<0>();\n\n",
          RACE, "border-constant"),
    cache("input rows not waited for", "cp_async_wait_group<0>();\n    __syncthreads();\n\n", "__syncthreads();\n\n",
          RACE, "border-constant"),
    cache("outputs staged over rows still in use", "__syncthreads();  // the input rows have been read", "//",
          RACE, "shape-7x7", "border-wrap-large"),
    cache("outputs staged without a barrier", "__syncwarp();", "", RACE, "border-constant", times=2),
    cache("inside test forgets the right halo", "j + Base::width + Base::right <= plane.width", "true",
          WRONG, "border-constant", "shape-7x7"),
    cache("inside test forgets the left halo", "j >= Base::left &&", "", WRONG, "shape-7x7"),
    cache("inside test one row too high", "first_row >= 0", "first_row >= -1", WRONG, "shape-2x2", "shape-7x7"),
    cache("inside test one row too low", "first_row + rows <= plane.height",
          "first_row + rows <= plane.height + 1", WRONG, "shape-4x4", "shape-7x7", "shape-5x3", "shape-3x5"),
    cache("inside test forgets alignment", "return reinterpret_cast<unsigned long long>(pointer) % 16 == 0",
          "return true || pitch == 0", "misaligned|aligned", "pitch-odd"),
    cache("columns past the end are stored", "if (32 * k + lane < count)", "", WRONG, "border-constant"),
    cache("rows past the end are stored", "if (i + p < height) writer", "writer", FENCE, "border-constant"),
    cache("reflect off by one", "2 * extent - 1 - m", "2 * extent - 2 - m", WRONG, "border-reflect"),
    cache("reflect101 off by one", ": 2 * extent - 2 - m", ": 2 * extent - 3 - m", WRONG, "border-reflect101"),
    cache("wrap without the modulo", "return positive_modulo(i, extent);",
          "return i < 0 ? i + extent : i - extent;", FENCE, "border-wrap-over-image"),
    cache("constant border reads the image", "int map(int, int) { return -1; }",
          "int map(int, int) { return 0; }", WRONG, "border-constant"),
    cache("filter shifted by one weight", "* ring[(turn + p) % depth][k + e + c]",
          "* ring[(turn + p) % depth][k + e + c - (e > 0)]", WRONG, "border-constant"),
)  # fmt: skip


def broken_kernels(broken: Break, folder: Path) -> Path:
    """A copy of the kernels with the patch applied."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy)
    headers = {header: header.read_text() for header in sorted(copy.rglob("*.cuh"))}
    found = sum(text.count(broken.text) for text in headers.values())
    assert found == broken.times, (
        f"{broken.text!r} is in the kernels {found} times, not {broken.times}: adapt the patch"
    )
    for header, text in headers.items():
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
    stale = gemm("stale", "text that is not there", "", RACE, "plain-nchw")
    with pytest.raises(AssertionError, match="adapt the patch"):
        broken_kernels(stale, tmp_path)
