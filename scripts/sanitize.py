"""Run compute-sanitizer over one case of every kernel variant, and write what it reports as a table.

``python scripts/sanitize.py --write FILE`` plays each run of ``--list`` on the first GPU under racecheck and memcheck,
and writes a Markdown table. A variant is an algorithm, or strategy, with one answer to the questions of its
configuration: how pixels come, in which schedule, whether a reduction is split. Outputs are checked against float64
too. Needs a GPU and compute-sanitizer (``--sanitizer PATH``, part of the CUDA toolkit); ``--list`` needs neither.

Racecheck follows each thread's own arrivals at a barrier. In most rings one lane arrives for its warp, after
``__syncwarp``, so accesses of the other lanes are reported though they are ordered. So racecheck sees kernels made
from a copy of the headers in which every lane arrives by itself (`edited_headers`), and nothing is stored to the spare
pixel, which several warps write and none reads. What is reported there is a race. ``--as-they-are`` changes nothing.
``--option`` is handed on to racecheck.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import ml_dtypes  # noqa: E402, F401 - so that NumPy knows bfloat16

from leanconv.kernels.contract import Config, GpuAlgorithm  # noqa: E402
from leanconv.kernels.hopper_native.gradient_phases import phases_together  # noqa: E402
from leanconv.plan import TensorMap  # noqa: E402
from leanconv.problem import Problem  # noqa: E402
from leanconv.runtime.files import write_text  # noqa: E402
from tests import proof  # noqa: E402
from tests.cases import CASES, TARGETS, TRANSFORM_CASES  # noqa: E402
from tests.cases_16bit import NATIVE_CASES  # noqa: E402
from tests.cases_separable import SEPARABLE_CASES  # noqa: E402
from tests.cases_tensor import PAIR_CASES, TENSOR_CASES, TF32_CASES  # noqa: E402
from tests.cases_volumes import VOLUME_CASES  # noqa: E402
from tests.cases_weight import IMAGE_CASES, WEIGHT_CASES  # noqa: E402
from tests.kernels.patching import Patch, copied_headers, kernel_headers, patched  # noqa: E402
from tests.variants import VARIANTS  # noqa: E402

TARGET = TARGETS[0]
TOOLS = ("racecheck", "memcheck")
#: Seconds of one run: a sanitizer takes up to a hundred times as long as the kernel.
LIMIT_S = 600
#: Work of a case, where a variant has one that takes less.
MOST_FLOPS = 3e7
#: Numbers of a configuration of which it matters whether they are more than the first value.
SWITCHES = {
    "spacing": 0, "row_pixels": 0, "resident_pixels": 0, "split": 1, "split_k": 1, "partials": 0, "multicast": 1
}  # fmt: skip
#: Kernels of which one launch may compute several phases of a strided gradient.
JOINED = ("native_gemm_16bit", "native_gemm_tf32")
#: An arrival counts 32 times, or is that of one lane of 32.
_32 = '"mbarrier.arrive.release.cta.{}.b64 _, [%0]{};\\n"'.format
EVERY_LANE = (
    Patch("as many as lanes", "mbarrier_init", '"r"({{=> 32 *}} count)'),
    Patch("a thread", "mbarrier_arrive", f"{{{{{_32('shared::cta', '')} => {_32('shared::cta', ', 32')}}}}}"),
    Patch(
        "another block's", "mbarrier_arrive_cluster",
        f"{{{{{_32('shared::cluster', '')} => {_32('shared::cluster', ', 32')}}}}}",
    ),
    Patch(
        "a thread that expects bytes", "mbarrier_arrive_expect_tx",
        '{{"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\\n" => '
        f'"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\\n" {_32("shared::cta", ", 32")}}}}}',
    ),
    Patch(
        "a warp", "mbarrier_arrive_warp",
        f'{{{{if (lane == 0) mbarrier_arrive(barrier) => asm volatile({_32("shared::cta", "")} :: '
        '"r"(shared_address(barrier)) : "memory")}}',
    ),
    Patch("a thread's copies", "cp_async_mbarrier_arrive", "{{asm => for (int i = 0; i < 32; ++i) asm}} volatile"),
    Patch(
        "a warp, twice", "mbarrier_arrive_warp",
        "{{if (lane == 0) { mbarrier_arrive(barrier); mbarrier_arrive(next); } => "
        "mbarrier_arrive_warp(barrier, lane); mbarrier_arrive_warp(next, lane);}}",
    ),
    Patch(
        "a warp whose first lane finds the barrier", "sum_images",
        "{{if (lane == 0) mbarrier_arrive(_.split_empty(_1(_2) % Tuning::split_stages)) => "
        "mbarrier_arrive_warp(rings.split_empty(_1(_2) % Tuning::split_stages), lane)}}",
    ),
)  # fmt: skip
#: What belongs to no stage is not stored.
NO_SPARE = (
    Patch(
        "the spare pixel",
        "PixelUnit::store",
        "{{=> if (places[j] != Source::spare)}} *reinterpret_cast<uint4*>(...) = loaded[i].pixel(j)",
    ),
)
#: Of 512 threads some warps of which have met at a named barrier before, the tool loses this one: the second orders
#: nothing more.
BARRIER_TWICE = (
    Patch("a barrier", "native_weight_nchw", "else {{__syncthreads() => (__syncthreads(), __syncthreads())}}"),
)


@dataclass(frozen=True)
class Run:
    """One case of one variant of a kernel."""

    algorithm: GpuAlgorithm
    case: str
    problem: Problem
    config: Config
    #: what tells the configuration from others of the algorithm
    kind: str

    @property
    def name(self) -> str:
        """Unique, and the same in every process."""
        return " ".join(filter(None, (self.algorithm.stem, self.case, self.kind)))


def _kind(algorithm: GpuAlgorithm, problem: Problem, config: Config) -> str:
    known: dict[str, Any] = dict(config.constants())
    answers = [f"{name} {value}" for name, value in proof.decisions(config) if not isinstance(value, bool)]
    answers += [name for name, value in known.items() if isinstance(value, bool) and value]
    answers += [name for name, first in SWITCHES.items() if known.get(name, first) > first]
    if algorithm.stem in JOINED and problem.op == "dgrad":
        # a launch of several phases has a map of each
        maps = [each for launch in algorithm.plan(problem, config, TARGET).launches for each in launch.arguments]
        answers += ["phases"] * any(isinstance(each, TensorMap) and each.suffix == "1" for each in maps)
    if algorithm.stem == "native_gemm_nchw" and phases_together(problem):
        answers.append("phases")
    if algorithm.stem == "native_gemm_pointwise":
        # pixels by TMA, by copies of lanes, of an odd number, and at a stride
        answers += [f"{gcd(problem.p * problem.q, 8)} pixels", *["strided"] * (problem.stride != (1, 1))]
    if algorithm.stem in ("native_gemm_pointwise", "native_gemm_planes"):
        answers += ["gradient"] * (problem.op == "dgrad")
    return ", ".join(answers)


def _suits(case: Any) -> tuple[bool, float]:
    too_long = case.problem.flops > MOST_FLOPS
    return too_long, case.problem.flops if too_long else -case.problem.flops


@cache
def runs() -> tuple[Run, ...]:
    """A case of each variant with much work, so that stages of rings are filled again and again: but not too much."""
    cases = (*CASES, *SEPARABLE_CASES, *NATIVE_CASES, *PAIR_CASES, *TENSOR_CASES, *TF32_CASES)
    found: dict[tuple[str, str], Run] = {}
    for case in sorted((*cases, *TRANSFORM_CASES, *WEIGHT_CASES, *IMAGE_CASES, *VOLUME_CASES), key=_suits):
        for algorithm in VARIANTS:
            if case.problem.is_empty or algorithm.reasons(case.problem, TARGET):
                continue
            for config in algorithm.configs(case.problem, TARGET):
                run = Run(algorithm, case.name, case.problem, config, _kind(algorithm, case.problem, config))
                found.setdefault((algorithm.stem, run.kind), run)
    return tuple(sorted(found.values(), key=lambda run: run.name))


def command(run: Run, tool: str, sanitizer: str, edited: bool, options: list[str]) -> list[str]:
    """The command line of one run under one tool."""
    more = [*options, "--racecheck-report=all"] if tool == "racecheck" else []
    edited = edited and tool == "racecheck"
    own = [sys.executable, str(Path(__file__)), "--run", run.name, *(["--edited"] if edited else [])]
    return [sanitizer, "--tool", tool, "--error-exitcode=9", *more, *own]


def edited_headers(folder: Path) -> Path:
    """``folder`` with the kernels in which every lane arrives, nothing is stored to the spare pixel, and the tool sees
    every barrier."""
    copy, texts = copied_headers(folder), dict(kernel_headers())
    for patch in (*EVERY_LANE, *NO_SPARE, *BARRIER_TWICE):
        texts |= patched(patch, texts)
    for path, text in texts.items():
        (copy / path.relative_to(ROOT / "src/leanconv")).write_text(text, "utf-8")
    return copy


def play(run: Run, edited: bool) -> None:
    """One run on this process's GPU; raises where the result is wrong."""
    if not edited:
        return proof.check(run.algorithm, run.problem, run.config, proof.run_on_gpu, kinds=("zero-mean",))
    from leanconv.runtime import cache as disk_cache
    from leanconv.runtime import compile as compiler

    os.environ["LEANCONV_NO_CACHE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        compiler.INCLUDE = disk_cache.INCLUDE = edited_headers(Path(folder))
        proof.check(run.algorithm, run.problem, run.config, proof.run_on_gpu, kinds=("zero-mean",))
    return None


def verdict(tool: str, code: int | None, report: str) -> str:
    """What a run's report says, in a cell of the table."""
    if code is None:
        return f"more than {LIMIT_S} s"
    summary = re.findall(r"=+ (?:RACECHECK|ERROR) SUMMARY: (.+)", report)
    if not summary:
        return f"ended with {code}: {' '.join(report.split())[-120:]}"
    clean = code == 0 and re.match(r"0 (hazards|errors)", summary[-1])
    return "clean" if clean else summary[-1] if code in (0, 9) else f"{summary[-1]}; ended with {code}"


def reported(line: list[str], tool: str) -> str:
    """What a tool says of the run of a command line."""
    begin = time.monotonic()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        said = verdict(tool, done.returncode, done.stdout + done.stderr)
    except subprocess.TimeoutExpired:
        said = verdict(tool, None, "")
    print(
        f"{time.monotonic() - begin:.0f} s: {said}: {line[line.index('--run') + 1]}, {tool}",
        file=sys.stderr,
        flush=True,
    )
    return said


def rows(chosen: list[Run], tools: Sequence[str], jobs: int, call: Callable[[Run, str], list[str]]) -> list[list[str]]:
    """Name, case, configuration and what each tool said of the command line that ``call`` makes; ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        said = [[pool.submit(reported, call(run, tool), tool) for tool in tools] for run in chosen]
        return [
            [run.algorithm.stem, run.case, run.kind or "-", *(each.result() for each in mine)]
            for run, mine in zip(chosen, said, strict=True)
        ]


def main() -> int:
    """List, run one, or run all; exits with 1 where a tool reports something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    parser.add_argument("--only", default="", metavar="TEXT", help="those runs whose name has this text")
    parser.add_argument("--as-they-are", action="store_true", help="racecheck sees the kernels unchanged")
    parser.add_argument("--edited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PATH")
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help="one more of racecheck")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="by default all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at a time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table; without it, it is printed")
    parser.add_argument("--run", metavar="NAME", help="play this run alone, on the GPU and without a sanitizer")
    given = parser.parse_args()
    if given.run:
        play(next(run for run in runs() if run.name == given.run), given.edited)
        return 0
    chosen = [run for run in runs() if given.only in run.name]
    tools = given.tool or TOOLS

    def call(run: Run, tool: str) -> list[str]:
        return command(run, tool, given.sanitizer, not given.as_they_are, given.option)

    if given.list:
        for run in chosen:
            for tool in tools:
                print(shlex.join(call(run, tool)))
        return 0
    table = [["kernel", "case", "configuration", *tools], ["---"] * (3 + len(tools))]
    table += rows(chosen, tools, given.jobs, call)
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    if given.write:
        write_text(given.write, text)
    else:
        print(text)
    return int(any(cell != "clean" for cells in table[2:] for cell in cells[3:]))


if __name__ == "__main__":
    sys.exit(main())
