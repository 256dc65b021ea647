"""A network's training step by PyTorch's convolutions and by leanconv's: times and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

from report import networks
from report.networks import Mode
from report.timed import captured, eager, in_turn, only

#: Microseconds of the rounds of training steps. Explored (H200, 3175f511): the host takes 29 to 40 ms to launch a step
#: of ConvNeXt-T in 16 bits, of which the GPU computes 14. So there are many, and PyTorch's step is timed once more.
_STEP_US = 3e7


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


def measure_step(model: Any, x: Any, mode: Mode, ways: Collection[str] = ("eager", "graph")) -> dict[str, Any]:
    """Times and peaks of memory of a training step, in turn without leanconv and with it: launched by Python ("eager"),
    as CUDA graphs ("graph"). Of the former PyTorch's step is timed once more ("again"), which tells how far equal steps
    differ."""
    nets = networks.in_layouts(model, x)
    calls = {who: step(net, given, mode) for who, (net, given) in nets.items()}
    for call in calls.values():
        call()
    peaks = {who: networks.peak_bytes(call) for who, call in calls.items()}
    theirs = min(calls, key=in_turn(calls).__getitem__)
    graphs = {who: captured(call)[0] for who, call in calls.items()} if "graph" in ways else {}
    lines, us = dict[str, list[Any]](), dict[str, Any]()
    with ExitStack() as enabled:
        patches, _ = networks.enabled(enabled, nets, nets, mode)  # which is quicker may depend on the host
        calls = networks.with_ours(calls, patches)
        if "eager" in ways:
            us |= networks.as_fields("eager", eager(calls | {"again": calls[theirs]}, patches, _STEP_US))
            us |= {"again": theirs[6:].upper()}
        for ours, patch in patches.items():
            only(patch)
            peaks[ours], lines[ours] = networks.peak_bytes(calls[ours]), []
            once = partial(networks.counted, calls[ours], patch, lines[ours])
            if "graph" in ways:
                graphs[ours] = captured(once)[0]
            else:
                once()
    us |= networks.replays("graph", graphs) if "graph" in ways else {}
    best = {side: networks.quicker(us, side, "graph" if "graph" in ways else "eager") for side in ("torch", "leanconv")}
    return (
        us | networks.taken(lines[best["leanconv"]]) | {f"{side}_peak_bytes": peaks[who] for side, who in best.items()}
    )


def measure_way(model: Any, x: Any, mode: Mode, way: str, layouts: tuple[str, str]) -> dict[str, Any]:
    """Times of PyTorch's and of leanconv's training step in one way of `networks.OF_STEPS`. ``layouts``: PyTorch's
    networks, by the names of `networks.in_layouts`, that PyTorch and leanconv compute quicker.

    Steps of "tuned", for which all layers are timed before, and of "compile", channels last, are CUDA graphs.
    """
    if way == "graph":
        return measure_step(model, x, mode, (way,))
    if way == "eager":
        found = measure_step(model, x, mode, (way,))
        return {name: each for name, each in found.items() if "eager" in name or name == "again"}
    nets = {"torch_nhwc": (model, x)} if way == "compile" else networks.in_layouts(model, x)
    theirs, ours = ("torch_nhwc", "torch_nhwc") if way == "compile" else layouts
    make = _compiled_step if way == "compile" else step
    with ExitStack() as enabled:
        # NOTE: steps are kept until the graphs have run: these write to the optimisers' momenta
        steps = {"torch": make(*nets[theirs], mode)}
        graphs = {"torch": captured(steps["torch"])[0]}
        networks.enabled(enabled, nets, (ours,), mode, tune=way == "tuned")
        steps["leanconv"] = make(*nets[ours], mode)
        graphs["leanconv"] = captured(steps["leanconv"])[0]
        return networks.replays(way, graphs)


def _compiled_step(model: Any, x: Any, mode: Mode) -> Callable[[], Any]:
    import torch

    torch._dynamo.reset()
    call = step(torch.compile(model), x, mode)
    call()
    return call
