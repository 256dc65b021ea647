"""A network's forward pass by PyTorch's convolutions and by leanconv's: times, errors against float64, memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from leanconv.bench.format import significant
from report import networks
from report.energy import Work, at_work, open_meter
from report.networks import Mode
from report.timed import captured, eager, in_turn, only

#: How many images are computed in float64 too.
_EXACT = 4
#: Sustained replays: seconds of rest before those of each side, of replays before the meter is read, and while it is.
_REST_S, _WARM_S, _RUN_S = 0.4, 0.4, 0.7
#: Endings of what the meter tells.
METERED = ("_watts", "_mhz")


def error_of(model: Any, x: Any) -> Callable[[Any], float]:
    """What tells how far a network's result is from that in float64, of the first images."""
    exact = copy.deepcopy(model).double()(x[:_EXACT].double())
    return lambda y: significant(float((y[:_EXACT].double() - exact).norm() / exact.norm()))


def measure_forward(
    model: Any, x: Any, mode: Mode, compiled: bool = False, tuned: bool = False, graph: bool = True
) -> dict[str, Any]:
    """Times, errors against float64 and peaks of memory of PyTorch's and of leanconv's forward pass, eagerly and, with
    ``graph``, as CUDA graphs. Eagerly PyTorch's pass is timed once more, as in `report.training_steps.measure_step`.

    What tuning finds is kept in LEANCONV_TUNING_DIR; so it comes last, after what is measured without tables.
    """
    import torch

    with torch.inference_mode():
        error = error_of(model, x)
        nets = networks.in_layouts(model, x)
        calls = {who: partial(net, given) for who, (net, given) in nets.items()}
        capture = captured if graph else lambda call: (None, call())
        peaks, graphs, results = dict[str, int](), dict[str, Any](), dict[str, Any]()
        for who, call in calls.items():
            call()
            peaks[who] = networks.peak_bytes(call)
            graphs[who], results[who] = capture(call)
        alone: dict[str, Any] = {who: each.replay for who, each in graphs.items()} if graph else dict(calls)
        theirs = min(alone, key=in_turn(alone).__getitem__)
        compiled_graphs = {"torch": networks.compiled_graph(model, x)} if compiled else {}
        lines, errors = dict[str, list[Any]](), dict[str, float]()
        with ExitStack() as enabled:
            patches, waited = networks.enabled(enabled, nets, ("torch_nhwc", theirs), mode)
            calls = networks.with_ours(calls, patches)
            us = networks.as_fields("eager", eager(calls | {"again": calls[theirs]}, patches))
            for ours, taken in patches.items():
                only(taken)
                call = calls[ours]
                peaks[ours] = networks.peak_bytes(call)
                errors[ours] = error(call())
                lines[ours] = []
                graphs[ours], results[ours] = capture(partial(networks.counted, call, taken, lines[ours]))
                if compiled and ours == "leanconv_nhwc":
                    compiled_graphs["leanconv"] = networks.compiled_graph(model, x)
            packed = {ours: taken.report().packed_bytes for ours, taken in patches.items()}
        us |= networks.replays("graph", graphs) if graph else {}
        if compiled:
            us |= networks.replays("compile", compiled_graphs) | _backend(model, x, mode, compiled_graphs["torch"])
        best = {side: networks.quicker(us, side, "graph" if graph else "eager") for side in ("torch", "leanconv")}
        found: dict[str, Any] = {"quicker": best["torch"][6:].upper(), "ours": best["leanconv"][9:].upper()}
        found["again"] = theirs[6:].upper()
        for side, kept in best.items():
            if graph:
                graphs[kept].replay()
            found |= {f"{side}_error": error(results[kept]), f"{side}_peak_bytes": peaks[kept]}
        # where Python launches each kernel some are others
        found["leanconv_eager_error"] = networks.largest(errors.values())
        if graph:
            found |= _fused(nets, ("torch_nhwc", theirs), mode, graphs[best["torch"]], error)
        if tuned:
            net, given = nets[best["leanconv"].replace("leanconv", "torch")]
            us |= _tuned(net, given, mode, graphs[best["torch"]], error)
    counts = networks.taken(lines[best["leanconv"]]) | {"packed_bytes": packed[best["leanconv"]]}
    return us | counts | found | {"warm_up_s": round(waited, 1)}


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
    return networks.replays("fused", graphs) | {"leanconv_fused_error": networks.largest(errors)}


def _tuned(net: Any, given: Any, mode: Mode, theirs: Any, error: Callable[[Any], float]) -> dict[str, float]:
    """Times of PyTorch's graph and of a tuned network's, and the latter's error."""
    import leanconv.torch

    with leanconv.torch.enable(net, precision=mode.precision, tune=given):
        ours, result = captured(partial(net, given))
        found = networks.replays("tuned", {"torch": theirs, "leanconv": ours})
    return found | {"leanconv_tuned_error": error(result)}


def _backend(model: Any, x: Any, mode: Mode, theirs: Any) -> dict[str, float]:
    """Times of inductor's graph and of that of leanconv's backend."""
    import leanconv.torch

    ours = networks.compiled_graph(model, x, backend=leanconv.torch.fused, options={"precision": mode.precision})
    return networks.replays("backend", {"torch": theirs, "leanconv": ours})


def measure_way(model: Any, x: Any, mode: Mode, way: str, quicker: str, ours: str) -> dict[str, Any]:
    """Times of PyTorch's and of leanconv's forward pass in one way of `networks.WAYS`. ``quicker``, ``ours``: the
    layouts in which PyTorch and leanconv are quicker."""
    import torch

    import leanconv.torch

    layouts = "torch_nhwc", f"torch_{quicker.lower()}"
    with torch.inference_mode(), ExitStack() as enabled:
        if way == "backend":
            return _backend(model, x, mode, networks.compiled_graph(model, x))
        if way == "compile":
            graphs = {"torch": networks.compiled_graph(model, x)}
            enabled.enter_context(leanconv.torch.enable(model, precision=mode.precision))
            return networks.replays("compile", graphs | {"leanconv": networks.compiled_graph(model, x)})
        nets, error = networks.in_layouts(model, x), error_of(model, x)
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
            networks.enabled(enabled, nets, (f"torch_{ours.lower()}",), mode)
            graphs["leanconv"], result = captured(partial(net, given))
            return _sustained(graphs) | {"leanconv_sustained_error": networks.largest((error(result), error(fused)))}
        graphs = {who: captured(calls[who])[0] for who in dict.fromkeys(layouts)} if way == "graph" else {}
        patches, _ = networks.enabled(enabled, nets, layouts, mode)
        calls = networks.with_ours(calls, patches)
        if way == "graph":
            return _graph(graphs, patches, calls, error)
        us, errors = networks.as_fields("eager", eager(calls, patches)), list[float]()
        for ours, taken in patches.items():
            only(taken)
            errors.append(error(calls[ours]()))
        return us | {"leanconv_eager_error": networks.largest(errors)}


def _graph(
    graphs: dict[str, Any], patches: Mapping[str, Any], calls: Mapping[str, Any], error: Callable[[Any], float]
) -> dict[str, Any]:
    """Times of PyTorch's ``graphs`` and of leanconv's, whose quicker one's error and numbers of layers are told."""
    results, lines = dict[str, Any](), dict[str, list[Any]]()
    for ours, patch in patches.items():
        only(patch)
        lines[ours] = []
        graphs[ours], results[ours] = captured(partial(networks.counted, calls[ours], patch, lines[ours]))
    us = networks.replays("graph", graphs)
    best = networks.quicker(us, "leanconv", "graph")
    graphs[best].replay()
    return us | networks.taken(lines[best]) | {"ours": best[9:].upper(), "leanconv_error": error(results[best])}


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
