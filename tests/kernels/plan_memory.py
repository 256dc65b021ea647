"""Random problems of every kind, and which bytes of each array the launches of their plans reach.

Written down from the device code a second time: what a kernel makes of its constants, not what the host half believes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.plan import Launch, Number, Plan, Pointer, TensorMap
from leanconv.problem import ConvProblem, FilterProblem, Problem
from leanconv.volumes.images import as_images
from tests.cases import filter_problem

#: Bytes of a C++ element type.
BYTES = {kind.ctype: kind.bytes for kind in DTYPES.values()}
#: Roles of a plan's own memory.
SCRATCH = ("workspace", "prepared")
Numbers = dict[str, Any]
#: First and last byte, and one more, that a launch may reach of an array.
Span = tuple[int, int]


def draw_problem(rng: np.random.Generator) -> Problem:
    """A problem of any kind: sizes of one and windows that read only padding are as likely as large ones."""
    if rng.random() < 0.05:
        size, kernel = rng.integers(1, 3000, 2), rng.integers(1, 32, 2)
        filters, channels = (int(rng.integers(1, most)) for most in (4, 7))
        dtype, result = (tuple(DTYPES)[rng.integers(len(DTYPES))] for _ in range(2))
        if rng.random() < 0.6:  # products, or windows without weights
            given = ({"rank": 2}, {"reduction": "sum"}, {"reduction": "median"})[rng.integers(3)]
            kernel = [5, 5] if given.get("reduction") == "median" else kernel
            return filter_problem(1, *map(int, size), *map(int, kernel), channels=channels, **given)
        return filter_problem(
            1, *map(int, size), *map(int, kernel), filters=filters, channels=channels, dtype=dtype, out_dtype=result
        )
    while True:
        problem = _draw_layer(rng)
        if problem.layout != "CHWN" and rng.random() < 0.22:  # some 15 % of all
            problem = as_images(_draw_depth(rng, problem))
        if min(problem.z, problem.p, problem.q) > 0 and (problem.dtype != "int8" or problem.op == "fprop"):
            return problem


def _draw_depth(rng: np.random.Generator, images: ConvProblem) -> ConvProblem:
    """The layer for volumes, whose outputs have slices."""
    t, stride, dilation = (int(rng.choice(each)) for each in ((1, 2, 3, 3, 5), (1, 1, 2, 3), (1, 1, 2)))
    padding = tuple(map(int, (t // 2, t // 2) if rng.random() < 0.7 else rng.integers(0, 4, 2)))
    least = max(1, dilation * (t - 1) + 1 - sum(padding))
    more = int(rng.choice((0, 1, 2, 3, 7, 20)))
    if rng.random() < 0.15:  # filters that lie side by side
        h, w = (taps * max(1, side // taps) for side, taps in ((images.h, images.r), (images.w, images.s)))
        images = replace(images, h=h, w=w, stride=(images.r, images.s), padding=(0, 0, 0, 0), dilation=(1, 1))
        images = replace(images, groups=1, c=min(images.c, 600), k=min(images.k, 600))
        return replace(images, d=t * (1 + more), t=t, stride_d=t)
    d = least + more
    return replace(images, d=d, t=t, stride_d=stride, padding_d=padding, dilation_d=dilation)


def _draw_layer(rng: np.random.Generator) -> ConvProblem:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def numbers(low: int, high: int, count: int = 2) -> tuple[int, ...]:
        return tuple(map(int, rng.integers(low, high, count)))

    def size() -> int:
        return int(one_of(1, 2, 3, rng.integers(1, 9), rng.integers(1, 60), rng.integers(1, 300), 28))

    r, s = one_of((3, 3), (1, 1), (1, 3), (5, 5), numbers(1, 9), (int(rng.integers(1, 30)), 1))
    h, w = size(), size()
    stride = one_of((1, 1), (1, 1), (2, 2), (2, 1), numbers(1, 17))
    dilation = one_of((1, 1), (1, 1), (1, 1), (2, 2), numbers(1, 5))
    usual = (r // 2, r // 2, s // 2, s // 2)
    padding = one_of(usual, usual, (0, 0, 0, 0), (1, 1, 1, 1), numbers(0, 7, 4))
    if rng.random() < 0.05:  # the windows step over the image: all they read is padding
        h, r, stride, padding = 1, 1, (2, stride[1]), (1, 1, *padding[2:])
    groups = int(one_of(1, 1, 1, 1, 2, 3, rng.integers(1, 9)))
    of_group = [
        one_of(rng.integers(1, 9), 16, 32, 64, 256, 4 * rng.integers(1, 40), rng.integers(1, 600)) for _ in "ck"
    ]
    c, k = (groups * int(each) for each in of_group)
    kind = rng.random()
    if kind < 0.15:  # one channel a group
        groups, k = c, c * int(one_of(1, 1, 2, 3))
    if kind < 0.05:  # and a row, which each output reads the beginning of
        r, s, w, stride, dilation, padding = 1, 4, 4 * w, (1, 1), (1, 1), (0, 0, 3, 0)
    elif kind < 0.09:  # or a filter that no thread keeps whole
        r, s, stride, dilation, padding = 13, 11, (1, 1), (1, 1), (6, 6, 5, 5)
    if 0.1 < kind < 0.12:
        c, groups = 1, 1
    if kind > 0.85:  # rows of images and of outputs of whole 16 bytes
        w, stride, dilation, padding = 8 * int(rng.integers(1, 9)), (stride[0], 1), (1, 1), usual
    op = one_of("fprop", "dgrad", "wgrad")
    fprop = op == "fprop"
    return ConvProblem(
        *(int(one_of(1, 2, 32, 128, rng.integers(1, 300))), c, h, w, k, r, s),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        layout=one_of("NCHW", "NHWC", "NHWC", "CHWN"),
        dtype=one_of("float32", "float32", "float32", "float16", "bfloat16", *(["int8"] if fprop else [])),
        precision=one_of("ieee", "fp32", "fp32", "relaxed", "tf32", "tf32"),
        bias=fprop and rng.random() < 0.5,
        activation=one_of(None, "relu") if fprop else None,
        op=op,
        accumulate=rng.random() < 0.1,
        batch_invariant=op != "wgrad" and rng.random() < 0.05,
    )


def array_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of the arrays that a caller gives."""
    if isinstance(problem, FilterProblem):  # rows and images may lie apart
        return {}
    return {each.role: prod(each.shape) * item_bytes(each.dtype) for each in problem.operands}


def _rows(p: Numbers) -> int:
    """Rows of a filter, of all its slices."""
    return int(p.get("t", 1) * p["r"])


def _weights(p: Numbers) -> int:
    return int(p["k"] * p["group_c"] * _rows(p) * p["s"])


def _filters_of(p: Numbers) -> int:
    return int(p["groups"] * p["group_k"] * p["group_c"] * _rows(p) * p["s"])


def _split(p: Numbers, t: Numbers) -> Span:
    """The packed filters of what splits float32: of a main launch up to the maxima of channels (filter_layout.cuh), of
    one that packs or validates all (tensor_filters.cuh, speculative_filters.cuh)."""
    states, blocks, rows = t["states"], ceil(p["group_c"] / t["channel_block"]), _rows(p)
    of_row = p["s"] if states == 1 else ceil(p["s"] / 3)
    of_stage = 64 // t["channel_block"]
    stages = ceil(rows * of_row * blocks / of_stage)
    lone = states > 1 and not t["spacing"] and blocks % of_stage == 0 and p["s"] > 3 and p["s"] % 3 == 1
    rest = rows * blocks // of_stage if lone else 0
    filters = t["mma_n"] * t["n_tiles"]
    tiles = ceil(p["group_k"] / filters)
    mma_tiles = ((stages - rest) * states + 2 * rest) * t["n_tiles"]
    floats = t["mma_n"] * 64 * 2 * (2 if t["products"] == 3 else 1) // 4
    before = 4 + 4 * ceil(p["groups"] / 4) + p["groups"] * tiles * filters + p["groups"] * stages * 64
    end = p["first_prepared"] + before + p["groups"] * tiles * mma_tiles * floats
    if "row_block" in p:
        channels = p["groups"] * p["group_c"] * (rows * p["s"] if p["by_element"] else 1)
        end += 4 * ceil(channels * ceil(p["group_k"] / p["row_block"]) / 4)
        end += p["groups"] * tiles * filters + 3 if p["speculative_block"] else 0
    return 4 * p["first_prepared"], 4 * end


def _rearranged(p: Numbers, t: Numbers) -> Span:
    first, item = p["first_weight"], BYTES[p["element"]]
    return item * first, item * (first + _filters_of(p))


def _columns(p: Numbers, t: Numbers) -> tuple[Numbers, int, int]:
    """The columns of filter rows as filters, their taps, and how many chunks of 64 channels they have
    (filter_columns.cuh)."""
    taps = ceil(p.get("t", 1) / p.get("stride_d", 1)) * ceil(p["r"] / p["stride_h"])
    tiles = ceil(p["stride_h"] * p.get("stride_d", 1) / t["phases"])
    filters = {"groups": 1, "group_c": p["k"], "group_k": tiles * t["mma_n"], "r": taps, "s": 1}
    return {**filters, "first_prepared": p["first_prepared"]}, taps, ceil(p["k"] / 64)


def _column_filters(p: Numbers, t: Numbers) -> Span:
    """Of float32 as a layer's filters, of 16 bits in the order of fragments."""
    filters, taps, chunks = _columns(p, t)
    item = BYTES[p["element"]]
    return 0, item * filters["group_k"] * taps * (p["k"] if item == 4 else 64 * chunks)


def _col2im(p: Numbers, t: Numbers) -> Span:
    return _split(_columns(p, t)[0], t) if BYTES[p["element"]] == 4 else _column_filters(p, t)


def _phases(p: Numbers, t: Numbers) -> Span:
    """The rearranged filters of the phases of a launch, one after the other."""
    first, item = p["first_weight"], BYTES[p["element"]]
    return item * first, item * (first + p["phases_h"] * p["phases_w"] * _weights(p))


def _packed_nchw(p: Numbers, t: Numbers) -> Span:
    channels = 16 * ceil(p["group_c"] / 16)
    taps = p["layer_r"] * p["layer_s"] if "layer_top" in p else _rows(p) * p["s"]  # of all phases of a gradient
    packed = p["groups"] * ceil(p["group_k"] / t["filters"]) * t["filters"] * channels * taps
    return 2 * p["first_prepared"], 2 * (p["first_prepared"] + packed)


def _winograd(p: Numbers, t: Numbers) -> Span:
    """The transformed filters (`FilterBlocks` in winograd_tiles.cuh)."""
    height, width = p["tile_h"] - p["out_h"] + 1, p["tile_w"] - p["out_w"] + 1
    transforms = p.get("t", 1) * ceil(p["r"] // height / p["taps"]) * p["taps"] * ceil(p["s"] / width)
    floats = p["groups"] * transforms * p["padded_c"] * p["states"] * p["padded_k"]
    return 4 * p["prepared_offset"], 4 * (p["prepared_offset"] + floats)


def _image_slots(p: Numbers, t: Numbers) -> Span:
    channels = 64 * t["warpgroups"]
    tiles = p["r"] * ceil(p["s"] / t["taps"]) * ceil(p["group_c"] / channels) * ceil(p["group_k"] / 64) * p["groups"]
    slots = 2 * t["blocks"] if t["direct"] else t["blocks"] + tiles - 1
    return 0, 4 * slots * t["taps"] * channels * 64


def _partial_sums(p: Numbers, t: Numbers) -> Span:
    return 0, 4 * t["split_k"] * _weights(p)


def _windows(p: Numbers, t: Numbers) -> Span:
    """The im2win tensor of one image."""
    return 0, 4 * p["c"] * p["p"] * p["columns"] * p["r"]


def _table(t: Numbers) -> int:
    """Twiddle factors of all levels of a transform (`Transform::table`)."""
    length, places = t["length"], 0
    while length > t["elements"]:
        places += length
        length //= t["elements"]
    return places


def _spectra_of_lines(p: Numbers, t: Numbers) -> Span:
    """Of the filter's pieces: of its rows, then of its columns."""
    pieces = p["rank"] * (p["row_parts"] + p["column_parts"]) if "column_parts" in p else p["rank"] * p["row_parts"]
    if "outputs" in p and "row_parts" in p:  # the column pass
        pieces += p["rank"] * p["parts"]
    return 0, 2 * BYTES[p["sum"]] * (_table(t) + pieces * t["length"])


def _spectra_of_rows(p: Numbers, t: Numbers) -> Span:
    rank = p["grid"] // (p["segments"] * p["groups"])
    return 0, 2 * BYTES[p["sum"]] * (_table(t) + rank * p["parts"] * t["length"])


def _rows_of_lines(p: Numbers, t: Numbers) -> Span:
    """What the row pass writes: of each product the rows of a strip of columns."""
    rank = p["grid"] // (p["segments"] * p["groups"])
    last = rank * p["images"] * p["height"] - 1
    return 0, BYTES[p["sum"]] * (last * p["pitch"] + p["columns"] * p["channels"])


def _columns_of_lines(p: Numbers, t: Numbers) -> Span:
    """What the column pass reads of it; its columns are elements."""
    last = p["rank"] * p["images"] * p["height"] - 1
    return 0, BYTES[p["sum"]] * (last * p["pitch"] + p["columns"])


def _spectra_of_tiles(p: Numbers, t: Numbers) -> Span:
    n, rows = t["length"], t["length"]
    filters = p["grid"] // p["groups"] if "groups" in p else p["grid"] // p["r"]
    if "filter" in p:
        filters = p["filter"] + 1
    elif "groups" not in p:
        rows = p["r"]
    return 0, 2 * BYTES[p["sum"]] * (_table(t) + ((filters - 1) * n + rows) * n)


def _twiddles(p: Numbers, t: Numbers) -> Span:
    return 0, 2 * BYTES[p["sum"]] * _table(t)


def _tiles(p: Numbers, t: Numbers) -> Span:
    """Spectra of pairs of tiles, and results of one filter of several beside them."""
    n = t["length"]
    rows = n * (p["grid"] // p["groups"]) if "groups" in p else p["grid"]
    if "out_rows" in p and "filter" in p:
        rows = (p["grid"] // p["out_rows"] - 1) * n + p["out_rows"]
    return 0, 2 * BYTES[p["sum"]] * (p.get("beside", 0) + rows * n)


#: What transforms reach of spectra, and of their workspace.
TRANSFORMS: dict[str, tuple[Callable[[Numbers, Numbers], Span], Callable[[Numbers, Numbers], Span]]] = {
    "fourier_lines_prepare": (_spectra_of_lines, _rows_of_lines),
    "fourier_lines_rows": (_spectra_of_rows, _rows_of_lines),
    "fourier_lines_columns": (_spectra_of_lines, _columns_of_lines),
    "fourier_tiles_prepare_rows": (_spectra_of_tiles, _tiles),
    "fourier_tiles_prepare_columns": (_spectra_of_tiles, _tiles),
    "fourier_tiles_rows": (_twiddles, _tiles),
    "fourier_tiles_columns": (_spectra_of_tiles, _tiles),
    "fourier_tiles_results": (_twiddles, _tiles),
}
#: The launches that pack filters for what splits float32.
PACKING = ("largest_channels", "tensor_filters", "speculative_filters", "validate_filters")
#: What a kernel reaches of the scratch memory that it takes a pointer to.
SPANS: dict[str, Callable[[Numbers, Numbers], Span]] = {
    "gradient_filters": _rearranged,
    "round_filters": lambda p, t: (0, 4 * p["elements"]),
    "column_filters": _column_filters,
    "tensor_gemm_sync_col2im": _col2im,
    **dict.fromkeys(("implicit_gemm", "native_gemm_sync"), _phases),
    "pack_filters": _packed_nchw,
    "native_gemm_nchw": _packed_nchw,
    **dict.fromkeys(("winograd1d", "winograd1d_filters", "winograd2d", "winograd2d_filters"), _winograd),
    **dict.fromkeys(("tensor_gemm", "tensor_winograd", "tensor_gemm_sync"), _split),
    **dict.fromkeys(PACKING, _split),
    **dict.fromkeys(("tensor_weight_images", "sum_image_slots"), _image_slots),
    **dict.fromkeys(("depthwise_weight", "depthwise_weight_large"), _partial_sums),
    **dict.fromkeys(("implicit_gemm_weight", "tensor_weight"), _partial_sums),
    **dict.fromkeys(("native_weight_nhwc", "native_weight_nchw", "native_weight_kmajor"), _partial_sums),
    **dict.fromkeys(("native_weight_groups", "native_weight_rows", "native_weight_sync", "sum_split_k"), _partial_sums),
    **dict.fromkeys(("im2win_transform", "im2win", "im2win_basic"), _windows),
}


def _of_map(spec: TensorMap) -> Span:
    strides = (spec.element_bytes, *spec.strides)
    return 0, sum((size - 1) * step for size, step in zip(spec.shape, strides, strict=True)) + spec.element_bytes


def _reached(launch: Launch, batch: int) -> dict[str, Span]:
    """What a launch reaches of each array, as far as it is known: scratch memory, and what tensor maps describe."""
    reached: dict[str, Span] = {}
    for each in launch.arguments:
        if isinstance(each, TensorMap):  # several where a launch computes several phases
            first, end = _of_map(each)
            before = reached.get(each.role, (first, end))
            reached[each.role] = min(first, before[0]), max(end, before[1])
        elif isinstance(each, Pointer) and each.role in SCRATCH:
            given = {a.name: a.value for a in launch.arguments if isinstance(a, Number)}
            numbers = {**dict(launch.problem), **given, "grid": launch.grid}
            spans = TRANSFORMS.get(launch.symbol)
            span = SPANS[launch.symbol] if spans is None else spans[each.role == "workspace"]
            first, end = span(numbers, dict(launch.tuning))
            reached[each.role] = first, end * batch if launch.symbol.startswith("im2win") else end
    return reached


def _read(launch: Launch, reached: dict[str, Span]) -> Iterator[tuple[str, Span]]:
    """What it reads of scratch memory."""
    p = dict(launch.problem)
    if launch.symbol in PACKING and all(each.name != "w" for each in launch.arguments):
        yield "prepared", _rearranged({**p, "element": p["filter"]}, {})
    for each in launch.arguments:
        if not isinstance(each, Number) and each.role in SCRATCH and not each.written:
            yield each.role, reached[each.role]


def faults(problem: Problem, plan: Plan) -> list[str]:
    """What the launches of a plan reach of scratch memory, or by tensor maps, that is not there, in words; and what
    they read of scratch memory that none before them has written."""
    found: list[str] = []
    room = {**array_bytes(problem), "workspace": plan.workspace_bytes, "prepared": plan.prepared_bytes}
    for way in {plan.prepare + plan.launches, plan.every_launch}:
        there = dict.fromkeys(SCRATCH, 0)
        for launch in way:
            reached = _reached(launch, problem.images)
            for role, (first, end) in reached.items():
                if not 0 <= first < end <= room[role]:
                    found.append(f"{launch.symbol} reaches bytes {first} to {end} of {role}, which has {room[role]}")
            for role, (_, end) in _read(launch, reached):
                if end > there[role]:
                    found.append(f"{launch.symbol} reads {role} up to byte {end}, and {there[role]} are written")
            for each in launch.arguments:
                if isinstance(each, Pointer) and each.written and each.role in SCRATCH:
                    there[each.role] = max(there[each.role], reached[each.role][1])
    return found
