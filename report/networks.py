"""The whole networks that are measured, in which arithmetics, and what forward passes and training steps share."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf, isnan
from typing import Any

from leanconv.options import Precision
from report.timed import captured, in_turn

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
#: Those in which training steps are run too.
OF_STEPS = ("graph", "tuned", "eager", "compile")


def memory_format(x: Any, layout: str) -> Any:
    """What PyTorch calls a layout of images or of videos."""
    import torch

    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return last if layout == "NHWC" else torch.contiguous_format


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


def in_layouts(model: Any, x: Any) -> dict[str, tuple[Any, Any]]:
    """Model and input as PyTorch runs them: as they are, channels last, and as copies channels first."""
    import torch

    with torch.inference_mode(False):  # of filters made in inference mode no packed ones are kept
        first = copy.deepcopy(model).to(memory_format=torch.contiguous_format), x.contiguous()
    return dict(zip(("torch_nchw", "torch_nhwc"), (first, (model, x)), strict=True))


def enabled(
    during: ExitStack, nets: Mapping[str, tuple[Any, Any]], layouts: Iterable[str], mode: Mode, tune: bool = False
) -> tuple[dict[str, Any], float]:
    """Patches of PyTorch's networks in these layouts, by what they are called as leanconv's, and for how many seconds
    the first one's kernels were compiled, or with ``tune`` timed. The last one that is enabled decides."""
    import torch

    import leanconv.torch

    patches, waited = dict[str, Any](), 0.0
    for layout in dict.fromkeys(layouts):
        net, given = nets[layout]
        ours = layout.replace("torch", "leanconv")
        patches[ours] = during.enter_context(leanconv.torch.enable(net, precision=mode.precision))
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=mode.half and net.training):
            leanconv.torch.warm_up(net, given, tune=tune, progress=False)
        waited = waited or time.perf_counter() - begin
    return patches, waited


def with_ours(calls: Mapping[str, Any], patches: Mapping[str, Any]) -> dict[str, Any]:
    """Calls of PyTorch's networks, and the same as those of leanconv's that patches are of."""
    return {**calls, **{ours: calls[ours.replace("leanconv", "torch")] for ours in patches}}


def counted(call: Callable[[], Any], patch: Any, lines: list[Any]) -> Any:
    """A call; ``lines`` are then those of the patch's report that it is counted in."""
    before = {id(line): line.calls for line in patch.report().lines}
    result = call()
    lines[:] = [line for line in patch.report().lines if line.calls > before.get(id(line), 0)]
    return result


def taken(lines: Sequence[Any]) -> dict[str, int]:
    """How many of these lines of a report ran on leanconv, and how many were left."""
    left = [line.runs for line in lines].count("PyTorch")
    return {"taken": len(lines) - left, "left": left}


def quicker(us: Mapping[str, Any], side: str, way: str) -> str:
    """A side in the layout in which it took least."""
    return min((f"{side}_{layout}" for layout in ("nhwc", "nchw")), key=lambda who: us.get(f"{who}_{way}_us", inf))


def replays(way: str, graphs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each graph's replay, as fields of a row."""
    return as_fields(way, in_turn({who: graph.replay for who, graph in graphs.items()}))


def compiled_graph(model: Any, x: Any, **options: Any) -> Any:
    """The CUDA graph of a model under torch.compile."""
    import torch

    torch._dynamo.reset()
    call = partial(torch.compile(model, **options), x)
    call()
    return captured(call)[0]


def as_fields(way: str, us: dict[str, float]) -> dict[str, float]:
    """Times as fields of a row: those of each side in its layouts, and in the quicker of them."""
    for side in ("torch", "leanconv"):
        us = us | {side: min(each for who, each in us.items() if who.startswith(side))}
    return {f"{who}_{way}_us": round(each, 1) for who, each in us.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that the device holds at most during a call, besides what it holds before."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before


def largest(errors: Iterable[float]) -> float:
    """The largest error; what is no number is larger than any."""
    return max(errors, key=lambda each: (isnan(each), each))
