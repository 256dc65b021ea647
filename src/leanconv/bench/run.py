"""Run problems with everything that can compute them here, and collect times, memory and errors."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leanconv import options
from leanconv.bench import machine, provenance
from leanconv.bench.ceilings import Ceilings, measure_cpu, measure_gpu
from leanconv.bench.format import significant
from leanconv.bench.operands import Check, Operands, poison
from leanconv.bench.peers import PEERS, Candidate, LeanconvPeer, Peer, Unable
from leanconv.bench.results import AUTO_ENGINE, Results, Row
from leanconv.bench.suites import (
    SUITE_ALGORITHMS,
    Case,
    format_problem,
    load_suite,
    parse_problem,
    suite_layout,
    suite_names,
    with_batch,
)
from leanconv.dtypes import DTYPES, is_narrow
from leanconv.kernels.contract import Arithmetic
from leanconv.problem import Problem
from leanconv.runtime.progress import progress as progress_bar
from leanconv.runtime.timing import Timing, time_cpu, time_gpu, time_gpu_sustained

#: Seconds of rest after a sustained run, after which a card at its limit of power keeps its clocks low.
#: Explored (H200, d48f601): for some 0.2 s what is timed takes up to 1.3 times as long.
_REST_S = 0.4
#: On a CPU every engine is timed in so many rounds, one after the other in each, so that other work of the machine does
#: not fall on one of them alone; the quickest round counts, and a slowest so much slower is reported.
_ROUNDS, _DISTURBED = 3, 1.5
#: On a GPU the upper quartile of a row's samples over the lower, above which a warning says that the run was disturbed.
#: Counted in the committed files of an H200 that did nothing else: 17 of 11,416 rows are above.
_SPREAD = 1.25
#: Direct operations and bytes of one problem that are still pleasant to wait for without a GPU.
_CPU_FLOPS = {False: 2e10, True: 2e9}
_CPU_BYTES = {False: 5e8, True: 1e8}


@dataclass(frozen=True)
class _Run:
    """What holds for every problem of a run."""

    gpu: bool
    quick: bool
    engines: tuple[str, ...]
    ceilings: Ceilings
    #: bytes; leanconv's algorithms that take more are skipped
    workspace_limit: int | None = None
    #: wall-clock time, in seconds of time.perf_counter, after which no further problem is begun
    until: float = math.inf
    #: whether speeds on a busy card are measured, too
    sustained: bool = False

    def wants(self, engine: str) -> bool:
        return not self.engines or any(fnmatchcase(engine, pattern) for pattern in self.engines)

    def refuses(self, candidate: Candidate) -> str | None:
        """Why the limit leaves a candidate out; None where it does not."""
        needed, limit = candidate.workspace_bytes, self.workspace_limit
        if not candidate.engine.startswith("leanconv") or limit is None or not isinstance(needed, int):
            return None
        if needed + candidate.prepared_bytes <= limit:
            return None
        filters = f" and {candidate.prepared_bytes} of packed weights" if candidate.prepared_bytes else ""
        return f"it needs {needed} bytes of workspace{filters}, and workspace_limit is {limit}"

    @property
    def budget_s(self) -> float:
        """Seconds of samples for one figure.

        Explored (H200, b73e586): the quartiles of most kernels lie within 1 % of each other, so that 60 ms, from 5 runs
        of the slowest to 100 of those below 0.6 ms, leave the median uncertain by a few tenths of a per cent.
        """
        if self.quick:
            return 0.015 if self.gpu else 0.03 / _ROUNDS
        return 0.06 if self.gpu else 0.3 / _ROUNDS


def run_suite(
    what: str | Sequence[Case],
    *,
    layout: str | None = None,
    precision: str | None = None,
    dtype: str | None = None,
    op: str | None = None,
    engines: Sequence[str] = (),
    only: str | None = None,
    batch: int | None = None,
    quick: bool = False,
    sustained: bool = False,
    device: str | None = None,
    revision: str | None = None,
    workspace_limit: int | None = None,
    algorithms: Sequence[str] = (),
    seconds: float | None = None,
    resume: Results | None = None,
    progress: bool = True,
    peers: Sequence[Peer] | None = None,
) -> Results:
    """Measure a suite, a problem in words (see leanconv.bench.suites), or given cases.

    ``layout``, ``precision``, ``dtype`` and ``op`` (``"dgrad"``, ``"wgrad"``: gradients of the layers) override a
    suite's (peers run in the layouts that they have, in any precision as in float32, and in the type if they have it);
    ``engines`` are patterns such as ``"leanconv"``, ``"cudnn:*"``; ``only`` is a pattern that problem names must match;
    ``batch`` replaces the number of images; ``quick`` spends a quarter of the time on each figure, ``sustained``
    measures what runs on the GPU on a busy card, too; ``device`` is None
    (the GPU where there is one), ``"cuda"`` or ``"cpu"``; ``revision`` is what to record where the package is not in a
    git checkout; ``peers`` are the libraries to run, by default all of PEERS.

    ``algorithms`` are patterns of leanconv's own algorithms; by default those that the suite is about
    (``suites.SUITE_ALGORITHMS``), or all. After ``seconds`` of wall-clock time no further problem is begun; the
    result's ``missing`` names what is left, and a later run with ``resume``, that result, measures it and returns both
    as one.

    An interrupt ends the run and keeps what has been measured, with a warning in the result, which is ``interrupted``.
    On a CPU engines are timed in turn, in several rounds, of which the quickest counts; warnings name those that other
    work of the machine has disturbed. On a CPU, layers too
    large to wait for run on fewer images, which the result's warnings say. Raises ValueError for an unknown suite,
    layout, precision, type or device, for a problem that cannot be read, for an empty batch, when a pattern matches
    nothing, for bfloat16 without a GPU, and for a ``resume`` that misses nothing or comes from another machine,
    revision or suite.
    ``workspace_limit`` (bytes, by default that of LEANCONV_WORKSPACE_LIMIT) leaves out leanconv's algorithms that need
    more; peers take what they need.
    """
    begin = time.perf_counter()
    cases, suite, layout, precision = cases_of(what, layout, precision, dtype, op)
    order = [case.name for case in cases]
    if only is not None:
        cases = tuple(case for case in cases if fnmatchcase(case.name, only))
    if not cases:
        raise ValueError(f"only={only!r} matches no problem of {suite!r}")
    if resume is not None:
        cases = tuple(case for case in cases if case.name in resume.missing)
        if not cases:
            raise ValueError(f"resume: the results miss no problem of {suite!r} that was requested")
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    if batch is None and (empty := next((case.name for case in cases if case.problem.is_empty), None)):
        raise ValueError(f"batch=0 of {empty!r} has nothing to time; it must be at least 1")
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"device={device!r} is not known; choose 'cuda' or 'cpu'")
    usable, why = machine.gpu_usable()
    if device == "cuda" and not usable:
        raise ValueError(why)
    gpu = usable and device != "cpu"
    foreign = {case.problem.dtype for case in cases if DTYPES[case.problem.dtype].numpy is None}
    if foreign and not gpu:
        raise ValueError(f"dtype={foreign.pop()!r} is measured on a GPU only: NumPy has no such type")
    limit = options.limit_of(workspace_limit)
    ceilings = (measure_gpu if gpu else measure_cpu)(0.1 if quick else 0.3)
    until = begin + (math.inf if seconds is None else seconds)
    run = _Run(gpu, quick, tuple(engines), ceilings, limit, until, sustained)
    if peers is None:
        # the kernels that a suite leaves out would take most of its time on a GPU
        picked_alone = bool(engines) and not any(
            run.wants(each) for each in LeanconvPeer.engines if each != AUTO_ENGINE
        )
        own = LeanconvPeer(tuple(algorithms) or (SUITE_ALGORITHMS.get(suite, ()) if gpu else ()), picked_alone)
        peers = tuple(own if isinstance(peer, LeanconvPeer) else peer for peer in PEERS)
    known = [engine for peer in peers for engine in peer.engines]
    for pattern in engines:
        if not any(fnmatchcase(engine, pattern) for engine in known):
            raise ValueError(f"engines={pattern!r} matches none of {', '.join(known)}")

    absent: dict[str, str] = {}
    versions: dict[str, str] = {}
    present = _present(run, cases, peers, absent, versions)
    about = machine.describe(gpu, run.ceilings, versions, revision)
    results = Results(about, suite, layout, absent=absent, precision=precision, dtype=dtype, op=op)
    if resume is not None:
        resume.refuse_other(results)
    if not gpu and device != "cpu":
        results.warnings.append(why + "; these are CPU figures")
    interrupted = False
    with progress_bar(len(cases), progress) as begin_step, _settled_objects():
        left = list(cases)
        try:
            sized = {case.name: _sized(case, batch, run, results) for case in cases}
            for peer in present:
                peer.prepare([problem for problem in sized.values() if problem is not None], gpu)
            while left and time.perf_counter() < run.until:
                name = left[0].name
                begin_step(name)
                problem = sized[name]
                if problem is not None:
                    _measure(name, problem, run, present, results)
                left.pop(0)
        except KeyboardInterrupt:
            results.warnings.append(f"interrupted at {left[0].name}: what follows is missing")
            interrupted = True
    results.missing = [case.name for case in left]
    results.warnings += _spread(results.rows) if gpu else []
    if resume is not None:
        results = resume.joined(results, order)
    # of the algorithms that have rows; a name may go on with a limit of its workspace
    stems = {row.algorithm.partition(" ")[0] for row in results.rows if row.engine.startswith("leanconv")}
    results.machine["kernels"] = provenance.kernels(stems) if gpu else {}
    results.interrupted = interrupted
    if not results.rows:
        results.warnings.append("nothing was measured: no requested engine could run")
    return results


@contextmanager
def _settled_objects() -> Iterator[None]:
    """The garbage collector leaves alone what exists already, most of it PyTorch's, and is soon done."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def cases_of(
    what: str | Sequence[Case], layout: str | None, precision: str | None, dtype: str | None, op: str | None = None
) -> tuple[tuple[Case, ...], str, str | None, str | None]:
    """The cases; then suite, layout, and the precision where it is not the suite's own."""
    in_words = isinstance(what, str) and ":" in what
    for setting, given in (("layout", layout), ("precision", precision), ("dtype", dtype), ("op", op)):
        if given is not None and in_words:
            raise ValueError(f"{setting}={given!r} is for suites; write it into the problem, as in {what},{given}")
        if given is not None and not isinstance(what, str) and setting != "layout":
            raise ValueError(f"{setting}={given!r} is for suites; given cases have their own")
    if not isinstance(what, str):
        return tuple(what), "cases", layout, None
    if in_words:
        problem = parse_problem(what)
        own = getattr(problem, "layout", None)
        if problem.kind == "conv2d" and problem.op == "dgrad" and problem.bias:
            raise ValueError(
                f"{what}: a gradient of the input is measured without a bias, which peers do not add to it"
            )
        return (Case(what.partition(":")[2], problem),), "problem", own, None
    if what not in suite_names():
        names = ", ".join(suite_names())
        raise ValueError(f"{what!r} is no suite ({names}), and a problem starts with 'conv:' or 'filter:'")
    cases = load_suite(what, layout, precision, dtype, op)
    usual = load_suite(what, layout, dtype=dtype, op=op)
    return cases, what, layout or suite_layout(what), precision if cases != usual else None


def _present(
    run: _Run, cases: Sequence[Case], peers: Sequence[Peer], absent: dict[str, str], versions: dict[str, str]
) -> list[Peer]:
    """The libraries that can take part; the others are named in ``absent``."""
    kinds = {case.problem.kind for case in cases}
    present = []
    for peer in peers:
        if not kinds & set(peer.solves) or not any(run.wants(engine) for engine in peer.engines):
            continue
        if peer.name == "torch-cpu" and run.gpu:
            continue
        by_request = f"it takes seconds a layer; --engines {peer.engines[0]} asks for it"
        reason = peer.absent() or ("the run is on the CPU" if peer.needs_gpu and not run.gpu else "")
        if reason := reason or (by_request if peer.by_request and not run.engines else ""):
            absent[peer.name] = reason
        else:
            present.append(peer)
            versions.update(peer.versions())
    return present


def _sized(case: Case, batch: int | None, run: _Run, results: Results) -> Problem | None:
    """The case with the requested batch, or on a CPU with one small enough to wait for."""
    problem = case.problem if batch is None else with_batch(case.problem, batch)
    if run.gpu:
        return problem
    images = problem.images
    most = min(_CPU_FLOPS[run.quick] / problem.flops, _CPU_BYTES[run.quick] / problem.bytes) * images
    if most >= images or batch is not None:
        return problem
    if most < 1:
        reason = f"{problem.flops:.1e} operations are too many for a CPU; --batch {images} runs it all the same"
        results.skipped.append({"problem": case.name, "engine": "all", "reason": reason})
        return None
    results.warnings.append(f"{case.name}: {int(most)} of {images} images, all of them would take long on a CPU")
    return with_batch(problem, int(most))


def _measure(name: str, problem: Problem, run: _Run, peers: Sequence[Peer], results: Results) -> None:
    results.problems[name] = {
        "words": format_problem(problem),
        "layout": getattr(problem, "layout", None),
        "flops": problem.flops,
        "bytes": problem.bytes,
        "floor_us": significant(run.ceilings.floor_us(problem, "fp32")),
    }
    begin = time.perf_counter()
    operands = Operands(problem, run.gpu)
    check = Check(operands)
    timed: list[tuple[int, Candidate]] = []
    for peer in peers:
        if problem.kind not in peer.solves:
            continue
        if problem.kind == "conv2d" and problem.is_volume and not peer.volumes:
            why = "it is called for layers of images only"
            engines = [engine for engine in peer.engines if run.wants(engine)]
            results.skipped += [{"problem": name, "engine": engine, "reason": why} for engine in engines]
            continue
        iterator = peer.candidates(problem, operands, run.gpu)
        while True:
            candidate: Candidate | Unable | None = None
            try:
                candidate = next(iterator, None)
                if candidate is None:
                    break
                if isinstance(candidate, Unable):
                    if run.wants(candidate.engine) or peer.name == "leanconv":
                        results.skipped.append({"problem": name, **asdict(candidate)})
                elif reason := run.refuses(candidate):
                    engine = f"{candidate.engine} {candidate.algorithm}"
                    results.skipped.append({"problem": name, "engine": engine, "reason": reason})
                elif run.wants(candidate.engine):
                    results.rows.append(_row(name, problem, candidate, check, operands, run))
                    timed.append((len(results.rows) - 1, candidate))
            except Exception as error:
                # A library that fails on one problem must not cost the figures of the others; it is listed instead.
                engine = candidate.engine if candidate else peer.name
                reason = f"{type(error).__name__}: {error}".strip()[:2000]
                results.failed.append({"problem": name, "engine": engine, "reason": reason})
                if candidate is None:
                    break
            candidate = None
            if run.gpu:
                timed.clear()
            _release(run.gpu)
    _further_rounds(name, problem, timed, run, results)
    results.problems[name]["seconds"] = round(time.perf_counter() - begin, 1)


def _further_rounds(
    name: str, problem: Problem, timed: Sequence[tuple[int, Candidate]], run: _Run, results: Results
) -> None:
    """Time what ran on the CPU again, turn by turn, and let the quickest round count; names those that were disturbed.

    A call that is longer than all rounds is timed once: it has outlasted what disturbs for a moment.
    """
    short = [each for each in timed if results.rows[each[0]].us < 1e6 * _ROUNDS * run.budget_s]
    slowest = {place: results.rows[place].us for place, _ in short}
    for _ in range(_ROUNDS - 1):
        for place, candidate in short:
            row = results.rows[place]
            with candidate.scope():
                timing = _time(candidate, False, run)
            slowest[place] = max(slowest[place], timing.median_us)
            if timing.median_us < row.us:
                results.rows[place] = replace(row, **_figures(problem, candidate, timing, run))
    for place, us in slowest.items():
        row = results.rows[place]
        if us > _DISTURBED * row.us:
            results.warnings.append(
                f"{name}: {row.engine} {row.algorithm} took {row.us:.4g} to {us:.4g} µs in rounds of equal work: other "
                "work disturbs this machine"
            )


def _spread(rows: Sequence[Row]) -> list[str]:
    """A warning where samples of equal work lie far apart, which names the row where they are furthest."""
    wide = [row for row in rows if row.us_high > _SPREAD * row.us_low]
    if not wide:
        return []
    worst = max(wide, key=lambda row: row.us_high / row.us_low)
    return [
        f"samples of {len(wide)} of {len(rows)} rows lie far apart, those of {worst.problem}: {worst.engine} "
        f"{worst.algorithm} from {worst.us_low:.4g} to {worst.us_high:.4g} µs between their quartiles: other work may "
        "disturb this GPU, or its clocks change"
    ]


def _cold(problem: Problem, run: _Run) -> bool:
    """Whether every engine's inputs come from memory: for image filters, and where copies bind the direct convolution.

    That of 16-bit layers on tensor cores. It is the problem's property, so all its rows have the L2 in one state.
    """
    direct: Arithmetic = "fp16" if is_narrow(problem.dtype) else "fp32"
    return problem.kind == "filter2d" or run.ceilings.bound(problem, direct) == "copy"


#: What a row says as its candidate does.
_OF_CANDIDATE = ("engine", "algorithm", "registers", "spill_bytes", "note", "variant", "prepared_bytes", "config")


def _row(name: str, problem: Problem, candidate: Candidate, check: Check, operands: Operands, run: _Run) -> Row:
    bound = run.ceilings.bound(problem, candidate.arithmetic)
    cold = candidate.on_gpu and _cold(problem, run)
    with candidate.scope():
        error = _checked(candidate, check, operands, run.gpu)
        timing = _time(candidate, cold, run)
        busy = None
        if run.sustained and candidate.on_gpu:
            busy = significant(time_gpu_sustained(candidate.call))
            time.sleep(_REST_S)
        workspace = candidate.workspace_bytes
        if workspace == "measure":
            workspace = _extra_bytes(candidate)
    return Row(
        problem=name,
        **{kept: getattr(candidate, kept) for kept in _OF_CANDIDATE},
        **_figures(problem, candidate, timing, run),
        ceiling=bound,
        l2="cold" if cold else "warm",
        workspace_bytes=workspace,
        error=significant(error) if math.isfinite(error) else None,
        checked=check.checked,
        dtype=problem.dtype,
        us_sustained=busy,
        precision=problem.precision if candidate.engine.startswith("leanconv") else "fp32",
    )


def _figures(problem: Problem, candidate: Candidate, timing: Timing, run: _Run) -> dict[str, Any]:
    """The fields of a row that follow from its time."""
    return {
        "us": significant(timing.median_us),
        "us_low": significant(timing.low),
        "us_high": significant(timing.high),
        "runs": timing.runs,
        "tflops": significant(problem.flops / timing.median_us * 1e-6),
        "ceiling_share": significant(run.ceilings.floor_us(problem, candidate.arithmetic) / timing.median_us),
    }


def _checked(candidate: Candidate, check: Check, operands: Operands, gpu: bool) -> float:
    """The error of one call whose output was poisoned first, or the memory that the allocator hands out next."""
    if candidate.out is not None:
        poison(candidate.out)
    elif gpu and candidate.on_gpu:
        operands.output(candidate.layout)
    y = candidate.call()
    if gpu and not candidate.on_gpu:
        import torch

        y = torch.from_numpy(y).cuda()
    return check.error(y, candidate.layout, candidate.frame)


def _time(candidate: Candidate, cold: bool, run: _Run) -> Timing:
    if not candidate.on_gpu:
        return time_cpu(candidate.call, budget_s=run.budget_s, warm_up=False)  # the checked call was one
    return time_gpu(candidate.call, cold=cold, budget_s=run.budget_s)


def _extra_bytes(candidate: Candidate) -> int:
    """Most memory PyTorch held during a call, beyond what it held before and what it returned."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = candidate.call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before - int(y.untyped_storage().nbytes())


def _release(gpu: bool) -> None:
    """Give the memory of the last candidate back to the machine, so that the next finds all of it."""
    if gpu:
        import torch

        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


def default_path(results: Results, partial: bool, root: Path = Path("benchmarks/results"), suffix: str = "") -> Path:
    """Where a run belongs: ``<gpu>/<suite>[-nhwc][-relaxed][-float16][-wgrad][suffix].json``.

    Layout, precision, type and operation are named where they are not the suite's.

    ``-part`` is added for less than a whole suite: with ``partial``, or where the run did not come to every problem.
    Only the file of a whole suite is meant to be replaced; any other gets a number where there is one of its name.
    """
    named = results.suite in suite_names()
    own = suite_layout(results.suite) if named else None
    name = results.suite
    if own and results.layout != own:
        name += f"-{(results.layout or '').lower()}"
    name += "".join(f"-{setting}" for setting in (results.precision, results.dtype, results.op) if setting)
    part = "-part" if partial or results.missing else ""
    folder, stem = root / machine.slug(results.machine), f"{name}{suffix}{part}"
    path, number = folder / f"{stem}.json", 2
    while (part or not named) and path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path
