"""Whole networks in each arithmetic that people run, with leanconv's convolutions and without.

``python -m report modes`` needs a GPU, PyTorch and torchvision, and writes benchmarks/results/<machine>/modes.json: a
row for each network, mode and kind of pass. PyTorch runs in both layouts; leanconv channels last, and also channels
first where PyTorch is quicker so. Of each side the quicker layout counts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, isnan
from pathlib import Path
from typing import Any

from leanconv.bench.format import significant
from leanconv.bench.peers.torch_peer import arithmetic
from leanconv.options import Precision
from report import records
from report.energy import Work, at_work, open_meter
from report.timed import captured, eager, in_turn, only

#: Names for `models.build`, and the shape of the input: a batch, channels, of videos frames, height and width.
NETWORKS = {
    "vgg16": (64, 3, 224, 224), "resnet50": (64, 3, 224, 224), "unet": (8, 3, 256, 256), "vae_decoder": (4, 4, 32, 32),
    "edsr": (16, 3, 96, 96), "convnext_tiny": (32, 3, 224, 224), "mobilenet_v3_large": (64, 3, 224, 224),
    "efficientnet_b0": (32, 3, 224, 224), "densenet121": (32, 3, 224, 224), "resnet18": (64, 3, 224, 224),
    "resnext50_32x4d": (32, 3, 224, 224), "inception_v3": (32, 3, 299, 299), "regnet_y_1_6gf": (32, 3, 224, 224),
    "wide_resnet50_2": (32, 3, 224, 224), "efficientnet_v2_s": (32, 3, 224, 224),
    "shufflenet_v2_x1_0": (64, 3, 224, 224), "squeezenet1_1": (64, 3, 224, 224),
    "r3d_18": (8, 3, 16, 112, 112), "mc3_18": (8, 3, 16, 112, 112), "r2plus1d_18": (8, 3, 16, 112, 112),
    "s3d": (8, 3, 16, 224, 224), "mvit_v2_s": (8, 3, 16, 224, 224), "swin3d_t": (4, 3, 16, 224, 224),
}  # fmt: skip
#: Those of videos.
VIDEOS = tuple(name for name, shape in NETWORKS.items() if len(shape) == 5)
#: What PyTorch cannot capture: its forward pass copies an index from the host.
UNCAPTURED = ("mvit_v2_s",)
#: Networks whose training step is measured too.
TRAINED = ("resnet50", "unet", "convnext_tiny", "efficientnet_b0", *VIDEOS)
#: Microseconds of the rounds of training steps. Explored (H200, 3175f511): the host takes 29 to 40 ms to launch a step
#: of ConvNeXt-T in 16 bits, of which the GPU computes 14. So there are many, and PyTorch's step is timed once more.
_STEP_US = 3e7
#: How many images are computed in float64 too, and leanconv's error at most, in PyTorch's: of what was right 5.6.
_EXACT, _MOST_ERROR = 4, 10


@dataclass(frozen=True)
class Mode:
    """What PyTorch may round factors to, and the least precise arithmetic that leanconv may use."""

    title: str
    tf32: bool
    precision: Precision = "fp32"
    half: bool = False


MODES = {
    "fp32": Mode("strict FP32", False),
    "tf32-fp32": Mode("PyTorch in TF32, leanconv's own layers in float32's accuracy", True),
    "tf32": Mode("TF32", True, "tf32"),
    "16-bit": Mode("16 bits", True, half=True),
}
#: by their names what they are
PASSES = {"forward": "forward pass", "training": "training step"}
#: How a network is run, by the name of the times of a row: as a CUDA graph, also tuned, fused, or replayed without a
#: pause, eagerly, under torch.compile; there also with leanconv's backend, beside PyTorch with its own.
WAYS = ("graph", "tuned", "fused", "sustained", "eager", "compile", "backend")
#: Those that can be measured without the others.
ALONE = ("graph", "eager", "tuned", "fused", "sustained", "compile", "backend")
#: Sustained replays: seconds of rest before those of each side, of replays before the meter is read, and while it is.
_REST_S, _WARM_S, _RUN_S = 0.4, 0.4, 0.7
#: Endings of what the meter tells.
_METERED = ("_watts", "_mhz")


def memory_format(x: Any, layout: str) -> Any:
    """What PyTorch calls a layout of images or of videos."""
    import torch

    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return last if layout == "NHWC" else torch.contiguous_format


def _fields(way: str, us: dict[str, float]) -> dict[str, float]:
    """Times as fields of a row: those of each side in its layouts, and in the quicker of them."""
    for side in ("torch", "leanconv"):
        us = us | {side: min(each for who, each in us.items() if who.startswith(side))}
    return {f"{who}_{way}_us": round(each, 1) for who, each in us.items()}


def _peak(call: Callable[[], Any]) -> int:
    """Bytes that the device holds at most during a call, besides what it holds before."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before


def in_layouts(model: Any, x: Any) -> dict[str, tuple[Any, Any]]:
    """Model and input as PyTorch runs them: as they are, channels last, and as copies channels first."""
    import torch

    with torch.inference_mode(False):  # of filters made in inference mode no packed ones are kept
        first = copy.deepcopy(model).to(memory_format=torch.contiguous_format), x.contiguous()
    return dict(zip(("torch_nchw", "torch_nhwc"), (first, (model, x)), strict=True))


def network(name: str, mode: Mode, training: bool) -> tuple[Any, Any]:
    """A network of random weights whose activations are normalised, and an input."""
    import torch

    from report import models

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = models.build(name)
        x = torch.randn(NETWORKS[name])
    form = memory_format(x, "NHWC")
    model, x = model.to(memory_format=form), x.contiguous(memory_format=form)
    for module in model.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)):
            module.momentum = 1.0
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=False):
        model.train()(x[:4])
    if mode.half and not training:
        model, x = model.half(), x.half()
    return model.train(training), x


def step(model: Any, x: Any, mode: Mode) -> Callable[[], Any]:
    """A training step: forward, backward, and an SGD step with momentum; in 16 bits under autocast."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=mode.half):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def error_of(model: Any, x: Any) -> Callable[[Any], float]:
    """What tells how far a network's result is from that in float64, of the first images."""
    exact = copy.deepcopy(model).double()(x[:_EXACT].double())
    return lambda y: significant(float((y[:_EXACT].double() - exact).norm() / exact.norm()))


def measure_forward(
    model: Any, x: Any, mode: Mode, compiled: bool = False, tuned: bool = False, graph: bool = True
) -> dict[str, Any]:
    """Times, errors against float64 and peaks of memory of PyTorch's and of leanconv's forward pass, eagerly and, with
    ``graph``, as CUDA graphs. Eagerly PyTorch's pass is timed once more, as in `measure_step`.

    What tuning finds is kept in LEANCONV_TUNING_DIR; so it comes last, after what is measured without tables.
    """
    import torch

    with torch.inference_mode():
        error = error_of(model, x)
        nets = in_layouts(model, x)
        calls = {who: partial(net, given) for who, (net, given) in nets.items()}
        capture = captured if graph else lambda call: (None, call())
        peaks, graphs, results = dict[str, int](), dict[str, Any](), dict[str, Any]()
        for who, call in calls.items():
            call()
            peaks[who] = _peak(call)
            graphs[who], results[who] = capture(call)
        alone: dict[str, Any] = {who: each.replay for who, each in graphs.items()} if graph else dict(calls)
        theirs = min(alone, key=in_turn(alone).__getitem__)
        compiled_graphs = {"torch": _compiled_graph(model, x)} if compiled else {}
        lines, errors = dict[str, list[Any]](), dict[str, float]()
        with ExitStack() as enabled:
            patches, waited = _enabled(enabled, nets, ("torch_nhwc", theirs), mode, calls)
            us = _fields("eager", eager(calls | {"again": calls[theirs]}, patches))
            for ours, taken in patches.items():
                only(taken)
                call = calls[ours]
                peaks[ours] = _peak(call)
                errors[ours] = error(call())
                lines[ours] = []
                graphs[ours], results[ours] = capture(partial(_counted, call, taken, lines[ours]))
                if compiled and ours == "leanconv_nhwc":
                    compiled_graphs["leanconv"] = _compiled_graph(model, x)
            packed = {ours: taken.report().packed_bytes for ours, taken in patches.items()}
        us |= _replays("graph", graphs) if graph else {}
        if compiled:
            us |= _replays("compile", compiled_graphs) | _backend(model, x, mode, compiled_graphs["torch"])
        best = {side: _quicker(us, side, "graph" if graph else "eager") for side in ("torch", "leanconv")}
        found: dict[str, Any] = {"quicker": best["torch"][6:].upper(), "ours": best["leanconv"][9:].upper()}
        found["again"] = theirs[6:].upper()
        for side, kept in best.items():
            if graph:
                graphs[kept].replay()
            found |= {f"{side}_error": error(results[kept]), f"{side}_peak_bytes": peaks[kept]}
        # where Python launches each kernel some are others
        found["leanconv_eager_error"] = _most(errors.values())
        if graph:
            found |= _fused(nets, ("torch_nhwc", theirs), mode, graphs[best["torch"]], error)
        if tuned:
            net, given = nets[best["leanconv"].replace("leanconv", "torch")]
            us |= _tuned(net, given, mode, graphs[best["torch"]], error)
    counts = _taken(lines[best["leanconv"]]) | {"packed_bytes": packed[best["leanconv"]]}
    return us | counts | found | {"warm_up_s": round(waited, 1)}


def _enabled(
    during: ExitStack, nets: Mapping[str, tuple[Any, Any]], layouts: Iterable[str], mode: Mode, calls: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Patches of PyTorch's networks in these layouts, by what they are called as leanconv's, whose calls are added; and
    for how many seconds the first one's kernels were compiled. The last one that is enabled decides."""
    import torch

    import leanconv.torch

    patches, waited = dict[str, Any](), 0.0
    for layout in dict.fromkeys(layouts):
        net, given = nets[layout]
        ours = layout.replace("torch", "leanconv")
        patches[ours] = during.enter_context(leanconv.torch.enable(net, precision=mode.precision))
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=mode.half and net.training):
            leanconv.torch.warm_up(net, given, progress=False)
        waited = waited or time.perf_counter() - begin
        calls[ours] = calls[layout]
    return patches, waited


def _counted(call: Callable[[], Any], patch: Any, lines: list[Any]) -> Any:
    """A call; ``lines`` are then those of the patch's report that it is counted in."""
    before = {id(line): line.calls for line in patch.report().lines}
    result = call()
    lines[:] = [line for line in patch.report().lines if line.calls > before.get(id(line), 0)]
    return result


def _taken(lines: Sequence[Any]) -> dict[str, int]:
    """How many of these lines of a report ran on leanconv, and how many were left."""
    left = [line.runs for line in lines].count("PyTorch")
    return {"taken": len(lines) - left, "left": left}


def _fused(
    nets: Mapping[str, tuple[Any, Any]], layouts: Iterable[str], mode: Mode, theirs: Any, error: Callable[[Any], float]
) -> dict[str, float]:
    """Times of PyTorch's graph and of fused networks' in these layouts, and the largest error of the latter."""
    import torch

    import leanconv.torch

    # NOTE: fused networks are kept until the graphs have run: these read their filters
    graphs, whole, errors = {"torch": theirs}, dict[str, Any](), list[float]()
    for layout in dict.fromkeys(layouts):
        net, given = nets[layout]
        ours = layout.replace("torch", "leanconv")
        with torch.inference_mode(False):
            whole[ours] = leanconv.torch.fuse(net, precision=mode.precision)
        errors.append(error(whole[ours](given)))
        graphs[ours] = captured(partial(whole[ours], given))[0]
    return _replays("fused", graphs) | {"leanconv_fused_error": _most(errors)}


def _tuned(net: Any, given: Any, mode: Mode, theirs: Any, error: Callable[[Any], float]) -> dict[str, float]:
    """Times of PyTorch's graph and of a tuned network's, and the latter's error."""
    import leanconv.torch

    with leanconv.torch.enable(net, precision=mode.precision, tune=given):
        ours, result = captured(partial(net, given))
        found = _replays("tuned", {"torch": theirs, "leanconv": ours})
    return found | {"leanconv_tuned_error": error(result)}


def _backend(model: Any, x: Any, mode: Mode, theirs: Any) -> dict[str, float]:
    """Times of inductor's graph and of that of leanconv's backend."""
    import leanconv.torch

    ours = _compiled_graph(model, x, backend=leanconv.torch.fused, options={"precision": mode.precision})
    return _replays("backend", {"torch": theirs, "leanconv": ours})


def measure_way(model: Any, x: Any, mode: Mode, way: str, quicker: str, ours: str) -> dict[str, Any]:
    """Times of PyTorch's and of leanconv's forward pass in one way of `ALONE`. ``quicker``, ``ours``: the layouts in
    which PyTorch and leanconv are quicker."""
    import torch

    import leanconv.torch

    layouts = "torch_nhwc", f"torch_{quicker.lower()}"
    with torch.inference_mode(), ExitStack() as enabled:
        if way == "backend":
            return _backend(model, x, mode, _compiled_graph(model, x))
        if way == "compile":
            graphs = {"torch": _compiled_graph(model, x)}
            enabled.enter_context(leanconv.torch.enable(model, precision=mode.precision))
            return _replays("compile", graphs | {"leanconv": _compiled_graph(model, x)})
        nets, error = in_layouts(model, x), error_of(model, x)
        calls = {who: partial(net, given) for who, (net, given) in nets.items()}
        if way == "fused":
            return _fused(nets, layouts, mode, captured(calls[layouts[1]])[0], error)
        if way == "tuned":
            return _tuned(*nets[f"torch_{ours.lower()}"], mode, captured(calls[layouts[1]])[0], error)
        if way == "sustained":
            graphs = {"torch": captured(calls[layouts[1]])[0]}
            net, given = nets[f"torch_{ours.lower()}"]
            with torch.inference_mode(False):
                whole: Any = leanconv.torch.fuse(net, precision=mode.precision)
            graphs["fused"], fused = captured(partial(whole, given))
            _enabled(enabled, nets, (f"torch_{ours.lower()}",), mode, calls)
            graphs["leanconv"], result = captured(partial(net, given))
            return _sustained(graphs) | {"leanconv_sustained_error": _most((error(result), error(fused)))}
        graphs = {who: captured(calls[who])[0] for who in dict.fromkeys(layouts)} if way == "graph" else {}
        patches, _ = _enabled(enabled, nets, layouts, mode, calls)
        if way == "graph":
            return _graph(graphs, patches, calls, error)
        us, errors = _fields("eager", eager(calls, patches)), list[float]()
        for ours, taken in patches.items():
            only(taken)
            errors.append(error(calls[ours]()))
        return us | {"leanconv_eager_error": _most(errors)}


def _graph(
    graphs: dict[str, Any], patches: Mapping[str, Any], calls: Mapping[str, Any], error: Callable[[Any], float]
) -> dict[str, Any]:
    """Times of PyTorch's ``graphs`` and of leanconv's, whose quicker one's error and numbers of layers are told."""
    results, lines = dict[str, Any](), dict[str, list[Any]]()
    for ours, patch in patches.items():
        only(patch)
        lines[ours] = []
        graphs[ours], results[ours] = captured(partial(_counted, calls[ours], patch, lines[ours]))
    us = _replays("graph", graphs)
    best = _quicker(us, "leanconv", "graph")
    graphs[best].replay()
    return us | _taken(lines[best]) | {"ours": best[9:].upper(), "leanconv_error": error(results[best])}


def _sustained(
    graphs: Mapping[str, Any], rest_s: float = _REST_S, warm_s: float = _WARM_S, run_s: float = _RUN_S
) -> dict[str, float]:
    """Microseconds of each graph's replay while replays follow one another, and the card's watts and MHz meanwhile
    where it tells: means of two turns, of which the second goes backward, each after a rest."""
    meter, said = open_meter()
    print(f"meter: {said}", flush=True)
    works: dict[str, list[Work]] = {who: [] for who in graphs}
    for who in (*graphs, *list(graphs)[::-1]):
        time.sleep(rest_s)
        works[who].append(at_work(graphs[who].replay, meter, warm_s=warm_s, run_s=run_s))
    found = dict[str, float]()
    for who, turns in works.items():
        found[f"{who}_sustained_us"] = round(sum(each.us for each in turns) / len(turns), 1)
        for unit, told in (("watts", [each.watts for each in turns]), ("mhz", [each.mhz for each in turns])):
            if known := [each for each in told if each is not None]:
                found[f"{who}_{unit}"] = round(sum(known) / len(known))
    return found


def _quicker(us: dict[str, float], side: str, way: str) -> str:
    """A side in the layout in which it took least."""
    return min((f"{side}_{layout}" for layout in ("nhwc", "nchw")), key=lambda who: us.get(f"{who}_{way}_us", inf))


def _replays(way: str, graphs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each graph's replay, as fields of a row."""
    return _fields(way, in_turn({who: graph.replay for who, graph in graphs.items()}))


def _compiled_graph(model: Any, x: Any, **options: Any) -> Any:
    import torch

    torch._dynamo.reset()
    call = partial(torch.compile(model, **options), x)
    call()
    return captured(call)[0]


def measure_step(model: Any, x: Any, mode: Mode, graph: bool = True) -> dict[str, Any]:
    """Times and peaks of memory of a training step, in turn without leanconv and with it: eagerly, and, with ``graph``,
    as CUDA graphs. Eagerly PyTorch's step is timed once more ("again"), which tells how far equal steps differ."""
    nets = in_layouts(model, x)
    calls = {who: step(net, given, mode) for who, (net, given) in nets.items()}
    for call in calls.values():
        call()
    peaks = {who: _peak(call) for who, call in calls.items()}
    theirs = min(calls, key=in_turn(calls).__getitem__)
    graphs = {who: captured(call)[0] for who, call in calls.items()} if graph else {}
    lines = dict[str, list[Any]]()
    with ExitStack() as enabled:
        patches, _ = _enabled(enabled, nets, nets, mode, calls)  # which is quicker may depend on the host
        us = _fields("eager", eager(calls | {"again": calls[theirs]}, patches, _STEP_US))
        for ours, patch in patches.items():
            only(patch)
            peaks[ours], lines[ours], once = _peak(calls[ours]), [], partial(_counted, calls[ours], patch)
            if graph:
                graphs[ours] = captured(partial(once, lines[ours]))[0]
            else:
                once(lines[ours])
    us |= _replays("graph", graphs) if graph else {}
    best = {side: _quicker(us, side, "graph" if graph else "eager") for side in ("torch", "leanconv")}
    return (
        us
        | _taken(lines[best["leanconv"]])
        | {"again": theirs[6:].upper()}
        | {f"{side}_peak_bytes": peaks[who] for side, who in best.items()}
    )


def measure(
    results: Path, revision: str | None, names: Sequence[str], modes: Sequence[str], passes: Sequence[str],
    seconds: float | None, compiled: bool, tuned: bool, way: str = "",
) -> Path:  # fmt: skip
    """Measure on this machine's GPU what the results file does not have of this revision; other rows stay.

    ``way``: one of `ALONE`; of forward passes that the file has, its times alone, which then have a revision and a date
    of their own. Of training steps too, if they are launched by Python.

    Raises WrongResultError at the end where a result was wrong, of which the file has no row, or with ``way`` the row
    that it had.
    """
    import torch

    from leanconv.tuning.search import WrongResultError

    about = records.with_torch(revision)
    path, rows = records.begun(results, "modes", about)
    begin, wrong = time.monotonic(), list[str]()
    for kind, key, name in product(passes, modes, names):
        mine, mode = {"network": name, "mode": key, "pass": kind}, MODES[key]
        old = next((row for row in rows if mine.items() <= row.items()), None)
        known = old is not None and about["git_revision"] in (old["revision"], way and old.get(f"{way}_revision"))
        missing = old is not None and bool(way) and f"leanconv_{way}_us" not in old
        if (known and not missing) or (kind != "forward" and name not in TRAINED):
            continue
        graph = name not in UNCAPTURED
        if way and (old is None or (way != "eager" and not (graph and kind == "forward"))):
            continue
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        started = time.monotonic()
        with arithmetic(mode.tf32):
            model, x = network(name, mode, kind != "forward")
            forward = partial(measure_forward, compiled=compiled and graph, tuned=tuned and graph, graph=graph)
            if kind != "forward":
                found = measure_step(model, x, mode, graph=graph and not way)
                found = {name: each for name, each in found.items() if not way or "eager" in name or name == "again"}
            elif way and old is not None:
                found = measure_way(model, x, mode, way, old["quicker"], old.get("ours", "NHWC"))
            else:
                found = forward(model, x, mode)
        took = {"seconds": round(time.monotonic() - started, 1)}
        when = {"revision": about["git_revision"], "date": about["date"]}
        row = {**mine, "batch": len(x), **found, **took, **when}
        if way and old is not None:
            # a meter's readings of the times before are not of these
            rest = {name: each for name, each in old.items() if way != "sustained" or not name.endswith(_METERED)}
            row = rest | found | {f"{way}_{name}": each for name, each in when.items()}
        print(f"{time.monotonic() - begin:.0f} s: {row}", flush=True)
        del model, x
        torch.cuda.empty_cache()
        kept = [row] if is_right(row) else [old] if way and old is not None else []
        rows = [row for row in rows if row is not old] + kept
        rows.sort(key=_place)
        records.write(results, "modes", about, rows)
        if not is_right(row):
            most = _most(_errors(row).values())
            wrong.append(f"{name}, {key}: error {most:.1e}, PyTorch's {row['torch_error']:.1e}")
    if wrong:
        raise WrongResultError("\n".join(wrong))
    return path


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether leanconv's results were about as exact as PyTorch's; of training steps nobody knows."""
    return all(bool(each <= _MOST_ERROR * row["torch_error"]) for each in _errors(row).values())


def _most(errors: Iterable[float]) -> float:
    """The largest error; what is no number is larger than any."""
    return max(errors, key=lambda each: (isnan(each), each))


def _errors(row: Mapping[str, Any]) -> dict[str, float]:
    """leanconv's errors by the way in which it was run."""
    return {name: each for name, each in row.items() if name.startswith("leanconv") and name.endswith("_error")}


def _place(row: dict[str, Any]) -> tuple[bool, int, int]:
    return row["pass"] != "forward", list(NETWORKS).index(row["network"]), list(MODES).index(row["mode"])
