"""Every kernel compiles for every architecture, and the compiler's own figures keep what the design promises.

NVRTC needs no GPU.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from leanconv.bench.suites import LAYOUTS
from leanconv.images.borders import BORDERS
from leanconv.kernels.common.layers import activation_type
from leanconv.kernels.winograd_matrices import WIDTHS
from leanconv.options import ACTIVATIONS
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import CompileError, compile_launch, compile_source, source
from leanconv.words import parse_problem
from tests import proof, selection
from tests.cases import TARGETS, filter_problem
from tests.variants import NAMED, SPLIT_K, VARIANTS

pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")

#: Layers and filters as people use them: first layers, deep ones, pointwise, depthwise, strided.
USUAL = {
    "first": ConvProblem(128, 3, 227, 227, 96, 11, 11, stride=(4, 4)),
    "wide-image": ConvProblem(128, 64, 112, 112, 128, 3, 3),
    "deep": ConvProblem(128, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu"),
    "pointwise": ConvProblem(32, 256, 14, 14, 1024, 1, 1),
    "strided": ConvProblem(32, 128, 56, 56, 256, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1)),
    "depthwise": ConvProblem(32, 96, 56, 56, 96, 3, 3, padding=(1, 1, 1, 1), groups=96),
    "squeeze": ConvProblem(32, 96, 1, 1, 4, 1, 1, bias=True),
    "depthwise-large": ConvProblem(32, 96, 56, 56, 96, 31, 31, padding=(15, 15, 15, 15), groups=96),
    "depthwise-signal": ConvProblem(4, 768, 1, 2048, 768, 1, 128, padding=(0, 0, 127, 0), groups=768),
    "depthwise-causal": ConvProblem(4, 768, 1, 2048, 768, 1, 4, padding=(0, 0, 3, 0), groups=768),
}
USUAL |= {
    f"{name}-{layout.lower()}": replace(problem, layout=layout)
    for layout in ("NHWC", "CHWN")
    for name, problem in tuple(USUAL.items())
}
# Elements of 16 bits: one of the types for each layer, for the kernels differ in one conversion.
USUAL |= {
    f"{name}-{dtype}{last}": replace(USUAL[name + last], dtype=dtype)
    for name, dtype in (("deep", "float16"), ("strided", "bfloat16"))
    for last in ("", "-nhwc", "-chwn")
}
USUAL |= {
    "deep-int8": replace(USUAL["deep"], dtype="int8"),
    "deep-int8-nhwc": replace(USUAL["deep-nhwc"], dtype="int8"),
    "strided-uint8-nhwc": replace(USUAL["strided-nhwc"], dtype="uint8"),
    "first-uint8-nhwc": replace(USUAL["first-nhwc"], dtype="uint8"),
    "loose-int8-nhwc": ConvProblem(32, 99, 56, 56, 200, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype="int8"),
    "pointwise-uint8-chwn": replace(USUAL["pointwise-chwn"], dtype="uint8"),
}
USUAL["gradient-float16"] = replace(USUAL["strided-bfloat16"], dtype="float16", op="dgrad")
# Gradients of depthwise layers, small filters and large ones.
DEEP = ConvProblem(32, 96, 56, 56, 96, 7, 7, padding=(3, 3, 3, 3), groups=96)
for layout in ("NCHW", "NHWC"):
    large = replace(USUAL["depthwise-large"], dtype="float32" if layout == "NCHW" else "float16")
    gradients = (
        ("wgrad", USUAL["depthwise"]),
        ("wgrad", DEEP),
        ("wgrad", large),
        ("dgrad", replace(DEEP, stride=(2, 2))),
    )
    for op, layer in gradients:
        name = f"depthwise-{op}-{layer.r}x{layer.s}-{layout.lower()}"
        USUAL[name] = replace(layer, op=op, layout=layout)
# And of dense ones.
USUAL["weight-nhwc"] = ConvProblem(64, 128, 28, 28, 128, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
USUAL["weight"] = replace(USUAL["weight-nhwc"], layout="NCHW")
USUAL["weight-first"] = replace(USUAL["first"], op="wgrad")
# Groups of few channels in 16 bits and in TF32, and their gradients.
GROUPS = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), groups=32, layout="NHWC", dtype="float16")
USUAL |= {
    "groups-fours-nhwc": replace(GROUPS, groups=64),
    "groups-24": ConvProblem(32, 336, 14, 14, 336, 3, 3, padding=(1, 1, 1, 1), groups=14, dtype="bfloat16"),
    "groups-dgrad-nhwc": replace(GROUPS, stride=(2, 2), op="dgrad"),
    "groups-wgrad-nhwc": replace(GROUPS, op="wgrad"),
}
GROUPS_TF32 = replace(GROUPS, dtype="float32", precision="tf32")
USUAL |= {
    f"groups-tf32-{name}{end}": replace(problem, layout=layout)
    for end, layout in (("", "NCHW"), ("-nhwc", "NHWC"))
    for name, problem in {
        "fours": replace(GROUPS_TF32, groups=64),
        "sixties": replace(GROUPS_TF32, groups=4, bias=True, add=True),
        "dgrad": replace(GROUPS_TF32, groups=16, stride=(2, 2), op="dgrad"),
        "wgrad": replace(GROUPS_TF32, op="wgrad"),
        "wgrad-sixties": replace(GROUPS_TF32, groups=4, op="wgrad"),
    }.items()
}
# First layers of 16 bits, and their gradients.
STEM = ConvProblem(32, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3), layout="NHWC", dtype="float16")
USUAL |= {"stem": STEM, "stem-wgrad": replace(STEM, op="wgrad"), "stem-dgrad": replace(STEM, op="dgrad")}
USUAL["stem-nchw"] = replace(STEM, layout="NCHW", bias=True, add=True)
# Images that do not come in fours are copied one by one.
USUAL["deep-chwn-odd"] = replace(USUAL["deep-chwn"], n=127)
USUAL |= {
    f"single-channel{last}": ConvProblem(1, 1, 1024, 1024, 32, 3, 3, layout=layout)
    for last, layout in (("", "NCHW"), ("-nhwc", "NHWC"))
}
# Layers of volumes: depthwise ones and their gradients, patches, few pixels of many channels.
SLICES = ConvProblem(8, 54, 40, 40, 54, 3, 3, padding=(1, 1, 1, 1), groups=54, d=13, t=3, padding_d=(1, 1))
FEW_PIXELS = ConvProblem(8, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), d=2, t=3, padding_d=(1, 1), dtype="float16")
USUAL |= {
    "volume-depthwise": SLICES,
    "volume-depthwise-nhwc": replace(SLICES, layout="NHWC", dtype="float16"),
    "volume-depthwise-dgrad": replace(SLICES, stride=(2, 2), op="dgrad"),
    "volume-depthwise-wgrad-nhwc": replace(SLICES, op="wgrad", layout="NHWC"),
    "volume-patches": ConvProblem(4, 3, 224, 224, 96, 4, 4, stride=(4, 4), d=32, t=2, stride_d=2, op="dgrad"),
    "volume-3x3x3": replace(SLICES, c=128, k=128, groups=1, h=28, w=28, d=8, bias=True),
    "volume-few-pixels": FEW_PIXELS,
    "volume-few-pixels-wgrad-nhwc": replace(FEW_PIXELS, layout="NHWC", op="wgrad"),
}
USUAL["filter-several"] = filter_problem(1, 4096, 4096, 5, 5, filters=8)
USUAL |= {
    f"filter-{size}x{size}": filter_problem(1, 8192, 8192, size, size, border=tuple(BORDERS)[size % len(BORDERS)])
    for size in (3, 5, 7, 9, 15, 20, 32)
}
USUAL |= {
    "filter-int32": filter_problem(1, 4096, 4096, 5, 5, dtype="int32"),
    "filter-row": filter_problem(1, 4096, 4096, 1, 31),
    "filter-column": filter_problem(1, 4096, 4096, 31, 1),
}
USUAL |= {
    f"filter-{dtype}-{size}x{size}x{channels}": filter_problem(
        1,
        4096,
        4096,
        size,
        size,
        dtype=dtype,
        channels=channels,
        border=tuple(BORDERS)[(size + channels) % len(BORDERS)],
    )
    for dtype, channels in (("uint8", 1), ("uint8", 3), ("int16", 4), ("float16", 1), ("float64", 1))
    for size in (3, 7)
}
USUAL["filter-rgb-13x13"] = filter_problem(1, 4096, 4096, 13, 13, channels=3)
USUAL["filter-volume"] = filter_problem(1, 256, 256, 3, 3, d=256, kd=3, anchor_z=1, dtype="uint16")
USUAL["filter-float64-32x32"] = filter_problem(1, 4096, 4096, 32, 32, dtype="float64", channels=5)
USUAL["filter-types"] = filter_problem(1, 4096, 4096, 5, 5, dtype="int32", out_dtype="uint8", filters=4, valid=True)
USUAL |= {
    f"filter-separable-{size}x{size}": filter_problem(1, 8192, 8192, size, size, rank=1) for size in (15, 31, 63, 127)
}
USUAL |= {
    "filter-separable-uint8": filter_problem(1, 4096, 4096, 15, 15, rank=1, dtype="uint8"),
    "filter-separable-uint8-rgb": filter_problem(1, 4096, 4096, 31, 31, rank=1, dtype="uint8", channels=3),
    "filter-separable-float64": filter_problem(1, 4096, 4096, 31, 31, rank=1, dtype="float64"),
    "filter-median-3x3": filter_problem(1, 8192, 8192, 3, 3, reduction="median", dtype="uint8"),
    "filter-median-5x5": filter_problem(1, 8192, 8192, 5, 5, reduction="median"),
    "filter-median-7x7": filter_problem(1, 8192, 8192, 7, 7, reduction="median", dtype="uint8"),
    "filter-box-63x63": filter_problem(1, 8192, 8192, 63, 63, reduction="sum"),
    "filter-box-255x255": filter_problem(1, 8192, 8192, 255, 255, reduction="sum"),
    "filter-box-uint8": filter_problem(1, 8192, 8192, 15, 15, reduction="max", dtype="uint8"),
    "filter-box-float64": filter_problem(1, 8192, 8192, 31, 31, reduction="sum", dtype="float64"),
    "filter-separable-401x401": filter_problem(1, 8192, 8192, 401, 401, rank=1),
    "filter-101x101": filter_problem(1, 8192, 8192, 101, 101, border="constant"),
    "filter-uint8-rgb-65x65": filter_problem(1, 4096, 4096, 65, 65, dtype="uint8", channels=3),
    "filter-float64-65x65": filter_problem(1, 4096, 4096, 65, 65, dtype="float64"),
    "filter-separable-rank-3": filter_problem(1, 4096, 4096, 21, 21, rank=3, border="constant"),
}
ACCEPTED = [
    pytest.param(a, problem, id=f"{a.stem}-{name}")
    for a in VARIANTS
    for name, problem in USUAL.items()
    if not a.reasons(problem, TARGETS[0])
]


EXHAUSTIVE = pytest.mark.exhaustive


@cache
def compiled(text, symbol, arch):
    """Many launches are alike in this file: filters and tensors are prepared for many configurations in one way."""
    return compile_source(text, symbol, arch)


def compile_plan(algorithm, problem, config, target):
    """Compile every launch and hold the compiler's figures against what the launch asks of the machine."""
    plan = algorithm.plan(problem, config, target)
    figures = [compiled(source(launch), launch.symbol, target.arch) for launch in plan.all_launches]
    for launch, figure in zip(plan.all_launches, figures, strict=True):
        assert not figure.advice, figure.advice
        what = f"{algorithm.stem} {config} on {target.arch}: {figure.registers} registers"
        assert len(figure.cubin) > 1000 and figure.cubin[:4] == b"\x7fELF", what
        # registers are allocated to warps in portions of 256
        per_warp = -(-figure.registers * 32 // 256) * 256
        assert 0 < figure.registers <= 255, what
        assert per_warp * (launch.block // 32) * launch.min_blocks <= target.registers_per_multiprocessor, what
        assert launch.shared_bytes <= target.shared_per_block, what
    return figures


#: Most bytes that kernels of Winograd's spill. Two blocks of 64 sums a thread fill 128 registers to the last; the
#: compiler for sm_100a allots a few otherwise, which has not been measured on such a GPU.
WINOGRAD_SPILLS = {"sm_80": 0, "sm_90a": 0, "sm_100a": 48, "sm_120": 0}
#: And depthwise_weight's with 512 threads, which have 128 registers each: 222 µs with 248 bytes spilled, where 256
#: threads, which spill nothing, take 266 (96 x 56 x 56 with 7x7 filters on an H200).
MANY_THREADS, MANY_THREADS_SPILL = 512, 280


#: And of tensor cores. A consumer's 232 registers hold 128 sums, 64 partial sums and 32 fragments (or 32 and 32) beside
#: its addresses: what it spills is needed once a tile. Kernels that spill 12 to 40 bytes are as fast as others.
#: tensor_winograd has 128 sums and 64 fragments: some sums spill once a stage (NVRTC 13.5), or 0 to 48 bytes (13.0).
#: tensor_gemm_sync fills 255 registers to the last. separable_tensor on an H200 is faster with a third block on a
#: multiprocessor than without what spills.
WARP_SPILLS = 8
#: 96 sums and 64 fragments of tensor_gemm_sync_col2im, beside what the next fragments take: what spills is needed once
#: a stage of 600 products. Two or three blocks on a multiprocessor of the kernels for rows of windows likewise.
COLUMN_SPILLS = 200
#: tensor_filter fills them too where filters have many rows; what it spills is needed once for a row of some hundred
#: instructions and products. The compiler for sm_120 spills more of 7x7 of float16, with edges, which has not been
#: measured on such a GPU.
FILTER_SPILLS, FILTER_SPILLS_120 = 64, 256
TENSOR_SPILLS = {
    "tensor_gemm": 48,
    "tensor_weight": 48,
    "tensor_weight_split_k": 48,
    "tensor_weight_images": 48,
    "tensor_winograd": 112,
    "native_gemm_nchw": 48,
    "separable_tensor": 160,
    # in NCHW, on sm_100a and sm_120: all pixels of four units are loaded ahead
    "native_gemm_groups": 88,
    "tensor_gemm_sync": WARP_SPILLS,
    "tensor_gemm_sync_col2im": COLUMN_SPILLS,
    "native_gemm_rows": COLUMN_SPILLS,
    # elements that were loaded a step ahead, one by one
    "native_gemm_sync": 48,
    "native_weight_sync": 48,
    "native_weight_sync_split_k": 48,
    "native_weight_rows": COLUMN_SPILLS,
    # a pair of lines of 16 numbers takes 64 registers of a thread's 128
    "fourier_lines": 40,
    "fourier_tiles": 40,
    "tensor_filter": FILTER_SPILLS,
}


def check_spills(algorithm, problem, config, target):
    most = WINOGRAD_SPILLS[target.arch] if algorithm.stem.startswith("winograd") else 0
    most = TENSOR_SPILLS.get(algorithm.stem, most)
    if algorithm.stem == "tensor_filter" and target.arch == "sm_120":
        most = FILTER_SPILLS_120
    if algorithm.stem.startswith("depthwise_weight") and config.threads == MANY_THREADS:
        most = MANY_THREADS_SPILL
    for figure in compile_plan(algorithm, problem, config, target):
        assert max(figure.spill_bytes, figure.stack_bytes) <= most, (
            f"{config} on {target.arch} spills {figure.spill_bytes} bytes, with {figure.stack_bytes} of stack"
        )


def runs_on(algorithm, problem, target):
    """What only some GPUs have, such as products of warpgroups, does not compile for others."""
    return not algorithm.reasons(problem, target)


def has_config(algorithm, problem, target):
    """A gradient's variant without a workspace has none where GPUs have no clusters to share the reduction."""
    runs = runs_on(algorithm, problem, target)
    return runs and (algorithm.stem not in SPLIT_K or any(True for _ in algorithm.configs(problem, target)))


def guesses():
    """Every layer for every GPU; in ``make test`` every layer, every algorithm, and families in every type, those of
    float32 cores in every layout, for one of the GPUs; of image filters what unrolls otherwise."""
    pairs = [(entry, target) for entry, target in product(ACCEPTED, TARGETS) if has_config(*entry.values, target)]
    found = [(*entry.values, target, f"{entry.id}-{target.arch}") for entry, target in pairs]

    def differs(each):
        algorithm, problem, target, name = each
        layout = getattr(problem, "layout", "")
        if isinstance(problem, ConvProblem):
            # the layer without its layout
            end = f"-{layout.lower()}"
            yield name.removeprefix(f"{algorithm.stem}-").removesuffix(f"-{target.arch}").removesuffix(end)
        else:
            yield from of_filter(algorithm, problem)
        # by turns
        if (TARGETS.index(target) + len(algorithm.stem)) % 4 == 0:
            yield algorithm.family, target.arch
        yield algorithm.stem
        if algorithm.family not in selection.TENSOR_CORES:
            yield algorithm.family, layout
        yield algorithm.family, problem.dtype

    def of_filter(algorithm, problem):
        """What else a kernel does than filter images of float32, once; how far it unrolls, which transforms do not."""
        stem = algorithm.stem
        yield from ((stem, problem.sums), (stem, "channels", problem.channels > 1), (stem, "volume", problem.is_volume))
        if algorithm.name != "fourier":
            yield from ((stem, "rows", problem.kh == 1, min(2, problem.kh // 16)), (stem, "more", problem.filters > 1))
        if problem.reduction == "median":  # a network for each size
            yield stem, problem.kh

    def work(each):
        """What unrolls most takes the compiler longest: layers that two algorithms stand for are the others'."""
        algorithm, problem, *_ = each
        if isinstance(problem, ConvProblem):
            return ("winograd" in algorithm.stem) + (algorithm.family in selection.TENSOR_CORES)
        return -problem.kh * problem.kw  # what unrolls further spills first

    return selection.marked(found, selection.cover(found, differs, work), lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("algorithm", "problem", "target"), guesses())
def test_best_guess_compiles_without_spills(algorithm, problem, target):
    config = next(iter(algorithm.configs(problem, target)))
    check_spills(algorithm, problem, config, target)


#: What layers with a residual spill: 64 registers of residuals are under way beside a consumer's 128 sums, and what is
#: spilled is needed once a tile. Explored (H200, 479ad8cc): eight registers, and nothing spilled, took twice as long.
RESIDUAL_SPILLS = {"tensor_gemm": 112, "tensor_gemm_sync": 32, "native_gemm_nchw": 120, "native_gemm_tf32": 40}
RESIDUALS = [
    # and the GPU that `make test` compiles it for
    (NAMED[stem], parse_problem(f"conv:n64,c{c},h{h},w{h},k{k},r1,s1,{more},bias,relu"), usual if k == 256 else "")
    for stem, more, usual in (
        ("tensor_gemm", "NHWC", "sm_90a"), ("tensor_gemm", "NCHW", ""), ("tensor_gemm_sync", "NHWC", "sm_80"),
        ("tensor_gemm_sync", "NCHW", ""), ("native_gemm_tf32", "NHWC,tf32", "sm_90a"),
        ("native_gemm_16bit", "NHWC,float16", "sm_90a"), ("native_gemm_nchw", "NCHW,float16", "sm_90a"),
    )
    for c, h, k in ((64, 56, 256), (512, 7, 2048))
]  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "problem", "target"),
    [
        pytest.param(
            algorithm,
            problem,
            target,
            id=f"{algorithm.stem}-{problem.layout}-{problem.k}-{target.arch}",
            marks=() if target.arch == usual else EXHAUSTIVE,
        )
        for algorithm, problem, usual in RESIDUALS
        for target in TARGETS
        if target.arch in ("sm_80", "sm_90a", "sm_120") and runs_on(algorithm, problem, target)
    ],
)
def test_large_layers_with_residuals_spill_little(algorithm, problem, target):
    most = RESIDUAL_SPILLS.get(algorithm.stem, 0)
    for more in ({}, {"add": True}, {"scale": True, "add": True}):
        fused = replace(problem, **more)
        config = min(algorithm.timed(fused, target), key=lambda each: each[0])[1]
        for figure in compile_plan(algorithm, fused, config, target):
            assert max(figure.spill_bytes, figure.stack_bytes) <= most, (more, config)


@pytest.mark.parametrize("layout", ["NHWC", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("NCHW", "CHWN"))])
def test_no_tile_spills_elements_of_16_bits(layout):
    """Padded layers ask most of the registers. Tiles whose threads may have 168 of them or fewer."""
    algorithm = NAMED["implicit_gemm"]
    problem = replace(USUAL["deep-float16"], layout=layout)
    tight = [
        config
        for config in algorithm.configs(problem, TARGETS[0])
        if config.split == 1 and config.tile_k >= 64 and config.threads * config.min_blocks >= 384
    ]
    assert len(tight) >= 3
    for config in tight:
        check_spills(algorithm, problem, config, TARGETS[0])


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.arch, marks=() if target.arch in ("sm_80", "sm_120") else EXHAUSTIVE)
        for target in (*TARGETS, replace(TARGETS[3], arch="sm_89"))
    ],
)
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *(
            pytest.param(*each, marks=EXHAUSTIVE)
            for each in (("NHWC", "fp32"), ("NCHW", "fp32"), ("CHWN", "fp32"), ("NHWC", "tf32"))
        ),
    ],
)
def test_tiles_of_warp_products_do_not_spill(layout, precision, target):
    algorithm = NAMED["tensor_gemm_sync"]
    problem = replace(USUAL["deep"], layout=layout, precision=precision)
    figures = [
        (config, figure)
        for config in algorithm.configs(problem, target)
        for figure in compile_plan(algorithm, problem, config, target)
    ]
    assert len(figures) >= 3
    for config, figure in figures:
        spilled = max(figure.spill_bytes, figure.stack_bytes)
        assert spilled <= WARP_SPILLS, f"{config} spills {spilled} bytes"


def winograd_layers():
    """A layer for each of the eleven kernels of Im2col-Winograd, as large as those of its suite, for every GPU.

    In ``make test`` each kernel once, each layout for each GPU.
    """
    found = []
    for alpha, widths in WIDTHS.items():
        for width, layout, target in product(widths, ("NHWC", "NCHW"), TARGETS):
            precision = "relaxed" if alpha == 16 or (alpha, width) == (8, 2) else "fp32"
            padding = (width // 2, (width - 1) // 2) * 2
            layer = ConvProblem(128, 64, 48, 48, 64, width, width, padding=padding, layout=layout, precision=precision)
            found.append((alpha, layer, target, f"{alpha}-{width}-{layout}-{target.arch}"))
    chosen = selection.cover(found, lambda each: ((each[0], each[1].s), (each[1].layout, each[2].arch)))
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


def wide_layers():
    """Layers of wide filters, whose rows are cut into blocks, for every GPU; in ``make test`` each layout and GPU."""
    found = []
    for (r, s, block), layout, target in product(((9, 9, 5), (8, 8, 4), (31, 31, 4), (9, 9, 3)), LAYOUTS, TARGETS):
        padding = (r // 2, (r - 1) // 2, s // 2, (s - 1) // 2)
        layer = ConvProblem(128, 64, 48, 48, 64, r, s, padding=padding, layout=layout)
        found.append((block, layer, target, f"{r}x{s}-{layout}-{target.arch}"))
    chosen = selection.cover(found, lambda each: ((each[0], each[1].s), (each[1].layout,), (each[2].arch,)))
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("block", "problem", "target"), wide_layers())
def test_every_kernel_of_column_blocks_compiles_without_spills(block, problem, target):
    algorithm = NAMED["winograd1d"]
    config = next(c for c in algorithm.configs(problem, target) if c.column_block == block)
    check_spills(algorithm, problem, config, target)


@pytest.mark.parametrize(("alpha", "problem", "target"), winograd_layers())
def test_every_kernel_of_im2col_winograd_compiles_without_spills(alpha, problem, target):
    algorithm = NAMED["winograd1d"]
    config = next(c for c in algorithm.configs(problem, target) if c.states == alpha and not c.column_block)
    check_spills(algorithm, problem, config, target)


def extremes():
    """Layouts on one GPU each, the one with the most shared memory for a block and the one with the least."""
    for target, names in ((TARGETS[0], ("-deep", "-filter-9x9")), (TARGETS[3], ("-deep-nhwc", "-filter-32x32"))):
        for found in ACCEPTED:
            if found.id.endswith(names) and runs_on(*found.values, target):
                yield pytest.param(*found.values, target, id=f"{found.id}-{target.arch}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("algorithm", "problem", "target"), list(extremes()))
def test_extreme_configs_compile(algorithm, problem, target):
    for config in proof.extreme_configs(algorithm, problem, target):
        compile_plan(algorithm, problem, config, target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_every_activation_compiles_without_spills(target):
    types = [activation_type(each) for each in (*ACTIVATIONS, "leaky_relu:-0.3")]
    calls = " ".join(f"x[{i}] = {each}::of(x[{i}]);" for i, each in enumerate(types))
    text = f'#include <device/epilogue.cuh>\nextern "C" __global__ void every(float* x) {{ {calls} }}\n'
    compiled = compile_source(text, "every", target.arch)
    assert compiled.spill_bytes == compiled.stack_bytes == 0 and compiled.registers <= 64


def test_figures_are_the_compilers_own():
    """A kernel that must spill says so, and one that needs next to nothing says that."""
    big = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) big(float* y) { float a[64];\n'
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) a[i] = y[i * 32 + threadIdx.x];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) y[i * 32 + threadIdx.x] = a[63 - i] * a[i]; }"
    )
    spilled = compile_source(big, "big", "sm_90a")
    assert spilled.spill_bytes > 0 and spilled.registers <= 32
    small = compile_source('extern "C" __global__ void small(int* y) { y[0] = 1; }', "small", "sm_90a")
    assert small.spill_bytes == small.stack_bytes == 0 and 0 < small.registers < 32


def test_a_kernel_that_does_not_compile_shows_log_options_and_numbered_source():
    text = 'extern "C" __global__ void bad(float* y) {\n  y[0] = undeclared_name;\n}\n'
    with pytest.raises(CompileError) as failure:
        compile_source(text, "bad", "sm_90a")
    message = str(failure.value)
    assert 'identifier "undeclared_name" is undefined' in message
    assert "--gpu-architecture=sm_90a" in message and "--std=c++17" in message
    assert "  2    y[0] = undeclared_name;" in message
    assert str(pickle.loads(pickle.dumps(failure.value))) == message, "as from a process that compiles for others"


def test_a_tuning_that_a_kernel_cannot_serve_is_refused_by_its_static_assert():
    algorithm = NAMED["implicit_gemm"]
    problem = USUAL["deep"]
    config = replace(next(iter(algorithm.configs(problem, TARGETS[0]))), stages=1)
    with pytest.raises(CompileError, match="one stage is computed on while others are under way"):
        compile_launch(algorithm.plan(problem, config, TARGETS[0]).launches[0], "sm_90a")
