"""Element types: the table, the conversions bit by bit, and 16-bit layers on every road from an array to its result."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

from leanconv import (
    ConvProblem,
    NoAlgorithmError,
    conv2d,
    conv2d_input,
    conv2d_weight,
    dtypes,
    explain,
    filter2d,
    prepare_weights,
)
from leanconv.bench import run_suite
from leanconv.bench.suites import format_problem, load_suite, parse_problem
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.dtypes import DTYPES, DtypeName
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.common.layers import conv_constants, has_wide_tensors
from leanconv.kernels.simt.tiles import TILES, tiles
from leanconv.plan import Number, Pointer
from tests import emulator, proof, selection
from tests.cases import ALL, TARGETS
from tests.messages import says
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice
from tests.variants import NAMED

NARROW = ("float16", "bfloat16")
LAYER = ConvProblem(2, 6, 9, 8, 10, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu", dtype="float16")
GRADIENT = replace(LAYER, op="dgrad", bias=False, activation=None)
SAME: dict[str, Any] = {"padding": 1, "activation": "relu"}


def draw(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype(problem.dtype) for shape in (problem.x_shape, problem.w_shape))
    return x, w, rng.standard_normal(problem.k).astype(problem.dtype) if problem.bias else None


def check(problem: ConvProblem, y: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    assert y.shape == problem.y_shape
    assert relative_error(y, oracle_conv(problem, x, w, bias)) <= oracle.error_bound(problem, x, w, bias)


# The table


def test_the_table_says_what_the_libraries_do() -> None:
    torch = pytest.importorskip("torch")
    for name, kind in DTYPES.items():
        assert kind.name == name and DTYPES[kind.accumulator].bytes >= kind.bytes
        assert getattr(torch, kind.name).itemsize == kind.bytes == np.dtype(name).itemsize
        assert (kind.numpy is None) == (np.dtype(name).type.__module__ == "ml_dtypes")
        floating = getattr(torch, kind.name).is_floating_point
        assert kind.roundoff == (float(torch.finfo(getattr(torch, name)).eps) / 2 if floating else 0)
    assert {name for name in DTYPES if dtypes.is_narrow(name)} == set(NARROW)
    assert {name for name in DTYPES if dtypes.weights_of(name) != name or dtypes.result_of(name) != name} == {
        *dtypes.INTEGER_LAYERS
    }


def test_kernels_are_told_the_types_of_elements_and_sums() -> None:
    for name in dtypes.GPU_LAYERS:
        constants = dict(conv_constants(replace(LAYER, dtype=name)))
        assert (constants["element"], constants["sum"]) == (DTYPES[name].ctype, "float")


def test_offsets_are_wide_by_bytes_while_an_int_counts_the_elements() -> None:
    for elements, wide in ((2**30 - 1, (False, False)), (2**30, (True, False)), (2**31 - 2**16, (True, True))):
        layer = ConvProblem(elements, 1, 1, 1, 1, 1, 1)
        assert tuple(has_wide_tensors(replace(layer, dtype=name)) for name in ("float32", "float16")) == wide


def test_sentences_name_the_type() -> None:
    assert dtypes.none_of("float32", ("float32",)) == []
    for taken, rule in (
        (("float32",), "is not float32"),
        (("float32", "int32"), "is neither float32 nor int32"),
        (("float32", "float16", "int8"), "is none of float32, float16, int8"),
    ):
        assert dtypes.none_of("uint8", taken) == [f"dtype='uint8' {rule}"]


# Conversions


def converted(kind: str, values: np.ndarray) -> np.ndarray:
    """Floats as bits of a 16-bit type, or bits as floats, by the functions that kernels use."""
    back = values.dtype == np.float32
    expression = f"from_float<{kind}>(x[i]).bits" if back else f"to_float({kind}{{x[i]}})"
    source, target = ("float", "unsigned short") if back else ("unsigned short", "float")
    unit = (
        "#include <device/element.cuh>\nusing namespace leanconv;\n"
        f'extern "C" __global__ void convert(const {source}* x, {target}* y, int n) {{\n'
        f"for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = {expression};\n}}\n"
    )
    y = np.zeros(values.size, np.uint16 if back else np.float32)
    arguments = (Pointer("x", source), Pointer("y", target, written=True), Number("int", "n"))
    emulator.run_source(unit, "convert", arguments, {"x": values, "y": y, "n": values.size}, orders=("ascending",))
    return y


@pytest.mark.parametrize("kind", NARROW)
def test_every_pattern_becomes_the_same_float(kind: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(converted(kind, bits), bits.view(kind).astype(np.float32))


@pytest.mark.parametrize("kind", NARROW)
def test_floats_become_the_nearest_pattern_and_of_two_the_even_one(kind: str) -> None:
    exact = np.arange(65536, dtype=np.uint16).view(kind).astype(np.float32)
    numbers = np.sort(exact[np.isfinite(exact)])
    halfway = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(halfway, np.float32(towards)) for towards in (-np.inf, np.inf)]
    most = np.float32(ml_dtypes.finfo(kind).max)
    with np.errstate(over="ignore", invalid="ignore"):
        beyond = most * np.float32([1, 1.0001, 1.0003, 1.0005, 1.002, 1.0039, 1.0040])
        values = np.concatenate([exact, halfway, *around, beyond, -beyond, np.float32([1e-30, -1e-30, 1e30, 3e38])])
        expected = values.astype(kind)
    got = converted(kind, values).view(kind)
    numeric = ~np.isnan(values)
    assert np.isnan(got[~numeric].astype(np.float32)).all() and np.isnan(values).any()
    np.testing.assert_array_equal(got[numeric].view(np.uint16), expected[numeric].view(np.uint16))


# On the CPU


@pytest.mark.parametrize("algorithm", [a for a in CPU_ALGORITHMS if a.solves == "conv2d"], ids=lambda a: a.name)
@pytest.mark.parametrize("problem", [LAYER, GRADIENT], ids=["forward", "gradient"])
def test_the_cpu_engine_computes_in_float32_and_rounds_once(algorithm: Any, problem: ConvProblem) -> None:
    float32 = replace(problem, dtype="float32")
    if algorithm.why_not(float32, TARGETS[0]):
        assert algorithm.why_not(problem, TARGETS[0]) == algorithm.why_not(float32, TARGETS[0])
        return
    for layout in ALL:
        for dtype in NARROW:
            each = replace(problem, layout=layout, dtype=dtype)
            x, w, bias = draw(each)
            y = algorithm.run(each, x, w, bias)
            check(each, y, x, w, bias)
            wide = [None if array is None else array.astype(np.float32) for array in (x, w, bias)]
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, algorithm.run(replace(each, dtype="float32"), *wide).astype(dtype))


def test_the_bound_of_16_bits_is_that_of_float32_and_one_rounding() -> None:
    x, w, bias = draw(LAYER)
    single = [array.astype(np.float32) for array in (x, w) if array is not None]
    strict = oracle.error_bound(replace(LAYER, dtype="float32", bias=False), *single)
    for dtype, roundoff in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        assert oracle.error_bound(replace(LAYER, dtype=dtype, bias=False), *single) == pytest.approx(
            strict + roundoff, rel=1e-5
        )
    exact = oracle.conv2d(LAYER, x, w, bias)
    assert relative_error(exact.astype(np.float16), exact) < 2.0**-11


def test_float16_overflows_to_infinity() -> None:
    x, w = np.full((1, 2, 3, 3), 40000, np.float16), np.ones((1, 2, 1, 1), np.float16)
    assert np.isposinf(conv2d(x, w)).all() and np.isneginf(conv2d(x, -w)).all()
    assert conv2d(x, w * np.float16(0.5)).max() == 40000  # the sum passes 65504 in float32, the result does not
    torch = pytest.importorskip("torch")
    assert torch.isposinf(conv2d(torch.from_numpy(x), torch.from_numpy(w))).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_pytorch_computes_its_own_tensors_on_the_cpu(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    x, w, bias = (torch.from_numpy(np.asarray(a, np.float32)).to(kind) for a in draw(LAYER))
    y = conv2d(x, w, bias, **SAME)
    assert y.dtype == kind and torch.equal(y, torch.relu(torch.nn.functional.conv2d(x, w, bias, padding=1)))
    back = conv2d_input(y, w, tuple(x.shape), padding=1)
    assert back.dtype == kind and torch.equal(back, torch.nn.grad.conv2d_input(x.shape, w, y, padding=1))


# On stand-ins for a GPU, whose kernels are the oracle


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("dtype", NARROW)
def test_arrays_of_numpy_and_cupy_on_a_gpu(layout: Any, dtype: str, fake_cupy: Any, host_device: HostDevice) -> None:
    problem = replace(LAYER, layout=layout, dtype=dtype)
    x, w, bias = draw(problem)
    check(problem, conv2d(x, w, bias, layout=layout, device="cuda", **SAME), x, w, bias)
    there = [fake_cupy.asarray(array) for array in (x, w, bias)]
    y = conv2d(*there, layout=layout, **SAME)
    assert y.dtype == dtype
    check(problem, y.host, x, w, bias)
    out = fake_cupy.empty(problem.y_shape, dtype)
    assert conv2d(*there, layout=layout, out=out, **SAME) is out
    np.testing.assert_array_equal(out.host, y.host)
    assert len(host_device.launches) == 3


@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_keep_their_prepared_filters_in_the_type(dtype: str, fake_cupy: Any, host_device: HostDevice) -> None:
    problem = replace(GRADIENT, dtype=dtype, k=5)  # 2 bytes times an odd number of rows
    x, w, _ = draw(problem)
    grad, kept = fake_cupy.asarray(x), prepare_weights(fake_cupy.asarray(w))
    shape = (problem.n, problem.c, problem.h, problem.w)
    for _ in range(2):
        y = conv2d_input(grad, kept, shape, padding=1)
        check(problem, y.host, x, w, None)
    assert host_device.prepared == 1 and kept.nbytes == 2 * w.size
    plan = explain(conv2d_input, grad, kept, input_shape=shape, padding=1)
    assert (plan.chosen, plan.prepared_bytes) == ("implicit_gemm", 2 * w.size)


@pytest.mark.parametrize("dtype", NARROW)
def test_tensors_of_pytorch_on_a_gpu(dtype: str, torch_on_device: HostDevice) -> None:
    import torch

    problem = replace(LAYER, dtype=dtype)
    arrays = draw(problem)
    given = [torch.from_numpy(array.view(np.int16)).view(getattr(torch, dtype)) for array in arrays]
    y = conv2d(*given, **SAME)
    assert str(y.dtype) == f"torch.{dtype}" and len(torch_on_device.launches) == 1
    check(problem, y.view(torch.int16).numpy().view(dtype), *arrays)
    last = conv2d(given[0].to(memory_format=torch.channels_last), *given[1:], **SAME)
    assert torch.equal(last, y) and last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_numpy_and_cupy_in_float16_on_a_real_one() -> None:
    x, w, bias = draw(LAYER)
    y = conv2d(x, w, bias, device="cuda", **SAME)
    assert y.dtype == np.float16
    check(LAYER, y, x, w, bias)
    assert np.isposinf(conv2d(np.full_like(x, 6e4), np.ones_like(w), device="cuda")).all()
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    there = [cupy.asarray(array) for array in (x, w, bias)]
    np.testing.assert_array_equal(conv2d(*there, **SAME).get(), y)


# What is refused


def test_mixed_types_and_outputs_of_another_are_refused_by_name() -> None:
    x, w, _bias = draw(LAYER)
    with says(TypeError, "w has dtype float32 and x float16; they must be the same"):
        conv2d(x, w.astype(np.float32))
    with says(TypeError, "w has dtype bfloat16 and x float16"):
        conv2d(x, w.astype("bfloat16"))
    with says(TypeError, "bias has dtype float32 and x float16"):
        conv2d(x, w, np.ones(10, np.float32))
    with says(ValueError, "out has dtype float32; the result has float16"):
        conv2d(x, w, padding=1, out=np.empty(LAYER.y_shape, np.float32))
    with says(
        TypeError,
        "x has dtype int16; supported are float32, float16, bfloat16, int8 and uint8, and float64 on the CPU only",
    ):
        conv2d(x.astype(np.int16), w.astype(np.int16))
    floats = "supported are float32, float16 and bfloat16, and float64 on the CPU only"
    many = x.astype(np.complex64), w.astype(np.complex64)
    with says(TypeError, f"x has dtype complex64; {floats}"):
        conv2d_weight(*many, (1, 1, 3, 3))
    with says(TypeError, f"grad has dtype complex64; {floats}"):
        conv2d_input(*many, (1, 1, 3, 3))
    with says(TypeError, "image has dtype complex64; supported are float32, float64, float16"):
        filter2d(many[0][0, 0], w[0, 0])
    with says(TypeError, "w has dtype uint8; supported are float32"):
        prepare_weights(w.astype(np.uint8))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_bias_of_another_type_is_refused_after_one_that_fits(device: Any, host_device: HostDevice) -> None:
    x, w = np.ones((1, 2, 5, 5), np.float32), np.ones((4, 2, 3, 3), np.float32)
    for bias in (np.ones(4, np.float32), np.ones(8, np.float32)[::2]):
        assert (conv2d(x, w, bias, device=device) == 19).all()
    for dtype in ("float64", "float16", "int32"):
        with says(TypeError, f"bias has dtype {dtype} and x float32"):
            conv2d(x, w, np.ones(4, dtype), device=device)


def test_algorithms_that_know_float32_alone_say_so(host_device: HostDevice) -> None:
    told = explain(LAYER, device="cuda")
    assert told.chosen == "implicit_gemm"
    others = {a for a in ALGORITHMS if a.solves == "conv2d" and a.family != "depthwise"}
    # the last knows integers alone
    known = {"implicit_gemm", "direct", "direct_tiled", "direct_weight", "single_channel", "implicit_gemm_dp4a"}
    known |= {"native_gemm_16bit", "native_gemm_window", "native_gemm_nchw", "implicit_gemm_weight"}
    known |= {"implicit_gemm_patches", "native_gemm_skinny"}
    known |= {"native_weight_nhwc", "native_weight_nchw", "native_weight_rows", "native_gemm_sync"}
    known |= {"native_weight_sync", "native_weight_kmajor", "native_gemm_pointwise", "native_gemm_planes"}
    known |= {"native_gemm_rows", "tensor_gemm_sync_col2im", "native_gemm_groups", "native_weight_groups"}
    others = {a for a in others if a.stem not in known}
    says_so = {
        name
        for name, reasons in told.others.items()
        if any("dtype='float16' is not float32" in each for each in reasons)
    }
    able = {a.name for a in ALGORITHMS if not a.reasons(LAYER, TARGETS[0])}  # by another strategy
    assert says_so == {a.name for a in others} - able
    for algorithm in ALGORITHMS:  # each strategy of them says it
        reasons = algorithm.reasons(LAYER, TARGETS[0])
        assert ("dtype='float16' is not float32" in reasons) == (algorithm in others), algorithm.stem
    with says(NoAlgorithmError, "dtype='float64' is none of float32, float16, bfloat16"):
        conv2d(np.ones((1, 1, 3, 3)), np.ones((1, 1, 3, 3)), device="cuda")


# Tiles, and the benchmark


@pytest.mark.parametrize("layout", ALL)
def test_tiles_of_16_bits_have_two_stages_and_the_shapes_of_float32(layout: Any) -> None:
    layer = replace(LAYER, n=4, c=8, layout=layout)
    found, narrow = (
        [c for c, _ in tiles(replace(layer, dtype=dtype), TARGETS[0])] for dtype in ("float32", "bfloat16")
    )
    assert found == list(TILES[layout])
    assert {config.stages for config in narrow} == {2}
    for one, other in zip(found, narrow, strict=True):
        assert (one.tile_k, one.tile_pixels, one.threads) == (other.tile_k, other.tile_pixels, other.threads)
    algorithm = NAMED["implicit_gemm"]
    assert {c.stages for c in algorithm.configs(replace(LAYER, layout=layout), TARGETS[0])} == {2}


def large_tiles() -> list[Any]:
    """Tiles and channels in every layout; ``make test`` plays each once, and each layout."""
    found = [*product((((64, 64), 6), ((64, 64), 8), ((128, 96), 12), ((128, 128), 12)), ALL)]
    chosen = selection.cover(found, lambda each: each)
    return selection.marked(found, chosen, lambda each: ((*each[0], each[1]), f"{each[0][0]}-{each[0][1]}-{each[1]}"))


@pytest.mark.parametrize(("tile", "channels", "layout"), large_tiles())
def test_large_tiles_load_pairs_and_fours(tile: tuple[int, int], channels: int, layout: Any) -> None:
    problem = ConvProblem(4, channels, 6, 7, 132, 3, 3, padding=(1, 1, 1, 1), layout=layout, dtype="bfloat16")
    algorithm = NAMED["implicit_gemm"]
    configs = algorithm.configs(problem, TARGETS[0])
    config = next((c for c in configs if (c.tile_k, c.tile_pixels, c.split) == (*tile, 1)), None)
    if config is None:
        assert (layout, tile) == ("NHWC", (128, 128))
    else:
        proof.check(algorithm, problem, config, kinds=("zero-mean",))


def test_problems_and_suites_in_a_type() -> None:
    for words in ("conv:n2,c3,h9,w8,k4,r3,s3,NHWC,float16,bias", "conv:n1,c3,h9,w9,k4,r1,s1,NCHW,relaxed,bfloat16"):
        assert format_problem(parse_problem(words)) == words and parse_problem(words).dtype in words
    assert parse_problem("conv:c3,h9,k4,r3,int8").dtype == "int8"
    with pytest.raises(ValueError, match="'int16' is not understood"):
        parse_problem("conv:c3,h9,k4,r3,int16")
    own, asked = load_suite("im2win"), load_suite("im2win", dtype="bfloat16")
    assert asked == tuple(replace(case, problem=replace(case.problem, dtype="bfloat16")) for case in own)
    with pytest.raises(
        ValueError, match="dtype='int16' is not known; choose one of float32, float16, bfloat16, int8, uint8, float64"
    ):
        load_suite("im2win", dtype="int16")
    with pytest.raises(ValueError, match="dtype='float16' does not apply: suite 'filters'"):
        load_suite("filters", dtype="float16")


def test_the_benchmark_runs_in_float16_where_numpy_has_it() -> None:
    how: dict[str, Any] = {"device": "cpu", "quick": True, "progress": False, "engines": ("leanconv", "torch-cpu")}
    results = run_suite("conv:n2,c4,h9,k6,r3,float16,relu", algorithms=("im2col",), **how)
    peers = {"torch-cpu"} if importlib.util.find_spec("torch") else set()
    assert {row.engine for row in results.rows} == {"leanconv"} | peers and not results.failed
    for row in results.rows:
        assert row.dtype == "float16" and row.error is not None and 1e-5 < row.error < 2.0**-11
    assert results.own(results.rows[0].problem) is not None
    with pytest.raises(ValueError, match="dtype='bfloat16' is measured on a GPU only: NumPy has no such type"):
        run_suite("im2win", dtype="bfloat16", **how)
    with pytest.raises(ValueError, match="dtype='float16' is for suites; write it into the problem"):
        run_suite("conv:c4,h9,k6,r3", dtype="float16", **how)


def test_the_type_of_names_has_the_tables() -> None:
    assert get_args(DtypeName) == tuple(DTYPES)
