"""What is asked of all kernels on tensor cores alike: errors on data of every range, what is no number, tiles, choice.

What only one of them has is in the tests of its name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.cpu import oracle
from leanconv.dtypes import DTYPES
from leanconv.kernels.contract import Config
from leanconv.kernels.hopper_native import native_gemm_16bit, native_gemm_tf32
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import cases_tensor, cases_weight, proof, selection
from tests.cases import KINDS, TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.cases_tensor import TF32_CASES
from tests.kernels.breaks import scales
from tests.kernels.patching import Patch, broken_kernels
from tests.kernels.tensor_cores import (
    CASES,
    GRADIENT,
    HOPPER,
    KERNELS,
    LAYERS,
    ONE_BY_ONE,
    WAYS,
    WEIGHT,
    Way,
    layer_of,
)
from tests.variants import NAMED

pytestmark = pytest.mark.usefixtures("one_block_validates")

PROBLEMS: dict[str, Any] = {case.name: case.problem for case in CASES}


def test_each_kernel_has_a_layer() -> None:
    assert {stem.removesuffix("_split_k") for stem in (a.stem for a in KERNELS)} == set(LAYERS)
    for algorithm in KERNELS:
        assert not algorithm.reasons(layer_of(algorithm), TARGETS[0])


#: Of kernels of layers ``make test`` asks one where the others are very much alike.
forward_kernels = pytest.mark.parametrize(
    "name",
    ["tensor_gemm", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("tensor_gemm_sync", "tensor_winograd"))],
)

# Accuracy of the kernels that split float32.

#: Of kinds of data those that the others do not stand for, which ``make test`` tries.
TELLING = {
    "tensor_gemm_sync-nchw": ("normal", "outlier", "channels-apart"),
    "tensor_winograd-wide": ("outlier", "channels-apart"),
    "tensor_winograd-nchw": ("outlier", "channels-apart"),
    "tensor_weight": ("normal", "outlier", "filters-apart", "sparse", "tiny", "zeros", "opposed", "unseen"),
    "tensor_weight-taps": ("normal", "filters-apart", "opposed", "unseen"),
    "tensor_weight-nchw": ("normal", "filters-apart"),
    "tensor_weight_images": ("images-opposed",),
}
#: Of these only ranges that other layers of the same kernel do not have.
NOT_IN_RANGES = ("tensor_winograd-seven", "tensor_winograd-seven-nchw")


def most(name: str, kind: str) -> tuple[float, float]:
    """What a kernel may lose, in sequential float32 sums: of all results, and of the filter where it is most.

    Twice as much, on normal data no more. Winograd's two outputs are sums and differences of three rounded sums each:
    single filters, with few products that matter, lose up to 2.5 times as much. Of a hundredth of the products of a
    filter's gradient, eleven a weight, a sequential sum loses next to nothing, and of log-normal data one product may
    be nearly all that a filter has.
    """
    if name.startswith("tensor_winograd"):
        return 1, 2.5
    of_gradients = {"sparse": 3, "log-normal": 4} if name.startswith("tensor_weight") else {}
    units = {"normal": 1, **of_gradients}.get(kind, 2)
    return units, units


def _data() -> list[Any]:
    every, chosen = [], []
    for name, way in WAYS.items():
        if name not in NOT_IN_RANGES:
            ranges = cases_weight.RANGES if way.problem.op == "wgrad" else cases_tensor.RANGES
            ranges = (*ranges, "images-opposed") if name == "tensor_weight_images" else ranges
            found = [(name, kind) for kind in ranges]
            every += found
            chosen += [(name, kind) for kind in TELLING.get(name, ranges)]
    return selection.marked(every, chosen, lambda each: (each, "-".join(each)))


@pytest.mark.parametrize(("name", "kind"), _data())
def test_errors_on_data_of_every_range(name: str, kind: str) -> None:
    of_all, of_worst = WAYS[name].lost(kind)
    most_of_all, most_of_worst = most(name, kind)
    assert of_all <= most_of_all and of_worst <= most_of_worst


def _broken_scales() -> list[Any]:
    """``make test`` plays every sixth, and those of Winograd's."""
    every: list[tuple[str, str, Patch]] = [("tensor_gemm", *each) for each in scales.TENSOR_GEMM]
    for kind, taps, patch in scales.TENSOR_WEIGHT:
        every.append(("tensor_weight" if taps == 1 else "tensor_weight-taps", kind, patch))
    chosen = every[::6]
    every += [("tensor_weight_images", *each) for each in scales.TENSOR_WEIGHT_IMAGES]
    for layout, kind, patch in scales.TENSOR_WINOGRAD:
        every.append(("tensor_winograd" if layout == "NHWC" else "tensor_winograd-nchw", kind, patch))
    return selection.marked(every, chosen + every[-5:], lambda each: (each, "-".join(map(str, each))))


@pytest.mark.parametrize(("name", "kind", "patch"), _broken_scales())
def test_errors_of_broken_scales_show(name: str, kind: str, patch: Patch, tmp_path: Path) -> None:
    """What the data of other tests cannot tell: each part of the split is needed by some data."""
    assert not WAYS[name].lost(kind, broken_kernels(tmp_path, patch))[1] <= 2.5


#: The largest relative error of one product of float16 halves, which keep eleven bits.
ONE_PRODUCT = {
    "tensor_gemm": 4e-4,
    "tensor_gemm_sync": 5e-4,
    "tensor_winograd": 7e-4,
    "tensor_weight": 5e-4,
    "tensor_weight_images": 5e-4,
}


def _data_for_one_product() -> list[Any]:
    every = [("tensor_gemm", kind) for kind in (*cases_tensor.RANGES, "pixels-apart")]
    chosen = [each for each in every if each[1] in ("outlier", "channels-apart", "pixels-apart")]
    of_others = [(name, "normal") for name in ONE_PRODUCT]
    return selection.marked(
        list(dict.fromkeys(every + of_others)), chosen + of_others[:-1], lambda each: (each, "-".join(each))
    )


@pytest.mark.parametrize(("name", "kind"), _data_for_one_product())
def test_one_product_keeps_eleven_bits(name: str, kind: str) -> None:
    """On data of every range: a row's scale makes room for what is larger, and leaves four places for it at first."""
    lost = WAYS[name].lost_by_one_product(kind)
    assert lost < ONE_PRODUCT[name] and (kind != "normal" or lost > 1e-4)


@pytest.mark.parametrize(("kind", "patch"), selection.every_third(scales.ONE_PRODUCT))
def test_broken_scales_of_one_product_show(kind: str, patch: Patch, tmp_path: Path) -> None:
    kernels = broken_kernels(tmp_path, patch)
    assert not WAYS["tensor_gemm"].lost_by_one_product(kind, kernels) < ONE_PRODUCT["tensor_gemm"]


@pytest.mark.parametrize("name", ["tensor_gemm", "tensor_gemm_sync", "tensor_winograd"])
def test_an_outlier_leaves_its_neighbours_alone(name: str) -> None:
    """Also the other output of Winograd's pair, whose window does not hold it: each state has a scale of its own."""
    way = WAYS[name]
    x, w = way.drawn("outlier")
    y, reference = way.played(x, w), oracle.conv2d(way.problem, x, w)
    plain = oracle.sequential_float32(way.problem, x, w)
    unseen = np.ones(y.shape, bool)
    unseen[0, 2:5, 3:6] = False
    assert np.linalg.norm((y - reference)[unseen]) < np.linalg.norm((plain - reference)[unseen])


@forward_kernels
def test_the_order_of_the_batch_does_not_matter(name: str) -> None:
    way = WAYS[name].on(n=3)
    x, w = way.drawn("normal")
    np.testing.assert_array_equal(way.played(x[::-1].copy(), w), way.played(x, w)[::-1])


# What is no number.


def _with_no_numbers(x: np.ndarray, w: np.ndarray, op: str) -> None:
    """Pixels in the middle of a row, at its begin and at its end, and where rows and images end; of a gradient's dy."""
    n, h, _, _ = x.shape
    x[n // 2, h // 2, 0, 5] = np.inf
    if op == "fprop":
        x[0, 0, 0, 3], x[-1, -1, -1, -4] = np.inf, np.nan
    else:
        x[n // 8, -1, -5 % x.shape[2], 9], x[n // 4, 0, -1, 6] = np.inf, np.nan
        n, h, width, _ = w.shape
        w[n // 4, h // 4, width // 3, 11], w[-3, h // 2, width // 2, 20] = np.nan, -np.inf


def _no_numbers() -> dict[str, Any]:
    of_split = {name: (way, "normal") for name, way in WAYS.items() if name != "tensor_weight_images"}
    of_gradients = {
        "tensor_weight-opposed": (WEIGHT, "opposed"),
        "tensor_weight-taps-opposed": (WEIGHT.tuned(taps=3), "opposed"),
    }
    images = WAYS["tensor_weight_images"].on(n=20, h=4, w=3)
    for rows in (1, 2):
        of_gradients[f"tensor_weight_images-{rows}"] = replace(images, forced={"image_rows": rows}), "normal"
    one = {"tensor_gemm-tf32": (WAYS["tensor_gemm"].on(precision="tf32"), "normal")}
    forward = replace(cases_tensor.LAYER, n=2)
    native = {
        "native_gemm_16bit": replace(forward, dtype="float16"),
        "native_gemm_tf32": replace(forward, precision="tf32"),
        "native_gemm_nchw": PROBLEMS["float16-blocks-nchw"].plain,
        "native_weight_nhwc": PROBLEMS["float16-weight-copies-nhwc"],
        "native_weight_nchw": PROBLEMS["float16-weight-windows-nchw"],
        "native_weight_kmajor": replace(PROBLEMS["bfloat16-weight-copied-rows-nchw"], n=3, dtype="float16"),
    }
    return of_split | of_gradients | one | {name: (Way(name, problem), "normal") for name, problem in native.items()}


NO_NUMBERS = _no_numbers()


def finite(name: str, kernels: Path | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which results are finite, which ought to be, as they see numbers only; and the error of those that are both."""
    way, kind = NO_NUMBERS[name]
    x, w = way.drawn(kind)
    _with_no_numbers(x, w, way.problem.op)
    y = way.played(x, w) if kernels is None else way.played(x, w, kernels)
    bad = [(~np.isfinite(each)).astype(np.float64) for each in (x, w)]
    seen = sum(oracle.conv2d(way.last, *pair) for pair in ((bad[0], np.ones_like(w)), (np.ones_like(x), bad[1])))
    expected = seen == 0
    for each in (x, w):
        each[~np.isfinite(each)] = 0
    both = np.isfinite(y) & expected
    return np.isfinite(y), expected, oracle.relative_error(y[both], oracle.conv2d(way.last, x, w)[both])


#: Of these ``make test`` leaves out what differs from another only in the layout that it loads.
USUAL_NO_NUMBERS = [name for name in NO_NUMBERS if name not in ("tensor_gemm_sync-nchw", "tensor_weight-nchw")]


@pytest.mark.parametrize("name", selection.marked(list(NO_NUMBERS), USUAL_NO_NUMBERS, lambda name: ((name,), name)))
def test_what_is_no_number_reaches_just_the_results_that_see_it(name: str) -> None:
    """Segments see no pixel that their row does not see, rows of shared memory nothing of the next one, and zeros
    between them are no pixels."""
    found, expected, error = finite(name)
    if name.startswith("native_weight"):
        # pixels beside an edge that no window sees for some tap are multiplied by zeros for it
        assert not found[~expected].any() and np.moveaxis(found, 3, 1)[expected.all((1, 2))].all()
    else:
        np.testing.assert_array_equal(found, expected)
    problem = NO_NUMBERS[name][0].problem
    assert error < (2e-6 if (problem.dtype, problem.precision) == ("float32", "fp32") else DTYPES["float16"].roundoff)


@pytest.mark.parametrize(("name", "patch"), scales.NO_NUMBERS, ids=str)
def test_what_is_no_number_would_reach_others(name: str, patch: Patch, tmp_path: Path) -> None:
    found, expected, _ = finite(name, broken_kernels(tmp_path, patch))
    assert found.sum() < expected.sum()


@forward_kernels
def test_filters_that_are_no_numbers_leave_the_others_alone(name: str) -> None:
    way = WAYS[name]
    x, w = way.drawn("normal")
    reference = way.played(x, w)
    w[3, 1, 2, 7], w[40, 0, 0, 0] = np.inf, np.nan
    y = way.played(x, w)
    others = [k for k in range(64) if k not in (3, 40)]
    assert not np.isfinite(y[..., [3, 40]]).any()
    np.testing.assert_array_equal(y[..., others], reference[..., others])


# Tiles and windows.

#: The kernels whose operands both come by tensor copies: the layers that their copies and outputs tell apart, tiles.
COPIED = {
    "native_gemm_16bit": (
        [case for case in NATIVE_CASES if "-copies" in case.name and case.problem.op != "wgrad"],
        native_gemm_16bit.TILES,
    ),
    "native_gemm_tf32": (list(TF32_CASES), native_gemm_tf32.TILES),
}


def _layers_of_copies() -> list[Any]:
    """Every layer; in ``make test`` each for one of the two kernels, by turns: they copy alike."""
    found = [(stem, case) for stem in COPIED for case in COPIED[stem][0]]
    layers: dict[str, list[Any]] = {}
    for stem, case in found:
        layers.setdefault(re.sub(r"b?float16-|tf32-|copies-|-copies", "", case.name), []).append((stem, case))
    few = [same[turn % len(same)] for turn, same in enumerate(layers.values())]
    return selection.marked(found, few, lambda each: ((each[0], each[1].problem), f"{each[0]}-{each[1].name}"))


@pytest.mark.parametrize(("stem", "problem"), _layers_of_copies())
def test_layers_of_copies_are_right(stem: str, problem: ConvProblem) -> None:
    assert not NAMED[stem].reasons(problem, HOPPER)
    proof.check(NAMED[stem], problem, kinds=KINDS[:1])


def _tiles() -> list[Any]:
    """Every tile on filters that it does not divide; in ``make test`` as few as have every number."""
    params: list[Any] = []
    for stem, (cases, tiles) in COPIED.items():
        problem = next(
            case.problem for case in cases if case.name.endswith(("float16-copies-nhwc", "tf32-copies-nhwc"))
        )
        problem = replace(problem, add=False)  # which the tile of the most sums is not for
        found: list[Any] = list(NAMED[stem].configs(problem, HOPPER))
        sizes = {config: (config.warpgroups, config.m_tiles, config.filters) for config in found}
        assert set(sizes.values()) == set(tiles)
        few = selection.cover(
            found, lambda c: [("warpgroups", c.warpgroups), ("m_tiles", c.m_tiles), ("split", c.split)]
        )
        names = {config: "-".join(map(str, (stem, *sizes[config], config.split))) for config in found}
        params += selection.marked(found, few, lambda c, s=stem, p=problem, n=names: ((s, p, c), n[c]))
    return params


@pytest.mark.parametrize(("stem", "problem", "config"), _tiles())
def test_every_tile_is_right(stem: str, problem: ConvProblem, config: Config) -> None:
    proof.check(NAMED[stem], problem, config, kinds=("positive",))


@pytest.mark.parametrize(
    ("stem", "layout", "tuning"),
    [
        ("tensor_gemm", "NHWC", {"rows": True, "linear": False, "pixels": 128}),
        ("tensor_gemm", "NCHW", {"rows": False, "linear": False, "pixels": 128}),
        pytest.param(
            *("tensor_gemm", "NCHW", {"rows": False, "linear": True, "pixels": 128}), marks=pytest.mark.exhaustive
        ),
        ("tensor_winograd", "NHWC", {}),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else each,
)
def test_a_tile_that_is_left_is_shared(stem: str, layout: Any, tuning: dict[str, Any]) -> None:
    """Of five tiles each of four blocks has one, and two of them share the last one."""
    few = replace(HOPPER, multiprocessors=4)
    problem = ConvProblem(2, 64, 9, 32, 64, 3, 3, padding=(1, 1, 1, 1), layout=layout, precision="fp32", bias=True)
    plan = Way(stem, problem, {"filters": 64, "split": 2, **tuning}, few).plan
    (launch,) = plan.launches
    assert launch.grid == 4
    proof.check(NAMED[stem], problem, kinds=KINDS[:1], change=lambda _: plan, target=few)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("native_gemm_16bit", "float16-copies-groups-nhwc"),
        ("native_gemm_16bit", "bfloat16-gradient-copies-stride-nhwc"),
        ("native_gemm_nchw", "float16-groups-nchw"),
        ("native_gemm_nchw", "bfloat16-gradient-stride-nchw"),
        ("native_weight_nhwc", "bfloat16-weight-copies-stride-nhwc"),
        ("native_weight_nhwc", "float16-weight-copies-groups-nhwc"),
        ("native_weight_nchw", "bfloat16-weight-groups-nchw"),
        ("native_weight_nchw", "bfloat16-weight-windows-stride-nchw"),
        ("native_weight_kmajor", "bfloat16-weight-copied-rows-nchw"),
    ],
)
def test_wide_offsets_are_right(stem: str, name: str) -> None:
    algorithm, problem = NAMED[stem], PROBLEMS[name]
    config = next(iter(algorithm.configs(problem, HOPPER)))
    wide = proof.wide_offsets(algorithm, problem, config, HOPPER)
    proof.check(algorithm, problem, config, kinds=KINDS[:1], change=lambda plan: wide)


#: Windows of pixels that lie in shared memory once, for every tap.
WINDOWS: list[dict[str, Any]] = [
    {"padding": (-1, -2, -1, 0)},
    {"padding": (4, 0, 0, 6)},
    {"r": 1, "s": 7, "padding": (0, 0, 3, 3)},
    {"stride": (2, 2), "dilation": (2, 4), "padding": (2, 1, 3, 2)},
    {"stride": (3, 1), "r": 2, "padding": (1, 0, 1, 1)},
    {"n": 1, "h": 3, "w": 3, "padding": (0, 0, 0, 0)},
    {"groups": 4, "stride": (1, 2)},
    {"r": 4, "s": 4, "stride": (4, 4), "padding": (0, 0, 0, 0)},
    {"c": 3, "r": 7, "s": 7, "stride": (2, 2), "padding": (3, 3, 3, 3)},
]
WINDOWS_OF_GRADIENTS: list[dict[str, Any]] = [
    {"op": "dgrad", "stride": (2, 3), "padding": (1, 0, 2, 1), "dilation": (1, 2)},
    {"op": "dgrad", "r": 1, "s": 1},
    {"op": "dgrad", "r": 1, "s": 1, "stride": (1, 3), "padding": (0, 0, -2, 0)},
    {"op": "wgrad", "groups": 4, "stride": (1, 2), "accumulate": True},
]


def _windows() -> list[Any]:
    """Each in both directions; in ``make test`` in one of them, by turns."""
    every = [{**each, "op": op} for each in WINDOWS for op in ("fprop", "wgrad")]
    chosen = [each for i, each in enumerate(every) if i % 4 in (0, 3)]
    return selection.marked(every + WINDOWS_OF_GRADIENTS, chosen + WINDOWS_OF_GRADIENTS, lambda w: ((w,), str(w)))


@pytest.mark.parametrize("changes", _windows())
def test_windows_of_all_kinds_are_right(changes: dict[str, Any]) -> None:
    dtype = "bfloat16" if changes["op"] == "wgrad" else "float16"
    problem = replace(ConvProblem(2, 24, 9, 13, 20, 3, 3, padding=(1, 1, 1, 1), dtype=dtype), **changes)
    algorithm = NAMED["native_weight_nchw" if problem.op == "wgrad" else "native_gemm_nchw"]
    proof.check(algorithm, problem, kinds=KINDS[:1])


def _compiled() -> list[Any]:
    """Kernels, changes of their layers, and which configurations: all, those that split, or do not, each tile, the
    best, or the one whose threads have most sums, which spills first, of those with as many registers."""
    small = {"n": 1, "h": 7, "w": 7}
    every: list[tuple[str, dict[str, Any], str]] = [
        ("native_gemm_16bit", {}, "largest"),
        ("native_gemm_tf32", {}, "largest"),
        ("native_gemm_nchw", {}, "largest"),
        ("native_weight_nhwc", {}, "largest"),
        ("native_weight_nchw_split_k", {}, "best"),
        ("native_weight_nchw_split_k", ONE_BY_ONE, "best"),
        ("native_weight_nchw", {"h": 7, "w": 7}, "best"),
        ("native_weight_kmajor", {}, "tiles"),
        ("native_weight_kmajor", {"h": 16, "w": 16}, "tiles"),
    ]
    more: list[tuple[str, dict[str, Any], str]] = [
        ("native_gemm_16bit", {}, "whole"),
        ("native_gemm_tf32", {}, "whole"),
        ("native_gemm_nchw", {}, "all"),
        ("native_weight_nhwc", {}, "whole"),
        ("native_gemm_16bit", {"accumulate": True, "c": 24, "k": 133, "dtype": "bfloat16"}, "whole"),
        ("native_gemm_16bit", {**GRADIENT, "stride": (2, 2), "bias": True, "c": 384}, "whole"),
        ("native_gemm_tf32", {**GRADIENT, "stride": (2, 2), "bias": True}, "whole"),
        ("native_gemm_tf32", {**GRADIENT, **small, "stride": (2, 2)}, "split"),
        ("native_gemm_tf32", {**GRADIENT, **small, "stride": (2, 2), "accumulate": True}, "split"),
        ("native_gemm_tf32", {**GRADIENT, **small, "stride": (1, 3), "c": 512, "k": 256, "s": 7}, "split"),
        ("native_gemm_tf32", {**GRADIENT, "stride": (1, 4), "accumulate": True, "r": 4, "s": 4, "h": 19}, "whole"),
        ("native_gemm_16bit", small, "split"),
        ("native_gemm_tf32", small, "split"),
        ("native_gemm_nchw", {"accumulate": True, "w": 54, "c": 24, "k": 133}, "all"),
        ("native_gemm_nchw", {"stride": (2, 2), "dtype": "bfloat16"}, "all"),
        ("native_gemm_nchw", {**ONE_BY_ONE, "w": 55}, "all"),
        ("native_gemm_nchw", ONE_BY_ONE, "all"),
        ("native_gemm_nchw", {**GRADIENT, "stride": (2, 1)}, "all"),
        ("native_weight_nhwc", {"c": 48, "k": 56, "dtype": "bfloat16"}, "split"),
        ("native_weight_nhwc", {**ONE_BY_ONE, "accumulate": True}, "whole"),
        ("native_weight_nhwc_split_k", {"c": 32, "stride": (2, 2)}, "best"),
        ("native_weight_nchw_split_k", {"c": 64, "k": 64}, "best"),
        ("native_weight_nchw", {"stride": (2, 2)}, "best"),
        ("native_weight_kmajor", ONE_BY_ONE, "tiles"),
        ("native_weight_kmajor", {"r": 7, "s": 7, "padding": (3, 3, 3, 3), "w": 32, "dtype": "bfloat16"}, "tiles"),
        ("native_weight_kmajor", {"accumulate": True, "padding": (0, 0, 4, 6)}, "tiles"),
    ]
    return selection.marked(every + more, every, lambda each: (each, f"{each[0]}-{each[1]}-{each[2]}"))


def sums(config: Any) -> int:
    """How many a thread has, about."""
    return int(config.m_tiles * (config.filters if hasattr(config, "filters") else config.blocks * config.taps))


@pytest.mark.parametrize(("stem", "changes", "which"), _compiled())
def test_no_configuration_spills(nvrtc: None, stem: str, changes: dict[str, Any], which: str) -> None:
    """Both operands in flight, no product waits for another, and the registers of all threads fit."""
    algorithm = NAMED[stem]
    problem = replace(layer_of(algorithm), **changes)
    configs: list[Any] = list(algorithm.configs(problem, HOPPER))
    if which in ("whole", "split"):
        configs = [config for config in configs if (config.split > 1) == (which == "split")]
    if which == "tiles":
        configs = [config for config in configs if config.split == 1]
    if which == "largest":
        configs = list({config.consumer_registers: config for config in sorted(configs, key=sums)}.values())
    assert configs, "nothing was compiled"
    for config in configs[:1] if which == "best" else configs:
        figure = compile_launch(algorithm.plan(problem, config, HOPPER).launches[0], "sm_90a")
        # two words, stored and loaded once a tile, where 128 sums and a bias take most of 168 registers
        words = 2 if stem == "native_gemm_nchw" and config.filters == 256 else 0
        assert figure.spill_bytes <= 4 * words and figure.stack_bytes <= 4 * words and not figure.advice, config


# Choice.


@pytest.mark.parametrize(
    ("stem", "changes", "chosen"),
    [
        ("native_gemm_16bit", {"h": 28, "w": 28}, "native_gemm_16bit"),
        ("native_gemm_16bit", GRADIENT | ONE_BY_ONE, "native_gemm_16bit"),
        ("native_gemm_window", {"k": 64}, "native_gemm_window"),
        ("native_gemm_16bit", {"layout": "NCHW"}, "native_gemm_nchw"),
        ("native_gemm_nchw", {}, "native_gemm_nchw"),
        ("native_gemm_nchw", GRADIENT, "native_gemm_nchw"),
        ("native_gemm_nchw", {"layout": "NHWC", "stride": (2, 2)}, "native_gemm_16bit"),
        ("native_weight_nhwc", {}, "native_weight_nhwc"),
        ("native_weight_nhwc", ONE_BY_ONE, "native_weight_nhwc"),
        ("native_weight_nhwc", {"stride": (2, 2)}, "native_weight_nhwc"),
        ("native_weight_nhwc", {"c": 3}, "native_weight_rows"),
        ("native_weight_nhwc", {"groups": 256}, "depthwise_weight"),
        ("native_weight_nchw", {}, "native_weight_kmajor"),
        ("native_weight_nchw", ONE_BY_ONE, "native_weight_kmajor"),
        ("native_weight_nchw", {"h": 7, "w": 7}, "native_weight_nchw"),
        ("native_weight_nchw", {"stride": (2, 2)}, "native_weight_nchw"),
        ("native_weight_nchw", {"groups": 256}, "depthwise_weight"),
        ("native_weight_nchw", {"layout": "NHWC"}, "native_weight_nhwc"),
    ],
    ids=str,
)
def test_auto_takes_each_where_it_is_faster(stem: str, changes: dict[str, Any], chosen: str) -> None:
    assert choose(replace(LAYERS[stem], **changes), HOPPER).algorithm.stem.startswith(chosen)
