"""Train the six networks of the Im2col-Winograd paper, with PyTorch's convolutions and with leanconv's, from one seed.

    python examples/train_cnn.py resnet18 vgg16 --size 32 --engine leanconv torch-fp32-nhwc --steps 200
    torchrun --nproc-per-node 2 examples/train_cnn.py resnet18

A step is forward, backward and optimiser; the loss curve, the time of a step and the peak of memory go to a JSON file.
The networks are as in the paper (Zhang et al. 2024): LeakyReLU and BatchNorm, Adam or SGD with momentum, learning rate
0.001, 512 images of 32x32x3 or 256 of 128x128x3. The images are scikit-learn's handwritten digits, real ones with
labels (1797, from the UCI repository), enlarged; without scikit-learn and without --data, they are made up: gratings
whose class is their direction, under noise.

Under torchrun each process takes its share of the same batches (DistributedDataParallel, SyncBatchNorm). Of the
processes of a host that need the same kernel, one compiles it. --batch is that of all processes together.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import leanconv.torch

#: images in a batch, by their height and width
BATCH = {32: 512, 128: 256}
#: Channels of the layers of VGG; "M" halves height and width.
VGG = {
    "vgg16": (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
    "vgg19": (64, 64, "M", 128, 128, "M", 256, 256, 256, 256, "M", 512, 512, 512, 512, "M", 512, 512, 512, 512, "M"),
    # to try the script on any machine
    "tiny": (4, "M", 6),
}
RESNET = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
NETWORKS = ("resnet18", "resnet34", "vgg16", "vgg19", "vgg16x5", "vgg16x7")
#: memory order, and whether factors may be rounded to 10 bits
ENGINES = {
    "leanconv": ("nhwc", False),
    "leanconv-nchw": ("nchw", False),
    "leanconv-tf32": ("nhwc", True),
    "torch-fp32-nchw": ("nchw", False),
    "torch-fp32-nhwc": ("nhwc", False),
    "torch-tf32-nhwc": ("nhwc", True),
}
LEARNING_RATE = 0.001


def convolution(c: int, k: int, side: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, normalisation, activation."""
    layer = nn.Conv2d(c, k, side, stride, side // 2, bias=False)
    return [layer, nn.BatchNorm2d(k), nn.LeakyReLU(inplace=True)]


class Block(nn.Module):
    """Two convolutions of 3x3 and a short cut."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(c, k, 3, stride), convolution(k, k, 3)
        self.layers = nn.Sequential(*first, *second[:2])
        short = convolution(c, k, 1, stride)[:2]
        self.short = nn.Sequential(*short) if (c, stride) != (k, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.leaky_relu(self.layers(x) + self.short(x))


def network(name: str, size: int, classes: int = 10) -> nn.Sequential:
    """A network for images of ``size`` x ``size``.

    "vgg16x5" has filters of 5x5; "vgg16x7" filters of 7x7 in its first four layers and of 3x3 in the others.
    A ResNet begins with 3x3 filters of stride 1, and for images of 128x128 with a maximum over 2x2.
    """
    layers: list[nn.Module] = []
    if name in RESNET:
        layers, c = convolution(3, 64, 3), 64
        layers += [nn.MaxPool2d(2)] if size > 32 else []
        for stage, blocks in enumerate(RESNET[name]):
            k = 64 << stage
            for i in range(blocks):
                layers.append(Block(c, k, 2 if stage and not i else 1))
                c = k
    else:
        c, done = 3, 0
        base, _, wide = name.partition("x")
        for k in VGG[base]:
            if isinstance(k, str):
                layers.append(nn.MaxPool2d(2))
                continue
            side = int(wide) if wide == "5" or (wide == "7" and done < 4) else 3
            layers += convolution(c, k, side)
            c, done = k, done + 1
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


def digits(data: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Images (n, side, side) from 0 to 1, their classes, and where they come from."""
    if data is not None:
        table = np.loadtxt(data, delimiter=",", dtype=np.float32)
        return table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1].astype(np.int64), "scikit-learn's digits"
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        random = np.random.default_rng(0)
        classes = random.integers(0, 10, 2048)
        angle, phase = classes[:, None, None] * math.pi / 10, random.uniform(0, 6.28, (2048, 1, 1))
        row, column = np.mgrid[:8, :8]
        waves = np.sin(1.2 * (np.cos(angle) * column + np.sin(angle) * row) + phase)
        return (waves / 4 + random.normal(0.5, 0.15, waves.shape)).astype(np.float32), classes, "generated gratings"
    bunch = load_digits()
    return bunch.images.astype(np.float32) / 16, bunch.target.astype(np.int64), "scikit-learn's digits"


@contextmanager
def engine_of(name: str, net: nn.Module) -> Iterator[Any]:
    """PyTorch's switches as an engine wants them; what takes convolutions over, for leanconv.

    cuDNN searches for its fastest algorithms (benchmark). Explored (H200, bc8a364): in strict FP32 a step of VGG-16
    takes 96 ms without the search and 30 with it.
    """
    tf32 = ENGINES[name][1]
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32)
    matmul, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, tf32
    try:
        taking = (
            leanconv.torch.enable(net, precision="tf32" if tf32 else "fp32") if "leanconv" in name else nullcontext()
        )
        with flags, taking as taken:
            yield taken
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


def mark(cuda: bool) -> Any:
    """A moment: of the GPU, which need not be waited for, or of the clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Seconds between two moments."""
    if isinstance(first, float):
        return second - first  # type: ignore[no-any-return]
    second.synchronize()
    return first.elapsed_time(second) / 1e3  # type: ignore[no-any-return]


class Scratch(TorchDispatchMode):
    """Notes the memory that convolutions take while they run, besides their results."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        aten = torch.ops.aten
        if function not in (aten.convolution.default, aten.convolution_backward.default) or not given[0].is_cuda:
            return function(*given, **(options or {}))
        torch.cuda.reset_peak_memory_stats()
        result = function(*given, **(options or {}))
        self.most = max(self.most, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        return result


#: what a GPU kernel does in a step, by a pattern of its name; the first that is found counts
KERNELS = {
    "filters' gradient": r"wgrad|_weight|sum_split_k|sum_image_slots",
    "preparing filters": r"filters",
    "convolution": r"fprop|dgrad|cudnn::cnn|winograd|tensor_gemm|implicit_gemm|direct|im2win|nchwToNhwc|nhwcToNchw",
    "normalisation": r"(?i)batch_?norm|bn_",
    "activation": r"leaky_relu",
    "pooling": r"pool",
    "optimiser": r"multi_tensor",
    "other": r"",
}


def kernels_of(step: Callable[[], Any], steps: int = 3) -> dict[str, float]:
    """Microseconds of a step that the GPU spends in each sort of kernels (`KERNELS`).

    A kernel that starts before the one before it has ended counts from there on.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent, done = dict.fromkeys(KERNELS, 0.0), 0.0
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        spent[sort_of(event.name)] += max(0.0, event.time_range.end - max(event.time_range.start, done)) / steps
        done = max(done, event.time_range.end)
    return {sort: round(us, 1) for sort, us in spent.items()}


def sort_of(kernel: str) -> str:
    """What a kernel of this name does: a key of `KERNELS`."""
    return next(sort for sort, pattern in KERNELS.items() if re.search(pattern, kernel))


def hash_of(net: nn.Module) -> str:
    """Of all weights, bit by bit."""
    total = hashlib.sha256()
    for each in net.parameters():
        total.update(each.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def train(
    name: str, size: int, engine: str, images: Any, classes: Any, *, batch: int, optimiser: str = "adam",
    steps: int = 100, warm: int = 10, seed: int = 0, device: str = "cpu", report: bool = False,
    own_statistics: bool = False, bucket_mb: float = 25, profile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A row of results: ``us`` a step (the median), ``peak_bytes`` besides the images, ``loss`` and ``losses``.

    ``images`` (n, h, w) and ``classes`` lie on the CPU. Step times, by the GPU's clock, leave out the first ``warm``
    steps, in which kernels are compiled and cuDNN tries its algorithms. ``loss`` is the mean of the last tenth of the
    steps. With ``own_statistics`` each of several processes normalises by its own images; gradients are sent in pieces
    of ``bucket_mb``, each as soon as it is whole. ``scratch_bytes`` is the most that one convolution, forward or
    backward, took besides its results, in a step after the others, of whose convolutions, forward and backward,
    leanconv has ``taken`` some and ``left`` some to PyTorch; ``sha256`` is that of the weights before it. With
    ``profile``, on a GPU, ``kernels`` has the time of a step by sorts of kernels, of three steps more.
    """
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if in_group() else (0, 1)
    form = torch.channels_last if ENGINES[engine][0] == "nhwc" else torch.contiguous_format
    torch.manual_seed(seed)
    net: Any = network(name, size).to(device, memory_format=form)
    cuda = device.startswith("cuda")
    x = functional.interpolate(images[:, None].to(device), (size, size), mode="bilinear").expand(-1, 3, -1, -1)
    x, y = (2 * x - 1).contiguous(memory_format=form), classes.to(device)
    # on the GPU, so that no step waits for a copy
    order = torch.randint(len(x), (warm + steps, batch), generator=torch.Generator().manual_seed(seed)).to(device)
    kinds = {"adam": torch.optim.Adam, "sgdm": torch.optim.SGD}
    options: dict[str, Any] = {"momentum": 0.9} if optimiser == "sgdm" else {}
    losses, marks = [], [mark(cuda)]
    before = torch.cuda.memory_allocated() if cuda else 0
    with engine_of(engine, net) as taken:
        if taken is not None and cuda:
            # every process needs the kernels of its share of a batch; without this, the first step compiles them one
            # after the other
            leanconv.torch.warm_up(net, x[torch.arange(-(-batch // ranks), device=device) % len(x)])
        if ranks > 1:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if cuda and not own_statistics else net
            # the statistics that evaluation would use stay each process's own: they are not sent in each step
            net = nn.parallel.DistributedDataParallel(
                net, device_ids=[torch.device(device)] if cuda else None, broadcast_buffers=False,
                gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb,
            )  # fmt: skip
        optimise = kinds[optimiser](net.parameters(), LEARNING_RATE, **options)
        for step in range(warm + steps):
            chosen = order[step, rank::ranks]
            if step == warm and cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            optimise.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(net(x[chosen]), y[chosen])
            loss.backward()
            optimise.step()
            losses.append(loss.detach())
            marks.append(mark(cuda))
        times = [between(*pair) for pair in zip(marks[warm:], marks[warm + 1 :], strict=False)]
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        sha256, weights = hash_of(net), float(sum(each.detach().double().abs().sum() for each in net.parameters()))

        def step_again() -> None:
            optimise.zero_grad(set_to_none=True)
            functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimise.step()

        # the report has what warm_up ran, too
        ran = {id(line): line.calls for line in taken.report().lines} if taken is not None else {}
        with Scratch() as scratch:
            step_again()
        if taken is not None:
            stepped = [line.runs for line in taken.report().lines if line.calls > ran.get(id(line), 0)]
        kernels = kernels_of(step_again) if profile and cuda else None
    curve = torch.stack(losses)
    if ranks > 1:
        torch.distributed.all_reduce(curve)
        curve /= ranks
    values = curve.tolist()
    row = {
        "problem": f"{name}-b{batch}-{size}", "engine": engine, "optimiser": optimiser, "seed": seed, "gpus": ranks,
        "own_statistics": own_statistics and ranks > 1, "bucket_mb": bucket_mb,
        "steps": steps, "us": round(1e6 * statistics.median(times), 1),
        "peak_bytes": peak, "scratch_bytes": scratch.most, "sha256": sha256,
        "loss": statistics.fmean(values[-max(1, steps // 10):]), "losses": [round(value, 6) for value in values],
        "weights": weights,
    }  # fmt: skip
    if kernels is not None:
        row["kernels"] = kernels
    if taken is not None:
        row["left"] = stepped.count("PyTorch")
        row["taken"] = len(stepped) - row["left"]
        if report:
            print(taken.report())
    return row


def in_group() -> bool:
    """Whether this is one of several processes that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["resnet18"], metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--size", type=int, nargs="+", default=[32], help="32, 128")
    parser.add_argument("--batch", type=int, help="by default 512 of 32x32, 256 of 128x128")
    parser.add_argument("--engine", nargs="+", default=["leanconv", "torch-fp32-nhwc"], choices=list(ENGINES))
    parser.add_argument("--optimiser", nargs="+", default=["adam"], choices=["adam", "sgdm"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--data", type=Path, help="scikit-learn's digits.csv.gz, where scikit-learn is not installed")
    parser.add_argument("--json", type=Path, help="file for the results; rows that it has are replaced")
    parser.add_argument("--revision", help="of the sources, for --json, where git does not know it")
    parser.add_argument(
        "--own-statistics", action="store_true",
        help="under torchrun: BatchNorm by each process's own images, as DistributedDataParallel does by itself",
    )  # fmt: skip
    parser.add_argument(
        "--bucket-mb", type=float, default=25,
        help="under torchrun: gradients are sent in pieces of so many MB while others are computed; 1000: at the end",
    )  # fmt: skip
    parser.add_argument("--twice", action="store_true", help="train twice, to say whether all bits are the same")
    parser.add_argument("--profile", action="store_true", help="time of a step by sorts of kernels, on a GPU")
    parser.add_argument("--report", action="store_true", help="what leanconv ran, layer by layer")
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device = f"cuda:{os.environ['LOCAL_RANK']}"
    first = not in_group() or torch.distributed.get_rank() == 0
    images, classes, source = digits(given.data)
    images, classes = torch.from_numpy(images), torch.from_numpy(classes)
    if first:
        print(f"{len(images)} images, {source}; on {torch.cuda.get_device_name() if device != 'cpu' else 'the CPU'}")
    combinations = [
        (name, size, optimiser, engine, seed)
        for name in given.networks for size in given.size for optimiser in given.optimiser
        for engine in given.engine for seed in given.seed
    ]  # fmt: skip
    for name, size, optimiser, engine, seed in combinations:
        batch = given.batch or BATCH.get(size, 256)
        run = partial(
            train, name, size, engine, images, classes, batch=batch, optimiser=optimiser, steps=given.steps, seed=seed,
            device=device, report=given.report and first, own_statistics=given.own_statistics,
            bucket_mb=given.bucket_mb, profile=given.profile,
        )  # fmt: skip
        row = run()
        if given.twice:
            again = run()
            row["repeats"] = (row["sha256"], row["losses"]) == (again["sha256"], again["losses"])
        if first:
            print(say(row), flush=True)
            if given.json:
                write(given.json, row, source, given.revision)
    if in_group():
        torch.distributed.destroy_process_group()


def say(row: dict[str, Any]) -> str:
    """A row in words."""
    words = (
        f"{row['problem']} {row['optimiser']} {row['engine']}: {row['us']:.0f} µs a step, {row['peak_bytes']} bytes, "
        f"of which a convolution takes {row['scratch_bytes']} in passing, loss {row['loss']:.4f}"
    )
    if "taken" in row:
        words += f" ({row['taken']} taken, {row['left']} left)"
    if "repeats" in row:
        words += ": again the same bits" if row["repeats"] else ": other bits in a second run"
    return words


def write(path: Path, row: dict[str, Any], source: str, revision: str | None = None) -> None:
    """Put a row into a results file, in place of one for the same."""
    from leanconv.bench import columns, machine

    cuda = torch.cuda.is_available()
    kept = columns.read(path)["rows"] if path.exists() else []
    same = ("problem", "engine", "optimiser", "seed", "gpus", "own_statistics", "bucket_mb")
    rows = [old for old in kept if any(old.get(key) != row.get(key) for key in same)] + [row]
    about = machine.describe(cuda, None, {"torch": torch.__version__}, revision)
    columns.write(path, {"machine": about, "images": source, "rows": rows})


if __name__ == "__main__":
    main()
