"""The bank-width model of the memory-efficient direct convolution, measured on banks of four bytes.

The paper's model: if a bank of shared memory is n times as wide as an element, a thread should read, compute and write
n neighbours as one unit, or (n - 1) / n of the bandwidth is lost. ``python -m research bank-width`` times its special
case, one channel and one filter, for elements of four, two and one bytes with n of 1, 2 and 4
(research/kernels/bank_width.cuh) and writes research/results/<machine>/bank-width.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.dtypes import DTYPES, accumulator, item_bytes
from leanconv.kernels.contract import Config, ceil_div
from leanconv.plan import Launch, Number, Plan, Pointer
from leanconv.runtime import launch
from leanconv.runtime.threads import side_by_side
from leanconv.runtime.timing import time_gpu
from report import records
from report.drawing import finish, panels, tidy
from research.studies import KERNELS

DTYPES_TAKEN = ("float32", "float16", "bfloat16", "uint8")
FILTERS = (3, 5, 7)
SIZES = (2048, 4096, 8192)
#: Bytes of a bank of shared memory.
BANK_BYTES = 4
#: Threads of a block that compute; a warp more brings the pixels right of its strip.
THREADS = 256
#: Blocks that registers must leave room for: without a bound the compiler gives some ways twice as many as others.
BLOCKS = {False: 2, True: 1}
#: Whether windows stay in registers, in words.
KEPT = {False: "windows read again for each row", True: "windows kept in registers"}
COLOURS = {"float32": "#222222", "float16": "#0072b2", "bfloat16": "#56b4e9", "uint8": "#d55e00"}


@dataclass(frozen=True)
class BankConfig(Config):
    """A thread computes ``pixels`` adjacent outputs, and reads shared memory ``unit`` elements at a time.

    ``kept``: the window stays in registers, and only its new row is read. ``dot``: four integers of 8 bits are
    multiplied as one word. A block makes a strip of ``tile`` columns, ``rows`` high; studies compare blocks of as many
    threads.
    """

    pixels: int
    unit: int
    kept: bool
    dot: bool = False
    tile: int = 0
    rows: int = 64

    def __post_init__(self) -> None:
        if not self.tile:
            object.__setattr__(self, "tile", THREADS * self.pixels)

    @property
    def name(self) -> str:
        """Pixels and unit, in words; the paper's n where they are the same."""
        words = f"n={self.pixels}" if self.pixels == self.unit else f"{self.pixels} pixels by {self.unit}"
        return words + (", dp4a" if self.dot else "")


def matched(dtype: str) -> int:
    """Elements in a bank."""
    return BANK_BYTES // item_bytes(dtype)


def configs(dtype: str) -> Iterator[BankConfig]:
    """The paper's n of 1, 2 and 4; the matched pixels in narrower units, which no two lanes find in one bank; with
    words as one operand."""
    for kept in (False, True):
        yield from (BankConfig(n, n, kept) for n in (1, 2, 4))
        yield from (BankConfig(matched(dtype), unit, kept) for unit in (1, 2) if unit < matched(dtype))
        if item_bytes(dtype) == 1:
            yield BankConfig(4, 4, kept, dot=True)


def study_launch(dtype: str, extent: int, config: BankConfig, height: int, width: int) -> Launch:
    """The launch that filters an image; ``width`` is a multiple of the tile's."""
    if width % config.tile:
        raise ValueError(f"width={width} is not a multiple of tile={config.tile}")
    element, total = DTYPES[dtype].ctype, accumulator(dtype).ctype
    slots = 2 if config.kept else extent + 1
    return Launch(
        header=str(KERNELS / "bank_width.cuh"),
        function="leanconv::bank_width",
        problem=(("element", element), ("sum", total), ("r", extent), ("s", extent)),
        tuning=config.constants(),
        arguments=(
            Pointer("x", element),
            Pointer("w", total),
            Pointer("y", element, written=True),
            Number("int", "height", height),
            Number("int", "width", width),
        ),
        grid=width // config.tile * ceil_div(height, config.rows),
        block=config.tile // config.pixels + 32,
        shared_bytes=slots * (config.tile + 32 * config.pixels) * item_bytes(dtype),
        min_blocks=BLOCKS[config.kept],
    )


def draw_filter(dtype: str, extent: int) -> np.ndarray:
    """A filter whose sum is one; of integers of 8 bits, between -60 and 127."""
    rng = np.random.default_rng(0)
    if dtype == "uint8":
        return rng.integers(-60, 128, extent * extent).astype(np.int32)
    w = rng.uniform(0, 1, extent * extent).astype(np.float32)
    return w / w.sum()


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What the kernel computes, in float64; of integers as they are stored."""
    extent = round(w.size**0.5)
    padded = np.pad(x.astype(np.float64), ((0, extent - 1), (0, extent - 1)))
    y = np.zeros(x.shape)
    for i in range(extent):
        for j in range(extent):
            y += float(w[i * extent + j]) * padded[i : i + x.shape[0], j : j + x.shape[1]]
    return np.clip(np.floor(y / 256), 0, 255) if x.dtype == np.uint8 else y


def accesses(extent: int, config: BankConfig) -> float:
    """Reads of shared memory by a warp for 32 outputs, as the model counts them; stores of rows not counted."""
    rows = 1 if config.kept else extent
    return rows * ceil_div(extent + config.pixels - 1, config.unit) / config.pixels


def measure(results: Path, revision: str | None = None, sizes: Sequence[int] = SIZES, budget_s: float = 0.02) -> Path:
    """Time everything on this machine's GPU; returns the results file. Raises RuntimeError for a wrong answer."""
    import torch

    device = launch.open_device(0)
    every = [(d, e, config) for d in DTYPES_TAKEN for e in FILTERS for config in configs(d)]
    plans = {(d, e, config): Plan((study_launch(d, e, config, 1024, 1024),)) for d, e, config in every}
    side_by_side([partial(device.compiled, plan) for plan in plans.values()])
    rows = []
    for dtype, extent, config in every:
        kind = getattr(torch, dtype)
        if config == next(configs(dtype)):
            image, taps = _on_gpu(dtype, extent, max(sizes), torch)
        compiled = device.compiled(plans[dtype, extent, config])[0]
        for size in sizes:
            x, y = image[:size, :size].contiguous(), torch.empty((size, size), dtype=kind, device="cuda")
            run = device.executable(Plan((study_launch(dtype, extent, config, size, size),)), ("x", "w", "y"))
            values = (x.data_ptr(), taps.data_ptr(), y.data_ptr())
            if size == min(sizes):
                run(0, values)
                _check(y, x, taps, f"{dtype} {extent}x{extent} {config}", torch)
            us = time_gpu(partial(run, 0, values), budget_s=budget_s).median_us
            about = {"name": config.name, "registers": compiled.registers, "spill_bytes": compiled.spill_bytes}
            rows.append({"dtype": dtype, "extent": extent, "size": size, **asdict(config), **about, "us": round(us, 3)})
    return records.write(results, "bank-width", machine.describe(True, None, {}, revision), rows)


def _on_gpu(dtype: str, extent: int, size: int, torch: Any) -> tuple[Any, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    if dtype == "uint8":
        x = torch.randint(0, 256, (size, size), generator=generator, device="cuda", dtype=torch.uint8)
    else:
        x = torch.rand((size, size), generator=generator, device="cuda").sub_(0.5).to(getattr(torch, dtype))
    return x, torch.from_numpy(draw_filter(dtype, extent)).cuda()


def _check(y: Any, x: Any, taps: Any, what: str, torch: Any) -> None:
    """Raise RuntimeError unless ``y`` is the filtered ``x``."""
    dtype, extent = str(x.dtype).removeprefix("torch."), round(taps.numel() ** 0.5)
    padded = torch.nn.functional.pad(x.double(), (0, extent - 1, 0, extent - 1))
    right: Any = 0.0
    for i in range(extent):
        for j in range(extent):
            right = right + float(taps[i * extent + j]) * padded[i : i + x.shape[0], j : j + x.shape[1]]
    if dtype == "uint8":
        right = (right / 256).floor().clamp(0, 255)
    error = float((y.double() - right).abs().max())
    if error > (0 if dtype == "uint8" else 4 * DTYPES[dtype].roundoff):
        raise RuntimeError(f"{what}: wrong by {error:.3g}")


def times(rows: Sequence[dict[str, Any]], dtype: str, extent: int, kept: bool) -> dict[str, dict[int, float]]:
    """Microseconds by way and size."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if (row["dtype"], row["extent"], row["kept"]) == (dtype, extent, kept):
            found.setdefault(row["name"], {})[row["size"]] = row["us"]
    return found


def speeds(rows: Sequence[dict[str, Any]], kept: bool) -> Table:
    """Gigapixels a second on the largest image by type, filter and way."""
    ways = list(dict.fromkeys(row["name"] for row in rows))
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for extent in sorted({row["extent"] for row in rows}):
            found = times(rows, dtype, extent, kept)
            size = max(next(iter(found.values())))
            cells = [f"{size * size / found[way][size] * 1e-3:.0f}" if way in found else "–" for way in ways]
            lines.append([f"{dtype}, {extent}×{extent}", str(matched(dtype)), *cells])
    return ["", "matched n", *ways], lines


def gains(rows: Sequence[dict[str, Any]], kept: bool) -> Table:
    """How many times as fast the matched n is, by type and filter on the largest image: as n = 1, as the same pixels
    read one by one, and with words as operands as n = 1.
    """
    size, lines = max(row["size"] for row in rows), []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        n = matched(dtype)
        for extent in sorted({row["extent"] for row in rows}):
            us = {way: found[size] for way, found in times(rows, dtype, extent, kept).items()}
            ratios = [(way, us["n=1"] / us[way]) for way in ("n=2", "n=4")]
            alone = us[f"{n} pixels by 1"] / us[f"n={n}"] if n > 1 else None
            dot = us["n=1"] / us["n=4, dp4a"] if "n=4, dp4a" in us else None
            cells = [f"**{ratio:.2f}**" if way == f"n={n}" else f"{ratio:.2f}" for way, ratio in ratios]
            cells += ["–" if ratio is None else f"{ratio:.2f}" for ratio in (alone, dot)]
            lines.append([f"{dtype}, {extent}×{extent}", *cells])
    heads = ["n = 2 over n = 1", "n = 4 over n = 1", "matched n over its pixels one by one", "n = 4 by dp4a over n = 1"]
    return ["", *heads], lines


def section(record: dict[str, Any]) -> str:
    """The tables of a machine."""
    rows = record["rows"]
    origin = f"{records.origin(record['machine'])}."
    parts = [f"{origin} An image of {max(row['size'] for row in rows)}² pixels; the matched n in bold."]
    parts += [f"Speed, {words}:\n\n{records.table(gains(rows, kept))}" for kept, words in KEPT.items()]
    for kept, words in KEPT.items():
        parts.append(f"Gigapixels a second, {words}:\n\n{records.table(speeds(rows, kept))}")
    return "\n\n".join(parts)


def draw(record: dict[str, Any], path: Path) -> None:
    """A panel for each filter, with a line for each type: the speed by n over that of n = 1, the matched n marked."""
    rows = record["rows"]
    extents = sorted({row["extent"] for row in rows})
    figure, axes = panels(len(KEPT), len(extents), (9.5, 5.2), sharey="row")
    for number, (axis, (kept, extent)) in enumerate(zip(axes, product(KEPT, extents), strict=True)):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            found = times(rows, dtype, extent, kept)
            size = max(found["n=1"])
            gain = {n: found["n=1"][size] / found[f"n={n}"][size] for n in (1, 2, 4)}
            axis.plot(range(3), list(gain.values()), label=dtype, linewidth=1.3, color=COLOURS[dtype])
            axis.plot((1, 2, 4).index(matched(dtype)), gain[matched(dtype)], "o", color=COLOURS[dtype])
        tidy(axis, f"{extent}×{extent}, {KEPT[kept]}")
        axis.set_xticks(range(3), ["1", "2", "4"])
        if number % len(extents) == 0:
            axis.set_ylabel("speed over that of n = 1", fontsize=8)
        if number >= len(axes) - len(extents):
            axis.set_xlabel("n, pixels a thread reads and computes as one unit", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    finish(figure, path, f"what a unit as wide as a bank is worth on {record['machine']['gpu']}")
