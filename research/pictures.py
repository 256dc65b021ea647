"""Pictures of docs/how-it-works.md, one for each family: what a block, a warp or a thread computes at a time.

``python -m research pictures`` draws them. Sizes of tiles are those of the configuration that the cost model chooses
for a usual problem on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from leanconv.bench.plots import save
from leanconv.call.choose import consider
from leanconv.call.explain import NOMINAL
from leanconv.kernels import ALGORITHMS
from leanconv.words import parse_problem
from report.drawing import GRID, INK, panels

_OUT, _IN, _OTHER = "#f4a582", "#92c5de", "#e8e8e8"
_LAYER = "conv:n32,c64,h56,k64,r3,pad1,NHWC"


def config(stem: str, words: str) -> Any:
    """What the cost model chooses for a problem in words, of one algorithm's configurations."""
    problem = parse_problem(words)
    algorithm = next(each for each in ALGORITHMS if each.stem == stem)
    return consider(algorithm, problem, NOMINAL, stem, None).config


def _blank(axis: Any, title: str, width: float, height: float) -> None:
    axis.set(xlim=(-0.02 * width, 1.02 * width), ylim=(1.02 * height, -0.1 * height), aspect="equal")
    axis.set_axis_off()
    axis.set_title(title, loc="left", fontsize=10, color=INK)


def _box(axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "", **how: Any) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=0.7, **how))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=INK)


def product(path: Path) -> None:
    """FP32 cores: the layer as a product of matrices, a block's tile of it, and a thread's part."""
    of = config("implicit_gemm", _LAYER)
    figure, (axis,) = panels(1, 1, (8.5, 4.0))
    _blank(axis, "A layer as a product of matrices; the windows are formed in shared memory, tile by tile", 85, 40)
    _box(axis, 0, 15, 30, 20, _OTHER, "")
    _box(axis, 0, 20, 30, 8, _IN)
    axis.text(15, 37.5, "filters: a row for each, its taps and channels", ha="center", fontsize=8)
    _box(axis, 35, 15, 48, 20, _OTHER, "")
    _box(axis, 50, 20, 16, 8, _OUT, f"a block's outputs:\n{of.tile_k} × {of.tile_pixels} pixels")
    axis.text(59, 37.5, "results: a column for each pixel", ha="center", fontsize=8)
    _box(axis, 35, 0, 48, 11, _OTHER, "")
    _box(axis, 50, 0, 16, 11, _IN, "")
    axis.text(84, 5, "windows", fontsize=8, va="center")
    _box(axis, 12, 20, 3, 8, "#4393c3", "")
    _box(axis, 50, 4, 16, 2, "#4393c3", "")
    ring = f"{of.tile_reduction} at a time, in\na ring of {of.stages} stages"
    axis.text(13.5, 31, ring, ha="center", va="center", fontsize=8)
    _box(axis, 64, 26, 2, 2, "#b2182b", "")
    threads = of.tile_k // of.thread_k * of.tile_pixels // of.thread_pixels
    text = f"a thread's {of.thread_k} × {of.thread_pixels}, in registers ({threads} threads)"
    axis.annotate(text, (65, 28), (37, 33), fontsize=8, ha="left", arrowprops={"arrowstyle": "-", "color": INK})
    save(figure, path, metadata={"Date": None})  # the same file for the same picture


def numbers(path: Path) -> None:
    """Tensor cores: bits of the types, the split of a float32 in two, and what one instruction multiplies."""
    gemm, sync = config("tensor_gemm", _LAYER), config("tensor_gemm_sync", _LAYER)
    figure, (bits, shapes) = panels(1, 2, (10.5, 3.4), width_ratios=(3, 2))
    _blank(bits, "What tensor cores multiply: sign, exponent and fraction, a box for each bit", 50, 18)
    rows = (("float32", 8, 23), ("TF32", 8, 10), ("bfloat16", 8, 7), ("float16", 5, 10))
    for i, (name, exponent, fraction) in enumerate(rows):
        bits.text(8.5, 2.5 * i + 0.8, name, ha="right", va="center", fontsize=8)
        for j in range(1 + exponent + fraction):
            colour = _OTHER if j == 0 else _IN if j <= exponent else _OUT
            _box(bits, 10 + j, 2.5 * i, 1, 1.5, colour)
    bits.text(8.5, 13.3, "split", ha="right", va="center", fontsize=8)
    for j in range(22):
        _box(bits, 19 + j, 12.5, 1, 1.5, _OUT if j < 11 else "#d6604d")
    words = f"float32 ≈ hi + lo, two float16 of 11 bits each: {gemm.products} products, hi·hi + hi·lo + lo·hi"
    bits.text(10, 16, words, fontsize=8, va="center")
    _blank(shapes, "What one instruction multiplies", 100, 100)
    _box(shapes, 0, 0, 64, 64, _OUT, f"wgmma: 128 threads,\n64 × {gemm.mma_n} outputs, 16 deep")
    _box(shapes, 72, 0, 8, 16, "#d6604d", "")
    words = f"mma.sync:\n32 threads,\n16 × 8 outputs,\n16 deep,\n{sync.warps} warps a block"
    shapes.text(70, 20, words, fontsize=8, va="top")
    save(figure, path, metadata={"Date": None})  # the same file for the same picture


def threads(path: Path) -> None:
    """What a thread of three kernels computes, and what it reads for that."""
    window = config("depthwise_window", "conv:n32,c128,h56,k128,r3,pad1,groups128")
    tiled = config("direct_tiled", "conv:n32,c3,h224,k64,r3,pad1")
    cache = config("register_cache", "filter:2048x2048,7x7")
    shown = (
        ("depthwise_window", window.columns, window.rows, 3, ""),
        ("direct_tiled, a row of a filter", tiled.thread_pixels, 1, 3, f", for {tiled.thread_k} filters"),
        ("register_cache", cache.columns, cache.rows, 7, ""),
    )
    figure, axes = panels(1, 3, (10.5, 4.2))
    for axis, (name, columns, rows, size, more) in zip(axes, shown, strict=True):
        high = rows + (size - 1) * (rows > 1)
        reads = (columns + size - 1) * high
        _blank(axis, f"{name}, {size}×{size}", 14, 16)
        for i in range(high):
            for j in range(columns + size - 1):
                inside = (size // 2 <= j < columns + size // 2) and ((rows == 1) or size // 2 <= i < rows + size // 2)
                _box(axis, j, i, 1, 1, _OUT if inside else _IN)
        taps = size * (size if rows > 1 else 1)
        text = f"{columns * rows} outputs{more}, from {reads} pixels;\n"
        text += f"one by one they would read {columns * rows * taps}"
        axis.text(0, high + 1.2, text, fontsize=8, va="center")
    save(figure, path, metadata={"Date": None})  # the same file for the same picture


def filters(path: Path) -> None:
    """Image filters: two passes in place of one, and a row of a filter as a band matrix."""
    figure, (passes, band) = panels(1, 2, (10.5, 3.8), width_ratios=(3, 2))
    size = 31
    _blank(passes, f"separable: {size} + {size} multiply-adds a pixel in place of {size * size}", 60, 24)
    for x, text in ((0, "image"), (22, "rows filtered"), (44, "result")):
        _box(passes, x, 2, 14, 14, _OTHER)
        passes.text(x + 7, 18, text, ha="center", fontsize=8)
    _box(passes, 2, 8, 9, 1, _IN)
    _box(passes, 28.5, 8, 1, 1, _OUT)
    _box(passes, 28.5, 4, 1, 9, "none")
    _box(passes, 50.5, 8, 1, 1, _OUT)
    for x in (15, 37):
        passes.annotate("", (x + 6, 9), (x, 9), arrowprops={"arrowstyle": "->", "color": INK})
    passes.text(29, 21.5, "the filtered rows stay in shared memory: one launch", ha="center", fontsize=8)
    taps, columns = 9, 8
    _blank(band, f"tensor_filter: a row of {taps} weights as a band", 30, 19)
    for n in range(columns):
        for k in range(16):
            inside = 0 <= k - n < taps
            _box(band, 2 + n, 1 + k, 1, 1, _OUT if inside else "#ffffff", chr(ord("a") + k - n) if inside else "")
    text = f"16 pixels give {columns} outputs;\n16 such blocks of a row,\n128 outputs, are one\ninstruction"
    band.text(12, 6, text, fontsize=8, va="center")
    band.plot([2, 10], [0.6, 0.6], color=GRID)
    save(figure, path, metadata={"Date": None})  # the same file for the same picture


PICTURES: dict[str, Callable[[Path], None]] = {
    "family-product": product, "family-numbers": numbers, "family-threads": threads, "family-filters": filters,
}  # fmt: skip


def draw(folder: Path) -> Iterator[Path]:
    """Draw all pictures into a folder of docs; yields their files."""
    import matplotlib

    # the same file for the same picture
    with matplotlib.rc_context({"svg.hashsalt": "leanconv"}):
        for name, make in PICTURES.items():
            make(path := folder / f"{name}.svg")
            yield path
