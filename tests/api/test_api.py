"""conv2d, filter2d, explain and algorithms: arrays of every kind, without a GPU. Of all layers and gradients alike is
more in test_operations.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from math import inf
from typing import Any, NoReturn

import numpy as np
import pytest

import leanconv
from leanconv import ConvProblem, FilterProblem, conv2d, filter2d, prepare_weights
from leanconv.arrays import TorchArrays
from leanconv.call import explain as explaining
from leanconv.call import weights
from leanconv.call.choose import NoAlgorithmError, choose
from leanconv.images.borders import BORDERS
from leanconv.kernels import ALGORITHMS
from leanconv.options import PRECISIONS, Layout
from leanconv.runtime.driver import CudaUnavailableError
from tests.cases import CASES
from tests.cases_weight import WEIGHT_CASES
from tests.operations import BASE, FROM_NCHW, LAYOUTS, TOLERANCE, as_tensors, conv_arrays, in_memory
from tests.oracles import oracle_conv, oracle_filter, relative_error
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given_as", LAYOUTS)
def test_pytorch_tensors_of_another_order_are_copied(
    layout: Layout, given_as: Layout, rng: np.random.Generator, torch_on_device: HostDevice
) -> None:
    problem = replace(BASE, layout=layout, padding=(1, 1, 1, 1), bias=True)
    x, w, bias = conv_arrays(rng, replace(problem, layout=given_as))
    tensors = as_tensors(given_as, x, w, bias)
    moved = (tensor.numpy().transpose(FROM_NCHW[layout]) for tensor in tensors[:2])
    expected = oracle_conv(problem, *moved, bias)
    weights = prepare_weights(tensors[1])
    for filters in (tensors[1], weights, weights):
        y = conv2d(tensors[0], filters, tensors[2], padding=1, layout=layout)
        assert relative_error(in_memory(layout, y), expected) < TOLERANCE
    out = torch.full((*y.shape, 2), torch.nan)[..., 0]
    assert conv2d(tensors[0], weights, tensors[2], padding=1, layout=layout, out=out) is out
    assert torch.equal(out, y)
    x_at, _w_at, *_ = torch_on_device.launches[-1][1].values()
    assert (x_at == tensors[0].data_ptr()) == (layout == given_as)
    assert (weights.nbytes >= w.nbytes) == (layout != given_as), "the copy of the filters is kept"
    assert set(torch_on_device.problems.values()) == {problem}
    # asked for nothing, a tensor's own order chooses between the two that PyTorch has words for
    conv2d(*tensors, padding=1)
    assert list(torch_on_device.problems.values())[-1].layout == ("NHWC" if given_as == "NHWC" else "NCHW")


@pytest.mark.parametrize(
    "name", [a.name for a in leanconv.list_algorithms() if a.where == "CPU" and a.solves == "conv2d"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cpu_algorithm_by_name(name: str, layout: Layout, rng: np.random.Generator) -> None:
    problem = ConvProblem(n=2, c=8, h=8, w=9, k=16, r=3, s=3, layout=layout)
    if name == "single_channel":
        problem = replace(problem, groups=8)
    if name == "slices":
        with pytest.raises(NoAlgorithmError, match="volumes only, and this is one of images"):
            conv2d(*conv_arrays(rng, problem)[:2], layout=layout, algorithm=name)
        return
    x, w, _ = conv_arrays(rng, problem)
    y = conv2d(x, w, groups=problem.groups, layout=layout, algorithm=name)
    assert relative_error(y, oracle_conv(problem, x, w, None)) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cupy_arrays_run_in_place_on_the_callers_stream(
    layout: Layout, rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    problem = replace(BASE, bias=True, padding=(1, 1, 1, 1), layout=layout)
    x, w, bias = conv_arrays(rng, problem)
    given = [fake_cupy.asarray(array) for array in (x, w, bias)]
    y = conv2d(*given, padding=1, layout=layout)
    assert type(y) is fake_cupy.ndarray and list(host_device.problems.values()) == [problem]
    assert relative_error(y.host, oracle_conv(problem, x, w, bias)) < TOLERANCE
    stream, values = host_device.launches[0]
    assert stream == 0x51
    assert tuple(values.values()) == (*(array.data.ptr for array in given), y.data.ptr, 0, 0)


def test_a_warm_call_allocates_only_the_output_and_makes_nothing_ready(
    rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    x, w, _ = (a if a is None else fake_cupy.asarray(a) for a in conv_arrays(rng, BASE))
    conv2d(x, w)
    fake_cupy.allocations = 0
    for _ in range(5):
        conv2d(x, w)
    assert fake_cupy.allocations == 5 and fake_cupy.copies == 0
    assert host_device.executables == 1 and len(host_device.launches) == 6
    out = conv2d(x, w)
    fake_cupy.allocations = 0
    for _ in range(5):
        assert conv2d(x, w, out=out) is out
    assert fake_cupy.allocations == 0


def test_another_value_of_each_argument_is_another_call(rng: np.random.Generator, fake_cupy: Any) -> None:
    problem = ConvProblem(n=1, c=4, h=8, w=8, k=4, r=3, s=3)
    x, w, _ = conv_arrays(rng, problem)
    given = fake_cupy.asarray(x), fake_cupy.asarray(w)
    for change, arguments in (
        ({}, {}),
        ({"stride": (2, 2)}, {"stride": 2}),
        ({"padding": (1, 1, 1, 1)}, {"padding": 1}),
        ({"dilation": (2, 2)}, {"dilation": 2}),
        ({"activation": "relu"}, {"activation": "relu"}),
        ({}, {"precision": "ieee"}),
    ):
        expected = oracle_conv(replace(problem, **change), x, w, None)
        assert relative_error(conv2d(*given, **arguments).host, expected) < TOLERANCE


def test_workspace_comes_from_the_callers_allocator(
    rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, _ = conv_arrays(rng, BASE)
    given = fake_cupy.asarray(x), fake_cupy.asarray(w)
    algorithm = next(a for a in ALGORITHMS if a.solves == "conv2d")
    plan = type(algorithm).plan

    def with_workspace(self: Any, problem: Any, config: Any, target: Any) -> Any:
        made = replace(plan(self, problem, config, target), workspace_bytes=1000)
        host_device.problems[made] = problem
        return made

    monkeypatch.setattr(type(algorithm), "plan", with_workspace)
    fake_cupy.allocations = 0
    y = conv2d(*given)
    assert fake_cupy.allocations == 2
    assert host_device.launches[0][1]["workspace"] not in (0, y.data.ptr)
    assert relative_error(y.host, oracle_conv(BASE, x, w, None)) < TOLERANCE
    # NumPy arrays bring their own, and give it back
    assert relative_error(conv2d(x, w, device="cuda"), oracle_conv(BASE, x, w, None)) < TOLERANCE
    assert host_device.memory == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_of_every_kind(layout: Layout, rng: np.random.Generator, fake_cupy: Any) -> None:
    problem = replace(BASE, layout=layout)
    x, w, _ = conv_arrays(rng, problem)
    expected = oracle_conv(problem, x, w, None)
    for device in (None, "cuda"):
        out = np.full(problem.y_shape, np.nan, np.float32)
        assert conv2d(x, w, layout=layout, out=out, device=device) is out
        assert relative_error(out, expected) < TOLERANCE
        strided = np.full((*problem.y_shape, 2), np.nan, np.float32)[..., 0]
        assert conv2d(x, w, layout=layout, out=strided, device=device) is strided
        assert relative_error(strided, expected) < TOLERANCE
    tensor = torch.full((problem.n, problem.k, problem.p, problem.q), torch.nan)
    assert conv2d(*as_tensors(layout, x, w), layout=layout, out=tensor) is tensor
    assert relative_error(tensor.permute(FROM_NCHW[layout]).numpy(), expected) < TOLERANCE
    whole = fake_cupy.empty((*problem.y_shape, 2), np.float32)
    for on_gpu in (fake_cupy.empty(problem.y_shape, np.float32), whole[..., 1]):
        assert conv2d(fake_cupy.asarray(x), fake_cupy.asarray(w), layout=layout, out=on_gpu) is on_gpu
        assert relative_error(on_gpu.host, expected) < TOLERANCE
    assert np.isnan(whole.host[..., 0]).all(), "written beside out"


IMAGE = (3, 11, 14)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("where", ["cpu", "cuda", "torch", "cupy"])
def test_filter2d_borders(border: str, where: str, rng: np.random.Generator, fake_cupy: Any) -> None:
    image, kernel = rng.standard_normal(IMAGE).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    problem = FilterProblem(3, 11, 14, 4, 5, (2, 2), border)
    expected = oracle_filter(problem, image, kernel, value=1.5, delta=-0.25)
    arguments: dict[str, Any] = {"border": border, "value": 1.5, "delta": -0.25}
    if where == "torch":
        y = filter2d(torch.from_numpy(image), torch.from_numpy(kernel), **arguments).numpy()
    elif where == "cupy":
        y = filter2d(fake_cupy.asarray(image), kernel, **arguments).host
    else:
        y = filter2d(image, kernel, device="cuda" if where == "cuda" else None, **arguments)
    assert y.dtype == np.float32
    assert relative_error(y, expected) < TOLERANCE


@pytest.mark.parametrize("device", [None, "cuda"])
def test_filter2d_int32_anchor_and_leading_axes(device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    image = rng.integers(-100, 100, (2, 1, 3, 6, 8), dtype=np.int32)
    kernel = rng.integers(-9, 9, (3, 5), dtype=np.int32)
    y = filter2d(image, kernel, border="wrap", anchor=(0, 4), delta=7, device=device)
    expected = oracle_filter(FilterProblem(6, 6, 8, 3, 5, (0, 4), "wrap"), image.reshape(6, 6, 8), kernel, delta=7)
    assert y.dtype == np.int32 and y.shape == image.shape
    assert (y.reshape(6, 6, 8) == expected).all()


@pytest.mark.parametrize(
    "alias, scipy_mode",
    [("nearest", "nearest"), ("mirror", "mirror"), ("grid-mirror", "grid-mirror"), ("grid-wrap", "grid-wrap"),
     ("grid-constant", "grid-constant"), ("reflect", "reflect"), ("wrap", "wrap"), ("constant", "constant")],
)  # fmt: skip
def test_scipy_names_mean_what_scipy_does(alias: str, scipy_mode: str, rng: np.random.Generator) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    image, kernel = rng.standard_normal((9, 12)), rng.standard_normal((3, 4))
    expected = ndimage.correlate(image, kernel, mode=scipy_mode, cval=2.0)
    assert relative_error(filter2d(image, kernel, border=alias, value=2), expected) < 1e-14


def test_opencv_names() -> None:
    image, kernel = np.arange(5, dtype=np.float32)[None], np.array([[1, 0, 0, 0, 0]], np.float32)
    for name, first_two in (
        ("BORDER_CONSTANT", [9, 9]), ("BORDER_REPLICATE", [0, 0]), ("BORDER_REFLECT", [1, 0]),
        ("BORDER_REFLECT_101", [2, 1]), ("cv2.BORDER_DEFAULT", [2, 1]), ("BORDER_WRAP", [3, 4]),
    ):  # fmt: skip
        assert filter2d(image, kernel, border=name, value=9)[0].tolist() == [*first_two, 0, 1, 2], name


def test_a_crop_is_filtered_in_place_and_a_pitched_out_is_written_in_place(
    rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    whole = rng.standard_normal((2, 10, 16)).astype(np.float32)
    kernel = rng.standard_normal((3, 3)).astype(np.float32)
    crop, out = fake_cupy.asarray(whole)[:, 2:9, 4:13], fake_cupy.empty((2, 8, 16), np.float32)[:, 1:, 4:13]
    expected = oracle_filter(FilterProblem(2, 7, 9, 3, 3, (1, 1)), whole[:, 2:9, 4:13], kernel)
    filter2d(crop, kernel, out=out)
    assert fake_cupy.copies == 0
    problem = next(iter(host_device.problems.values()))
    assert (problem.x_pitch, problem.x_step, problem.y_pitch, problem.y_step) == (16, 160, 16, 128)
    assert relative_error(out.host, expected) < TOLERANCE
    odd = fake_cupy.asarray(whole)[:, 2:9, 3:12]
    expected = oracle_filter(FilterProblem(2, 7, 9, 3, 3, (1, 1)), whole[:, 2:9, 3:12], kernel)
    assert relative_error(filter2d(odd, kernel).host, expected) < TOLERANCE
    assert fake_cupy.copies == 0
    skipping = fake_cupy.asarray(whole)[:, ::2, ::2]
    expected = oracle_filter(FilterProblem(2, 5, 8, 3, 3, (1, 1)), whole[:, ::2, ::2], kernel)
    assert relative_error(filter2d(skipping, kernel).host, expected) < TOLERANCE
    assert fake_cupy.copies == 1


def test_a_numpy_kernel_is_followed_when_its_content_changes(rng: np.random.Generator, fake_cupy: Any) -> None:
    image, kernel = fake_cupy.asarray(np.ones((4, 4), np.float32)), np.zeros((1, 1), np.float32)
    for weight in (2.0, 3.0, 2.0):
        kernel[0, 0] = weight
        assert leanconv.explain(leanconv.filter2d, image, kernel).chosen == "register_cache"
        assert (filter2d(image, kernel).host == weight).all()
    assert len(weights._kernels) == 2


class OtherLibrary:
    """An array of a library that leanconv does not know, with DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return OtherLibrary

    @staticmethod
    def from_dlpack(array: np.ndarray) -> OtherLibrary:
        return OtherLibrary(array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dlpack_arrays_come_back_as_their_own_kind(layout: Layout, rng: np.random.Generator) -> None:
    problem = replace(BASE, layout=layout)
    x, w, _ = conv_arrays(rng, problem)
    y = conv2d(OtherLibrary(x), OtherLibrary(w), layout=layout)
    assert type(y) is OtherLibrary
    assert relative_error(y.array, oracle_conv(problem, x, w, None)) < TOLERANCE
    assert leanconv.explain(conv2d, OtherLibrary(x), OtherLibrary(w), layout=layout).problem == problem
    numbers: Any = {"border": "constant", "value": 3, "delta": 0.5}
    y = filter2d(OtherLibrary(x), OtherLibrary(w[0, 0]), **numbers)
    assert type(y) is OtherLibrary
    np.testing.assert_array_equal(y.array, filter2d(x, w[0, 0], **numbers))


def test_explain_names_the_strategies_whose_time_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = leanconv.ConvProblem(8, 64, 16, 16, 64, 1, 1, dtype="float16")

    def none(index: int) -> NoReturn:
        raise CudaUnavailableError("none")

    monkeypatch.setattr(explaining.launch, "open_device", none)
    monkeypatch.setattr(explaining, "NOMINAL", replace(explaining.NOMINAL, model=""))  # no table has its times
    for algorithm in (each for each in ALGORITHMS if each.stem in ("native_gemm_rows", "native_gemm_pointwise")):
        unknown = [(inf, config) for config in algorithm.configs(problem, explaining.NOMINAL)]
        monkeypatch.setattr(type(algorithm), "timed", lambda *_, unknown=unknown: unknown)
    why = leanconv.explain(problem, device="cuda").others["native_gemm"][0]
    assert "native_gemm_pointwise is neither predicted nor measured, so 'auto' does not take it; algorithm=" in why
    # once its time is known that is printed, and the sentence is not
    known = {"native_gemm_pointwise": 1.0}
    monkeypatch.setattr(explaining, "_times", lambda *_: (known, {}))
    told = leanconv.explain(problem, device="cuda")
    assert told.others["native_gemm"] == ("it could; algorithm='native_gemm' chooses it",)


def test_explain_names_the_choice_and_the_reasons(rng: np.random.Generator, host_device: HostDevice) -> None:
    x, w, _ = conv_arrays(rng, BASE)
    told = leanconv.explain(conv2d, x, w, precision="ieee")
    assert told.chosen in {a.name for a in leanconv.list_algorithms() if a.where == "CPU"}
    assert "'ieee' was requested" in "".join(told.others["winograd1d"])
    assert told.chosen in str(told) and "winograd1d" in str(told)
    assert leanconv.explain(conv2d, x, w, precision="ieee", algorithm="direct").why == "it was requested"
    told = leanconv.explain(conv2d, x, w, stride=2, device="cuda")
    first = choose(told.problem, host_device.target).algorithm.name
    assert told.chosen == first and "stand-in" in told.where and "tile_k" in told.config
    assert "op=" in told.others["direct_weight"][0] and "_weight" not in str(told), "it computes another operation"
    assert "op=" in str(leanconv.explain(conv2d, x, w, stride=2, device="cuda", algorithm="direct_weight"))
    assert told.others["direct"] == (
        "it could, but the time of direct is neither predicted nor measured, so 'auto' does not take it; "
        "algorithm='direct' chooses it",
    )
    assert told.why == "it is the first, in order of preference, that can", "several have the same cost"
    assert told.kernels == () and host_device.launches == []
    conv2d(x, w, stride=2, device="cuda")
    told = leanconv.explain(conv2d, x, w, stride=2, device="cuda")
    assert "96 registers" in told.kernels[0] and "96 registers" in str(told)
    image, kernel = np.ones((40, 40), np.float32), np.ones((33, 3), np.float32)
    assert leanconv.explain(leanconv.filter2d, image, kernel, device="cuda").chosen == "separable"
    told = leanconv.explain(leanconv.filter2d, image, kernel, separable=False, device="cuda")
    assert told.chosen == "fourier" and "33x3" in told.others["register_cache"][0]
    assert leanconv.explain(conv2d, torch.from_numpy(x), torch.from_numpy(w)).chosen == "torch.nn.functional.conv2d"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_in_every_layout(layout: Layout, rng: np.random.Generator, host_device: HostDevice) -> None:
    problem = replace(BASE, layout=layout)
    x, w, _ = conv_arrays(rng, problem)
    for device in (None, "cuda"):
        told = leanconv.explain(conv2d, x, w, layout=layout, device=device)
        assert told.problem == problem and told.chosen and f"fprop {layout} float32 2x4x9x7" in str(told)
    assert leanconv.explain(conv2d, *as_tensors(layout, x, w), layout=layout).problem == problem
    told = leanconv.explain(problem, device="cuda")
    innermost = [case.problem for case in (*CASES, *WEIGHT_CASES) if getattr(case.problem, "layout", "") == "CHWN"]
    for algorithm in ALGORITHMS:
        if algorithm.solves != "conv2d" or algorithm.stem == "implicit_gemm_patches":  # of volumes, never in CHWN
            continue
        name, reasons = algorithm.stem, algorithm.reasons(problem, host_device.target)
        could = any(a.name == algorithm.name and not a.reasons(problem, host_device.target) for a in ALGORITHMS)
        told_of = " ".join(told.others.get(algorithm.name, ()))
        assert could or all(reason in told_of for reason in reasons), name
        declined = any("CHWN" in reason for reason in reasons)
        able = any(not algorithm.reasons(each, host_device.target) for each in innermost)
        assert declined == (layout == "CHWN" and not able), (name, reasons)


def test_explain_takes_a_problem(host_device: HostDevice) -> None:
    for device in (None, "cuda"):
        for problem in (BASE, FilterProblem(1, 8, 8, 3, 3, (1, 1), x_pitch=8, x_step=64, y_pitch=8, y_step=64)):
            told = leanconv.explain(problem, device=device)
            assert told.problem == problem and told.chosen
            advice = "algorithm=" in str(told)
            assert advice == isinstance(problem, ConvProblem), "filter2d has no such argument"


def test_algorithms_lists_every_one() -> None:
    lines = leanconv.list_algorithms()
    names = {(line.name, line.where) for line in lines}
    assert {("implicit_gemm", "GPU"), ("register_cache", "GPU"), ("im2col", "CPU"), ("im2win", "CPU")} <= names
    assert all(line.paper and line.precision in PRECISIONS and line.name in str(line) for line in lines)


@pytest.mark.parametrize("works", [True, False])
def test_pytorchs_quick_allocation_is_tried_once_and_taken_only_on_the_current_gpu(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    quick: list[Any] = []

    def empty(shape: Any, strides: Any, dtype: Any) -> Any:
        quick.append(shape)
        return torch.empty_strided(shape, strides if works else (7,) * len(shape), dtype=dtype)

    library = TorchArrays()
    current = [0]
    monkeypatch.setattr(library, "_quick_empty", empty)
    monkeypatch.setattr(library, "_current_device", lambda: current[0])
    monkeypatch.setattr(library, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    last, plain = (
        library.allocator((2, 3, 4, 5), "float32", 0, (0, 2, 3, 1)),
        library.allocator(torch.Size((6, 7)), "float16", 0),
    )
    assert len(quick) == 1
    assert last().stride() == (60, 1, 15, 3) and last().shape == (2, 3, 4, 5) and plain().dtype == torch.float16
    assert plain().stride() == (7, 1) and len(quick) == (5 if works else 1)
    current[0] = 1
    assert last().stride() == (60, 1, 15, 3) and len(quick) == (5 if works else 1)
    assert {type(shape) for shape in quick} == {tuple}, "PyTorch 2.11 refuses a torch.Size"
