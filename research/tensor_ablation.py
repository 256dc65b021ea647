"""What each part of the tensor-core kernels is worth, and what a convolution costs in energy.

``python -m research tensor-ablation`` times `tensor_gemm` and `tensor_winograd` in precision fp32 as calls run them,
and without one part at a time (research/kernels/tensor_*.cuh); then algorithms and PyTorch at work, with the power of
the card. It writes research/results/<machine>/tensor-ablation.json; the blocks ``parts`` and ``energy`` are made of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from leanconv.bench import columns, machine
from leanconv.bench.format import Table
from leanconv.bench.suites import format_problem, parse_problem
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import Config, TimedAlgorithm
from leanconv.options import Precision
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem
from report import records
from report.drawing import INK, finish, panels, tidy
from report.energy import Meter, Work, at_work, idle, open_meter
from research.studies import compiled_from

TAKEN_APART = ("tensor_gemm", "tensor_winograd")


@dataclass(frozen=True)
class Part:
    """A way to run a kernel without a part: another ``header`` with its function, whose name may have a ``suffix``,
    other ``values`` in its configuration, or what it takes in another ``precision``. ``says``: what is left out.
    Without ``right`` the result means nothing.
    """

    says: str
    header: str = ""
    suffix: str = ""
    values: tuple[tuple[str, Any], ...] = ()
    precision: Precision = "fp32"
    right: bool = True


WHOLE = "as it is"
PARTS = {
    WHOLE: Part("what a call ran then"),
    "one product": Part("hi·hi alone: what precision tf32 ran then", precision="tf32"),
    "two products": Part("hi·hi + hi·lo: pixels lose their low halves", "tensor_two_products.cuh"),
    "one scale": Part("no search for each row's largest value", "tensor_fixed_scales.cuh"),
    "no splitting": Part("pixels' bits are multiplied as they were loaded", "tensor_unconverted.cuh", right=False),
    "sums in the tensor core": Part("one scale, and no partial sums of 64", "tensor_unpromoted.cuh", "_unpromoted"),
    "no turns": Part("warpgroups multiply when they like", values=(("ping_pong", False),)),
    "no copies of filters": Part("filters' stages are declared full", "tensor_no_filter_copies.cuh", right=False),
    "no copies of pixels": Part("pixels' stages are", "tensor_no_pixel_copies.cuh", right=False),
    "no copies": Part("both", "tensor_no_copies.cuh", right=False),
    "products alone": Part("no copies, no splitting, no partial sums", "tensor_alone.cuh", "_unpromoted", right=False),
}


def _layer(c: int, k: int, extent: int) -> ConvProblem:
    pad = (extent // 2,) * 4
    return ConvProblem(32, c, 56, 56, k, extent, extent, padding=pad, layout="NHWC", precision="fp32")


#: What is taken apart, and what runs with the meter.
PART_LAYERS = {"3×3, 256": _layer(256, 256, 3), "3×3, 64": _layer(64, 64, 3)}
ENERGY_LAYERS = {**PART_LAYERS, "1×1, 256": _layer(256, 256, 1)}
#: Engines with the meter: of ours by precision and algorithm, PyTorch's by the names of the benchmark.
OWN_ENGINES: dict[Precision, tuple[str, ...]] = {
    "fp32": ("tensor_gemm", "tensor_winograd", "implicit_gemm", "winograd1d"),
    "tf32": ("native_gemm_tf32", "tensor_gemm", "tensor_winograd"),
}
PEER_ENGINES = {
    "torch-fp32-nchw": "PyTorch, strict FP32, NCHW",
    "torch-fp32-nhwc": "PyTorch, strict FP32, NHWC",
    "torch-tf32-nhwc": "PyTorch, TF32, NHWC",
}
#: Seconds: rest before single launches, of single launches, and of work before and with the meter.
REST_S, BURST_S, WARM_S, PART_S, ENGINE_S = 0.1, 0.02, 0.12, 0.5, 0.6


def _algorithm(name: str) -> TimedAlgorithm:
    found = next(algorithm for algorithm in ALGORITHMS if algorithm.stem == name)
    assert isinstance(found, TimedAlgorithm)
    return found


def whole_config(name: str, problem: ConvProblem, target: Target) -> Config:
    """The configuration with the least predicted time whose blocks share no reduction, nor copies of filters, and whose
    tiles have any pixels: the studies' kernels know no other."""
    for _, config in _algorithm(name).timed(problem, target):
        together = getattr(config, "split", 1) * getattr(config, "multicast", 1) > 1
        if not together and not getattr(config, "one_row", False):
            return config
    raise ValueError(f"{name} has no configuration with tiles of its own for {problem}")


def plans(name: str, problem: ConvProblem, target: Target) -> Iterator[tuple[str, Plan]]:
    """Each part's plan, whole first; parts that a configuration does not have are left out."""
    algorithm, config = _algorithm(name), whole_config(name, problem, target)
    plan = algorithm.plan(problem, config, target)
    (launch,) = plan.launches
    for part, about in PARTS.items():
        if about.header:
            changed_launch = compiled_from(launch, about.header, about.suffix)
            yield part, replace(plan, launches=(changed_launch,), unprepared=())
        elif about.precision != problem.precision:
            other = replace(problem, precision=about.precision)
            yield part, algorithm.plan(other, whole_config(name, other, target), target)
        elif all(hasattr(config, key) for key, _ in about.values):
            changed = replace(config, **dict(about.values))
            if changed != config or part == WHOLE:
                yield part, algorithm.plan(problem, changed, target)


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure on this machine's GPU; returns the results file, which is written after each layer."""
    import torch

    from leanconv.runtime import launch
    from leanconv.runtime.threads import side_by_side

    device = launch.open_device(0)
    every = [plan for p in PART_LAYERS.values() for name in TAKEN_APART for _, plan in plans(name, p, device.target)]
    side_by_side([partial(device.compiled, plan) for plan in every])
    meter, says = open_meter()
    about = machine.describe(True, None, {"torch": torch.__version__}, revision)
    words = {name: format_problem(problem) for name, problem in ENERGY_LAYERS.items()}
    record: dict[str, Any] = {"machine": about, "meter": says, "idle_watts": _rounded(idle(meter, 0.6))}
    record |= {"problems": words, "parts": [], "energy": []}
    path = results / machine.slug(about) / "tensor-ablation.json"
    for layer, problem in ENERGY_LAYERS.items():
        record["energy"] += [{"problem": layer, **row} for row in engine_rows(problem, meter)]
        columns.write(path, record)
    for layer, problem in PART_LAYERS.items():
        for name in TAKEN_APART:
            record["parts"] += [{"problem": layer, **row} for row in part_rows(name, problem, device, meter)]
            columns.write(path, record)
    if lacking := missing(record, device.target):
        raise RuntimeError(f"{path} lacks {'; '.join(lacking)}")
    return path


def missing(record: dict[str, Any], target: Target) -> list[str]:
    """Rows that a record lacks, of all that can run on ``target``."""
    have: set[tuple[str, ...]] = {(row["problem"], row["algorithm"], row["part"]) for row in record["parts"]}
    have |= {(row["problem"], row["engine"]) for row in record["energy"]}
    wanted: list[tuple[str, ...]] = []
    for layer, problem in PART_LAYERS.items():
        wanted += [(layer, name, part) for name in TAKEN_APART for part, _ in plans(name, problem, target)]
    for layer, problem in ENERGY_LAYERS.items():
        wanted += [(layer, label) for label, asked, name in _own_engines(problem) if not _unable(name, asked, target)]
        wanted += [(layer, label) for label in PEER_ENGINES.values()]
    return [", ".join(each) for each in wanted if each not in have]


def _own_engines(problem: ConvProblem) -> Iterator[tuple[str, ConvProblem, str]]:
    """Our engines: label, the problem in the precision that is asked for, algorithm."""
    for precision, names in OWN_ENGINES.items():
        for name in names:
            yield f"{name}, {precision}", replace(problem, precision=precision), name


def _unable(name: str, problem: ConvProblem, target: Target) -> list[str]:
    return _algorithm(name).reasons(problem, target)


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def _figures(work: Work) -> dict[str, Any]:
    return {"sustained_us": round(work.us, 3), "watts": _rounded(work.watts), "mhz": _rounded(work.mhz, 0)}


def part_rows(name: str, problem: ConvProblem, device: Any, meter: Meter | None) -> Iterator[dict[str, Any]]:
    """Rows of an algorithm on a layer, whose filters are prepared before: burst, sustained, error where it has one."""
    import torch

    from leanconv.bench.operands import Check, Operands, poison
    from leanconv.runtime.timing import time_gpu

    operands = Operands(problem, True)
    check, y = Check(operands), operands.output("NHWC")
    for part, plan in plans(name, problem, device.target):
        prepared = torch.zeros(plan.prepared_bytes, dtype=torch.uint8, device="cuda")
        given = {"x": operands.x("NHWC"), "w": operands.w("NHWC"), "y": y, "prepared": prepared}
        at = {"bias": 0, **{role: tensor.data_ptr() for role, tensor in given.items()}}
        compiled = device.compiled(plan)
        once = device.executable(plan, plan.roles)
        poison(y)
        once(0, [at[role] for role in plan.roles])
        error = check.error(y, "NHWC") if PARTS[part].right else None
        alone = Plan(plan.launches)
        run = partial(device.executable(alone, alone.roles), 0, [at[role] for role in alone.roles])
        torch.cuda.synchronize()
        time.sleep(REST_S)
        burst = time_gpu(run, budget_s=BURST_S, min_runs=5, max_runs=9)
        yield {
            "algorithm": name, "part": part, "us": round(burst.median_us, 3),
            **_figures(at_work(run, meter, warm_s=WARM_S, run_s=PART_S)),
            "error": error, "registers": compiled[-1].registers, "spill_bytes": compiled[-1].spill_bytes,
        }  # fmt: skip


def engine_rows(problem: ConvProblem, meter: Meter | None) -> Iterator[dict[str, Any]]:
    """Rows of a layer: whole calls of our algorithms, preparation included, then PyTorch's."""
    import torch

    from leanconv.bench.operands import Check, Operands
    from leanconv.bench.peers.base import Unable
    from leanconv.bench.peers.own import LeanconvPeer
    from leanconv.bench.peers.torch_peer import TorchPeer

    operands = Operands(problem, True)
    check = Check(operands)
    found = [
        (label, "leanconv", LeanconvPeer((name,)).candidates(asked, operands, True))
        for label, asked, name in _own_engines(problem)
    ]
    found += [
        (label, engine, TorchPeer().candidates(problem, operands, True)) for engine, label in PEER_ENGINES.items()
    ]
    for label, engine, candidates in found:
        for each in candidates:
            if isinstance(each, Unable) or each.engine != engine:
                continue
            with each.scope():
                error = check.error(each.call(), each.layout)
                torch.cuda.synchronize()
                work = at_work(each.call, meter, warm_s=WARM_S, run_s=ENGINE_S)
            yield {"engine": label, "algorithm": each.algorithm, **_figures(work), "error": error}
            break


def tflops(record: dict[str, Any], row: dict[str, Any], field: str = "sustained_us") -> float:
    """Operations of the direct convolution in 10¹² a second."""
    return float(parse_problem(record["problems"][row["problem"]]).flops / row[field] * 1e-6)


def picojoules(record: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Energy of an operation of the direct convolution: watts are picojoules of 10¹² operations a second."""
    return None if row["watts"] is None else row["watts"] / tflops(record, row)


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}".replace("e-0", "e-")


def part_table(record: dict[str, Any], algorithm: str) -> Table:
    """An algorithm without its parts: TFLOP/s burst and sustained, that over the whole kernel's, power, error."""
    layers = list(dict.fromkeys(row["problem"] for row in record["parts"]))
    lines = []
    for part, about in PARTS.items():
        rows = {r["problem"]: r for r in record["parts"] if (r["algorithm"], r["part"]) == (algorithm, part)}
        whole = {r["problem"]: r for r in record["parts"] if (r["algorithm"], r["part"]) == (algorithm, WHOLE)}
        if not rows:
            continue
        cells = []
        for layer in layers:
            row = rows.get(layer)
            if row is None:
                cells += ["–"] * 3
                continue
            ratio = whole[layer]["sustained_us"] / row["sustained_us"]
            cells.append(f"{tflops(record, row, 'us'):.0f} / {tflops(record, row):.0f}")
            cells += [f"{ratio:.2f}", "–" if row["watts"] is None else f"{row['watts']:.0f} W, {row['mhz']:.0f} MHz"]
        errors = {_error(row["error"]) for row in list(rows.values())[:1]}
        lines.append([part, about.says, *cells, *errors])
    heads = [head for layer in layers for head in (f"{layer}: burst / sustained", "×", "power, clock")]
    return ["", "what is left out", *heads, "error"], lines


def energy_table(record: dict[str, Any], layer: str) -> Table:
    """The engines on a layer: speed, power, energy of a call and of an operation, error; the least energy first."""
    rows = [row for row in record["energy"] if row["problem"] == layer]
    rows.sort(key=lambda row: picojoules(record, row) or row["sustained_us"])
    lines = []
    for row in rows:
        picojoule = picojoules(record, row)
        power = ["–"] * 4
        if picojoule is not None:
            joules = f"{row['watts'] * row['sustained_us'] * 1e-6:.3f}"
            power = [f"{row['watts']:.0f}", f"{row['mhz']:.0f}", joules, f"{picojoule:.2f}"]
        lines.append([row["engine"], f"{tflops(record, row):.0f}", *power, _error(row["error"])])
    return ["engine", "TFLOP/s", "W", "MHz", "J a call", "pJ a flop", "error"], lines


def _range(values: Sequence[float], digits: int = 2) -> str:
    """The least and the largest, or one number where they look alike."""
    few = list(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))
    return " to ".join(few)


def findings(record: dict[str, Any]) -> str:
    """What the tables of the parts say, in words: factors between single launches, at the clock of a rested card."""
    rows = {(r["algorithm"], r["problem"], r["part"]): r for r in record["parts"]}
    layers = list(dict.fromkeys(row["problem"] for row in record["parts"]))

    def factors(part: str, of: str = WHOLE, names: Sequence[str] = TAKEN_APART, only: Sequence[str] = ()) -> str:
        return _range(
            [rows[name, layer, of]["us"] / rows[name, layer, part]["us"] for name in names for layer in only or layers]
        )

    def errors(algorithm: str) -> str:
        return " and ".join(
            f"{rows[algorithm, layer, 'sums in the tensor core']['error'] / rows[algorithm, layer, WHOLE]['error']:.0f}"
            for layer in layers
        )

    alone = [tflops(record, rows[name, layers[0], "products alone"], "us") for name in TAKEN_APART]
    rest = [1 - 1 / (rows[n, layers[0], WHOLE]["us"] / rows[n, layers[0], "products alone"]["us"]) for n in TAKEN_APART]
    by_layer = ", ".join(f"{factors('one product', only=(layer,))} on {layer}" for layer in layers)
    shares = " and ".join(f"{100 * share:.0f} %" for share in rest)
    copies = " and ".join(factors("no copies", names=(name,)) for name in TAKEN_APART)
    lines = [
        f"**Products.** With one instead of three it is {by_layer} times as fast, not three times: loads and splitting "
        "stay.",
        f"**Splitting** takes a factor of {factors('no splitting')}, of which the search for the largest value is "
        f"{factors('one scale')}. On this data one scale would be as exact; on pixels of 10⁻⁷ it has an error above "
        "10⁻⁴, with the search 2·10⁻⁷.",
        f"**Sums of partial sums** take a factor of {factors('sums in the tensor core', 'one scale')}. Left in the "
        f"tensor core, sums on these layers have {errors('tensor_gemm')} times the error (`tensor_gemm`) and "
        f"{errors('tensor_winograd')} times (`tensor_winograd`).",
        f"**Copies** take a factor of {copies}. At work it seems more: stages that nobody fills hold the same numbers "
        "all the time, so the card draws less power, and its clock rises.",
        f"**Products alone** reach {' and '.join(f'{speed:.0f}' for speed in alone)} TFLOP/s on {layers[0]}: all else "
        f"takes {shares} of the time.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def parts_section(record: dict[str, Any]) -> str:
    """A table for each algorithm, and what they say."""
    layers = dict.fromkeys(row["problem"] for row in record["parts"])
    words = "; ".join(f"{layer}: `{record['problems'][layer]}`" for layer in layers)
    said = (
        f"{records.origin(record['machine'])}. {words}. TFLOP/s of the direct convolution with filters prepared "
        "before, single launches (burst) and at work; × is the speed at work over that of the whole kernel."
    )
    tables = (f"`{name}`:\n\n{records.table(part_table(record, name))}" for name in TAKEN_APART)
    return "\n\n".join([said, *tables, "Factors between single launches:", findings(record)])


def _saved(record: dict[str, Any]) -> str:
    """The energy of precision fp32 beside PyTorch's, in words."""
    ratios: dict[str, list[float]] = {"strict FP32": [], "TF32": []}
    layers = dict.fromkeys(row["problem"] for row in record["energy"])
    for layer in layers:
        of = {row["engine"]: picojoules(record, row) or 0.0 for row in record["energy"] if row["problem"] == layer}
        own = min(value for name, value in of.items() if name.endswith(", fp32"))
        for kind, each in ratios.items():
            each.append(own / min(value for name, value in of.items() if name.startswith(f"PyTorch, {kind}")))
    return (
        f"The best of precision fp32 takes {_range(ratios['strict FP32'])} of the energy of PyTorch's strict FP32, and "
        f"{_range(ratios['TF32'])} times that of its TF32, which keeps three digits less."
    )


def energy_section(record: dict[str, Any]) -> str:
    """A table for each layer."""
    rest = "" if record["idle_watts"] is None else f" The card draws {record['idle_watts']:.0f} W with nothing to do."
    said = f"{records.origin(record['machine'])}. Power by {record['meter']}, at work.{rest}"
    first = {row["engine"]: picojoules(record, row) for row in record["energy"]}
    if all(value is not None for value in first.values()):
        said += f"\n\n{_saved(record)}"
    layers = dict.fromkeys(row["problem"] for row in record["energy"])
    tables = (f"{layer}:\n\n{records.table(energy_table(record, layer))}" for layer in layers)
    return "\n\n".join([said, *tables])


_OWN, _PEER, _PALE, _NOTHING = "#b2182b", "#8c8c8c", "#f4a582", "#eeeeee"


def _bars(axis: Any, title: str, names: Sequence[str], lengths: Sequence[float], colours: Sequence[str]) -> None:
    """Horizontal bars, the first on top, each with its figure."""
    places = range(len(names) - 1, -1, -1)
    axis.barh(places, lengths, 0.72, color=colours, edgecolor=INK, linewidth=0.35, zorder=2)
    for place, length in zip(places, lengths, strict=True):
        axis.annotate(
            f"{length:.2f}" if length < 10 else f"{length:.0f}", (length, place), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=7.5, color=INK,
        )  # fmt: skip
    tidy(axis, title, grid="x", hidden=("top", "right", "left"))
    axis.set_yticks(places, names, fontsize=8, color=INK)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.12)


def draw_parts(record: dict[str, Any], path: Path) -> None:
    """Sustained speed whole and without each part; pale where the result means nothing."""
    layers = list(dict.fromkeys(row["problem"] for row in record["parts"]))
    figure, axes = panels(len(layers), len(TAKEN_APART), (10.5, 2.9 * len(layers) + 0.4))
    for axis, (layer, algorithm) in zip(axes, product(layers, TAKEN_APART), strict=True):
        rows = [r for r in record["parts"] if (r["problem"], r["algorithm"]) == (layer, algorithm)]
        right = [_PALE if PARTS[row["part"]].right else _NOTHING for row in rows]
        colours = [_OWN if row["part"] == WHOLE else pale for row, pale in zip(rows, right, strict=True)]
        names, speeds = [row["part"] for row in rows], [tflops(record, row) for row in rows]
        _bars(axis, f"{algorithm}, {layer}", names, speeds, colours)
        axis.set_xlabel("TFLOP/s, sustained", fontsize=8, color=INK)
    words = "tensor-core kernels without one part on {gpu} (grey: the result means nothing)"
    finish(figure, path, words.format(**record["machine"]))


def draw_energy(record: dict[str, Any], path: Path) -> None:
    """Energy of an operation by engine, or the time where no meter told."""
    layers = list(dict.fromkeys(row["problem"] for row in record["energy"]))
    figure, axes = panels(1, len(layers), (10.5, 3.0))
    for axis, layer in zip(axes, layers, strict=True):
        rows = [row for row in record["energy"] if row["problem"] == layer]
        values = [value for row in rows if (value := picojoules(record, row)) is not None]
        told = len(values) == len(rows)
        names = [row["engine"] for row in rows]
        colours = [_PEER if n.startswith("PyTorch") else _OWN if n.endswith("fp32") else _PALE for n in names]
        _bars(axis, layer, names, values if told else [row["sustained_us"] for row in rows], colours)
        words = "pJ an operation" if told else "µs a call: no meter told the energy"
        axis.set_xlabel(words, fontsize=8, color=INK)
    words = "energy at work on {gpu}: dark precision fp32, pale precision tf32, grey PyTorch"
    finish(figure, path, words.format(**record["machine"]))
