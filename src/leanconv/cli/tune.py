"""``leanconv tune``: what to tune, in words or as a model in a file; tables shown, checked, exported and imported."""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table as Screen

from leanconv import options, words
from leanconv.bench import candidates, cases_of, with_batch
from leanconv.bench.tables import console
from leanconv.call.explain import NOMINAL
from leanconv.options import PRECISIONS
from leanconv.perf import tables
from leanconv.perf.tables import Table, TableError
from leanconv.plan import Target
from leanconv.problem import Problem
from leanconv.runtime import cache, env, launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.files import write_text
from leanconv.runtime.progress import progress
from leanconv.runtime.timing import GpuClock
from leanconv.tuning.search import TuningResult, tune
from leanconv.tuning.verify import files, holding, target_of, todays, verify, verify_code, winners

#: More characters than a row of a table has.
_ANY_WIDTH = 10_000
_MODEL = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def work_of(
    what: str, layout: str | None, precision: str | None, dtype: str | None, op: str | None, batch: int | None,
    inputs: Sequence[str], backward: bool | None, limit: int | None,
) -> dict[int | None, list[Problem]]:  # fmt: skip
    """The problems that a suite, a problem in words, or a model in a file means, by limit of workspace."""
    match = _MODEL.fullmatch(what)
    if match is None:
        if inputs or backward is not None:
            raise ValueError(f"--input and --backward are for models, as in FILE.py:NAME; {what!r} is none")
        cases, *_ = cases_of(what, layout, precision, dtype, op)
        return {limit: [case.problem if batch is None else with_batch(case.problem, batch) for case in cases]}
    for option, given in (("--dtype", dtype), ("--op", op)):
        if given is not None:
            raise ValueError(f"{option} is for suites; {what!r} is a model, which has its own")
    model, example = load_model(Path(match[1]), match[2], inputs, layout, batch)
    from leanconv.torch.recording import problems_of

    level = options.one_of("precision", precision or "fp32", PRECISIONS)
    found: Any = problems_of(model, example, backward=backward, precision=level)
    return found if limit is None else {limit: [each for group in found.values() for each in group]}


def load_model(path: Path, name: str, inputs: Sequence[str], layout: str | None, batch: int | None) -> tuple[Any, Any]:
    """A model of a file, and what it is called with.

    ``name`` is a module, or what returns one, or a pair of a module and its arguments. The arguments are tensors of the
    shapes ``inputs`` (``8x3x224x224``), else those of the pair, else the file's ``example_inputs``.
    """
    import torch

    from leanconv.torch.recording import example_of

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is no Python file" if path.exists() else f"there is no file {path}")
    made = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:  # a model imports what lies beside it, as in `python FILE`
        sys.path.append(folder)
    spec.loader.exec_module(made)
    if not hasattr(made, name):
        raise ValueError(f"{path} has no {name}")
    found, example = getattr(made, name), getattr(made, "example_inputs", None)
    if not isinstance(found, (torch.nn.Module, tuple)) and callable(found):
        found = found()
    if isinstance(found, tuple) and len(found) == 2:
        found, example = found
    if not isinstance(found, torch.nn.Module):
        raise ValueError(f"{path}:{name} is a {type(found).__name__}, neither a torch.nn.Module nor what returns one")
    if layout == "NHWC":
        found = found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif layout not in (None, "NCHW"):
        raise ValueError(f"layout={layout!r}: models of PyTorch are in NCHW or NHWC")
    if inputs:
        example = example_of([_shape(each) for each in inputs], found)
    if example is None:
        raise ValueError(f"{path} says nothing of the inputs: give --input 8x3x224x224, or example_inputs in the file")
    example = example if isinstance(example, tuple) else (example,)
    if batch is not None:
        example = tuple(
            each[:1].expand(batch, *each.shape[1:]) if hasattr(each, "expand") else each for each in example
        )
    if layout == "NHWC":
        example = tuple(
            each.contiguous(memory_format=torch.channels_last) if getattr(each, "ndim", 0) == 4 else each
            for each in example
        )
    return found, example


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ValueError(f"--input {text!r} is no shape; write one such as 8x3x224x224")
    return tuple(map(int, text.split("x")))


def run(
    work: dict[int | None, list[Problem]], device: str, mode: str | None, again: bool, peers: bool | None,
    seconds: float | None = None,
) -> None:  # fmt: skip
    """Tune, for ``seconds`` at most, and print what came of it."""
    begun = perf_counter()
    if not work:
        print("every winner is of today's kernels: there is nothing to tune anew")
    for limit, problems in work.items():
        left = None if seconds is None else max(min(0.0, seconds), seconds - (perf_counter() - begun))
        done = tune(problems, device=device, workspace_limit=limit, mode=mode, again=again, peers=peers, seconds=left)
        if done.problems:
            _print(_screen(done))
        print(done if limit is None else f"{done} (workspace_limit {limit})")


def _table(*columns: str) -> Screen:
    """Problems in the first column, whole letter by letter: they can be given to other commands."""
    screen = Screen()
    screen.add_column("problem", overflow="fold")
    for name in columns:
        screen.add_column(name)
    return screen


def _print(screen: Screen) -> None:
    """On a terminal as wide as that is; elsewhere each row on one line, for programs such as grep."""
    console(_ANY_WIDTH).print(screen)


def _screen(done: TuningResult) -> Screen:
    peers = sorted({name for each in done.problems for name in each.peers})
    screen = _table("runs", "µs", "the cost model's choice", *peers)
    for each in done.problems:
        model = "the same" if each.model_us == each.us else f"{each.model_us or 0:.2f}"
        times = (f"{each.peers[name]:.2f}" if name in each.peers else "-" for name in peers)
        name = words.format_problem(each.problem)
        screen.add_row(name, each.winner.algorithm.name, f"{each.us:.2f}", model if each.model_us else "-", *times)
    return screen


def show() -> None:
    """Print every table: where it is, for which GPU, and its winners."""
    found, stale = list(files()), False
    for source, path in found:
        try:
            table = Table.read(path)
            entries = [(key, entry) for key in sorted(table) if (entry := table.get(key))]
        except (OSError, TableError) as error:
            print(error)
            continue
        screen = _table("runs", "µs", "candidates", "others")
        print(f"{source}: {path}")
        target = target_of(table)
        for key, entry in entries:
            others = ", ".join(f"{name} {us:.2f}" for name, us in entry.peers.items())
            for limit, won in entry.winners.items():
                problem = key if limit == tables.NO_LIMIT else f"{key} (workspace_limit {limit})"
                most = None if limit == tables.NO_LIMIT else int(limit)
                holds = target is None or not isinstance(todays(key, most, won, target, source), str)
                runs = won.algorithm if holds else f"{won.algorithm} (stale)"
                screen.add_row(problem, runs, f"{won.us:.2f}", str(len(entry.timed)), others)
                stale |= not holds
        _print(screen)
    if stale:
        print("stale: its kernels have changed, or can no longer run; leanconv tune --refresh tunes it anew")
    if not found:
        print(f"there is no table; leanconv tune writes one into {tables.user_folder()}")


#: Of the entries of a shipped table so many must be valid.
LEAST_VALID = 0.95


def check(device: str) -> bool:
    """Check every table of this machine's GPU, or an H200's without one; whether nothing computes wrong values, and
    enough entries of the shipped table are valid."""
    try:
        on = launch.open_device(options.device_index(device, gpu_only=True))
    except CudaUnavailableError as error:
        print(f"neither values nor times are checked: {error}")
        return all([_check(source, path, NOMINAL, None, None) for source, path in files()])
    with GpuClock.opened(options.device_index(device, gpu_only=True)) as clock:
        return all([_check(source, path, on.target, on, clock) for source, path in files()])


def _check(source: str, path: Path, target: Target, device: Any, clock: Any) -> bool:
    try:
        table = Table.read(path)
        len(table)
    except (OSError, TableError) as error:
        print(error)
        return True
    if table.gpu != tables.gpu_record(target):
        print(f"{path} is for {table.gpu.get('name')}")
        return True
    shipped = source == tables.SHIPPED_TABLE
    verdicts = verify(table, target, source, device, clock)
    if shipped and device is None:
        try:
            cache.compiler_version()
            verdicts = verify_code(table, target)
        except (CudaUnavailableError, ValueError) as error:
            print(f"machine code is not compared: {error}")
    found = []
    with progress(len(table)) as begin:
        for verdict in verdicts:
            begin(verdict.problem)
            found.append(verdict)
    stale, wrong = [v for v in found if v.why and not v.wrong], [v for v in found if v.wrong]
    for verdict in (*wrong, *stale):
        print(f"{verdict.problem}, {verdict.winner.algorithm}: {verdict.why}")
    ratios = [v.us / v.winner.us for v in found if v.us and v.winner.us]
    live = len(found) - len(stale) - len(wrong)
    text = f"{path}: {live} of {len(found)} entries valid"
    if stale:
        text += "; leanconv tune --refresh tunes the others anew"
    if ratios:
        text += f", and take {statistics.geometric_mean(ratios):.3f} of their times ({max(ratios):.2f} at most)"
    print(text)
    return not wrong and not (shipped and live < LEAST_VALID * len(found))


def outdated(device: str) -> dict[int | None, list[Problem]]:
    """The problems that tables of this machine's GPU have with no winners but those of changed kernels, by limit of
    workspace."""
    target = launch.open_device(options.device_index(device, gpu_only=True)).target
    holds: dict[tuple[str, int | None], bool] = {}
    for source, folder in tables.folders():
        table = tables.table_of(folder, target)
        for key, limit, winner in () if table is None else winners(table):
            current = not isinstance(todays(key, limit, winner, target, source), str)
            holds[key, limit] = current or holds.get((key, limit), False)
    found: dict[int | None, list[Problem]] = {}
    for key, limit in (each for each, current in holds.items() if not current):
        with suppress(ValueError):  # a problem of another version
            found.setdefault(limit, []).append(words.parse_problem(key))
    return found


def export_table(target: Path) -> None:
    """Copy the user's table, of this machine's GPU where there is one, to a file.

    Raises ValueError for a file that is there already and is no table of this GPU: that stays.
    """
    folder, gpu = tables.user_folder(), ""
    found = sorted(folder.glob("*.json"))
    with suppress(CudaUnavailableError):
        gpu = launch.open_device(0).target.model
        found = [tables.path_of(folder, gpu)]
    found = [path for path in found if path.is_file()]
    if not found:
        raise ValueError(f"{folder} has no table of tuned problems{gpu and f' of {gpu}'}; leanconv tune writes one")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} has tables of several GPUs, and no GPU is here to say which; copy one of {names}")
    table = Table.read(found[0])
    if target.is_file():
        _refuse_to_replace(target, table.gpu)
    write_text(target, table.text())
    print(f"{target}: {len(table)} problems of {table.gpu.get('name')}")


def _refuse_to_replace(target: Path, gpu: Mapping[str, Any]) -> None:
    """Raises ValueError for a file that is no table of this GPU."""
    try:
        there = Table.read(target)
        len(there)
    except ValueError as error:
        raise ValueError(f"{error}; it is not overwritten") from None
    if there.gpu != gpu:
        raise ValueError(f"{target} is for {there.gpu.get('name')}, not for {gpu.get('name')}; it is not overwritten")


def import_table(source: Path) -> None:
    """Merge a file into the user's table of its GPU."""
    if env.tuning_mode() != "on":
        raise ValueError(f"LEANCONV_TUNING={env.tuning_mode()}: no table is written")
    table = candidates.read(source)
    path = tables.path_of(tables.user_folder(), str(table.gpu.get("name")))
    merged = tables.update(path, table)
    print(f"{path}: {len(merged)} problems of {table.gpu.get('name')}, {len(table)} of them imported")
    if text := holding(table, tables.USER):
        print(f"imported: {text}")
