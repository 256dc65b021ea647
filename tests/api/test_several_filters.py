"""filter2d with several kernels at once: the values of one call each, whatever the array, and one pass on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import FilterProblem, filter2d
from leanconv.call.weights import kernel_beside
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.images.borders import BORDERS
from leanconv.kernels.image_filter.register_cache import FILTER_BYTES, PartialSumsConfig, filters_in_block, weight_bytes
from tests.cases import TARGETS, filter_problem
from tests.oracles import oracle_filter, relative_error
from tests.stand_ins import HostDevice
from tests.variants import NAMED

torch = pytest.importorskip("torch")

TOLERANCE = 1e-6
CACHE = NAMED["register_cache"]


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("where", ["cpu", "cuda", "torch", "cupy"])
def test_each_kernel_gives_its_result(border: str, where: str, rng: np.random.Generator, fake_cupy: Any) -> None:
    image, kernels = drawn(rng, 3, 11, 14), drawn(rng, 5, 4, 3)
    problem = FilterProblem(3, 11, 14, 4, 3, (2, 1), border)  # type: ignore[arg-type]
    expected = oracle_filter(problem, image, kernels, value=1.5, delta=-0.25)
    arguments: dict[str, Any] = {"border": border, "value": 1.5, "delta": -0.25}
    if where == "torch":
        y = filter2d(torch.from_numpy(image), torch.from_numpy(kernels), **arguments).numpy()
    elif where == "cupy":
        y = filter2d(fake_cupy.asarray(image), kernels, **arguments).host
    else:
        y = filter2d(image, kernels, device="cuda" if where == "cuda" else None, **arguments)
    assert y.shape == (3, 5, 11, 14) and y.dtype == np.float32
    assert relative_error(y, expected) < TOLERANCE


@pytest.mark.parametrize("device", [None, "cuda"])
def test_axes_of_the_result(device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    """A kernel of three axes adds one to the result, also where it has one filter."""
    image, kernels = drawn(rng, 2, 3, 6, 8), drawn(rng, 4, 3, 3)
    for x in (image, image[0], image[0, 0]):
        y = filter2d(x, kernels, device=device)
        assert y.shape == (*x.shape[:-2], 4, 6, 8)
        one = filter2d(x, kernels[2], device=device)
        assert one.shape == x.shape and (one == y[..., 2, :, :]).all()
        alone = filter2d(x, kernels[2:3], device=device)
        assert alone.shape == (*x.shape[:-2], 1, 6, 8) and (alone[..., 0, :, :] == one).all()
    for empty in (image[:0], image[:, :, :0]):
        assert filter2d(empty, kernels, device=device).shape == (*empty.shape[:-2], 4, *empty.shape[-2:])


@pytest.mark.parametrize("device", [None, "cuda"])
def test_int32_and_anchor(device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    image = rng.integers(-100, 100, (2, 6, 8), dtype=np.int32)
    kernels = rng.integers(-9, 9, (3, 3, 5), dtype=np.int32)
    y = filter2d(image, kernels, border="wrap", anchor=(0, 4), delta=7, device=device)
    expected = oracle_filter(FilterProblem(2, 6, 8, 3, 5, (0, 4), "wrap"), image, kernels, delta=7)
    assert y.dtype == np.int32 and (y == expected).all()


def test_out_and_crops(rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice) -> None:
    whole, kernels = drawn(rng, 2, 10, 16), drawn(rng, 3, 3, 3)
    expected = oracle_filter(FilterProblem(2, 7, 9, 3, 3, (1, 1)), whole[:, 2:9, 4:13], kernels)
    crop, room = fake_cupy.asarray(whole)[:, 2:9, 4:13], fake_cupy.empty((2, 3, 8, 16), np.float32)
    out = room[:, :, 1:, 4:13]
    assert filter2d(crop, kernels, out=out) is out and fake_cupy.copies == 0
    problem = next(iter(host_device.problems.values()))
    assert isinstance(problem, FilterProblem) and problem.filters == 3
    assert (problem.x_pitch, problem.x_step, problem.y_pitch, problem.y_step) == (16, 160, 16, 128)
    assert relative_error(out.host, expected) < TOLERANCE
    # results that do not lie evenly are made elsewhere and copied
    uneven = fake_cupy.empty((2, 4, 7, 9), np.float32)[:, :3]
    assert filter2d(crop, kernels, out=uneven) is uneven
    assert relative_error(uneven.host, expected) < TOLERANCE
    for device in (None, "cuda"):
        host = np.full((2, 3, 7, 9), np.nan, np.float32)
        assert filter2d(whole[:, 2:9, 4:13], kernels, out=host, device=device) is host
        assert relative_error(host, expected) < TOLERANCE


WHOLE = [a for a in CPU_ALGORITHMS if a.solves == "filter2d" and not a.reasons(filter_problem(1, 9, 9, 3, 3), None)]


@pytest.mark.parametrize("algorithm", WHOLE, ids=lambda a: a.name)
def test_cpu_algorithms_in_bands_and_strips(algorithm: Any, rng: np.random.Generator) -> None:
    """Images of more than one band, and a value that is not finite, which must reach its windows only."""
    problem = filter_problem(2, 41, 30, 5, 4, filters=3, border="reflect", dtype="float64")
    x, kernels = rng.standard_normal(problem.x_shape), rng.standard_normal(problem.w_shape)
    y = algorithm.run(problem, x, kernels, delta=2.0)
    assert y.shape == problem.y_shape == (2, 3, 41, 30)
    assert relative_error(y, oracle_filter(problem, x, kernels, delta=2.0)) < 1e-14
    x[0, 20, 15] = np.inf
    spoilt = ~np.isfinite(algorithm.run(problem, x, kernels))
    assert (spoilt.sum((2, 3)) == [[20, 20, 20], [0, 0, 0]]).all()


def test_a_kernel_of_numpy_is_kept_for_each_device_and_dtype(fake_cupy: Any) -> None:
    ones = np.ones((3, 3), np.float32)
    words = ones.view(np.int32)  # the same bytes
    for device in (0, 1, 0):
        for kernel, dtype in ((ones, np.float32), (words, np.int32)):
            image = fake_cupy.ndarray(np.zeros((8, 8), dtype), device)
            kept = kernel_beside(image, kernel)
            assert kept.data.device_id == device and kept.dtype == dtype
            np.testing.assert_array_equal(kept.host, kernel)
            assert kernel_beside(image, kernel.copy()) is kept


def test_explain_and_problems(host_device: HostDevice) -> None:
    image, kernels = np.ones((40, 50), np.float32), np.ones((6, 5, 5), np.float32)
    told = leanconv.explain(filter2d, image, kernels, border="wrap", device="cuda")
    assert told.chosen == "register_cache" and "6 filters 5x5" in str(told)
    one, many = (filter_problem(2, 40, 50, 5, 5, filters=filters) for filters in (1, 6))
    assert many.flops == 6 * one.flops and many.bytes == 4 * 7 * 2 * 40 * 50 and "filter 5x5" in str(one)
    assert (one.w_shape, one.y_shape) == ((5, 5), (2, 40, 50))
    assert (many.w_shape, many.y_shape) == ((6, 5, 5), (2, 6, 40, 50))
    assert leanconv.explain(many, device="cuda").chosen == "register_cache"
    with pytest.raises(ValueError, match="filters=0 is below 1"):
        leanconv.explain(filter_problem(2, 40, 50, 5, 5, filters=0))


def bank(rng: np.random.Generator, filters: int, kh: int, kw: int) -> np.ndarray:
    """Kernels that are products."""
    columns, rows = drawn(rng, filters, kh), drawn(rng, filters, kw)
    return np.einsum("fu,fv->fuv", columns, rows)


@pytest.mark.parametrize("last", [False, True])
def test_separable_kernels_take_a_pass_each(fake_cupy: Any, host_device: HostDevice, rng: Any, last: bool) -> None:
    kernels, channels = bank(rng, 3, 15, 20), (2,) * last
    x = drawn(rng, 4, 2, 30, 50, *channels)
    options = {"border": "wrap", "delta": 0.5, "channels_last": last}
    expected = filter2d(x, kernels, **options, separable=False)
    for image in (x, fake_cupy.asarray(x)):
        got = filter2d(image, kernels, **options)
        got = getattr(got, "host", got)
        assert got.shape == expected.shape == (4, 2, 3, 30, 50, *channels)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert (
        len(host_device.launches) == 3 and leanconv.explain(filter2d, x, kernels, device="cuda").chosen == "separable"
    )
    out = np.full(expected.shape, np.nan, np.float32)
    assert filter2d(x, kernels, **options, out=out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"out has shape \(4, 2, 3, 30\)"):
        filter2d(x, kernels, **options, out=out[..., 0] if not last else out[..., 0, 0])


@pytest.mark.parametrize("separable", [None, False])
def test_all_of_out_is_checked_as_each_result_is(rng: Any, separable: bool | None) -> None:
    x, kernels = drawn(rng, 30, 50), bank(rng, 2, 15, 20)
    room = np.zeros(5000, np.float32)
    apart, same, overlapping = (
        np.lib.stride_tricks.as_strided(room, (2, 30, 50), (step, 200, 4)) for step in (30 * 200, 0, 400)
    )
    assert filter2d(x, kernels, separable=separable, out=apart) is apart
    np.testing.assert_allclose(apart, filter2d(x, kernels, separable=False), rtol=1e-4, atol=1e-4)
    tensor = torch.zeros(30, 50).expand(2, 30, 50)
    for image, out in ((x, same), (x, overlapping), (torch.from_numpy(x), tensor)):
        with pytest.raises(ValueError, match="several of its elements share memory"):
            filter2d(image, kernels, separable=separable, out=out)
    for out in ([1], "x", 3):
        with pytest.raises(
            TypeError, match=f"out is a {type(out).__name__}; it must be an array of the inputs' library"
        ):
            filter2d(x, kernels, separable=separable, out=out)
    with pytest.raises(ValueError, match="image is an array of NumPy on the CPU, out one of PyTorch"):
        filter2d(x, kernels, separable=separable, out=torch.zeros(2, 30, 50))
    with pytest.raises(ValueError, match="out has dtype float64; the result has float32"):
        filter2d(x, kernels, separable=separable, dtype="float32", out=np.zeros((2, 30, 50)))


def test_all_kernels_are_separable_or_none(rng: np.random.Generator) -> None:
    kernels = bank(rng, 2, 15, 15)
    kernels[1] += np.eye(15, dtype=np.float32)
    x = drawn(rng, 20, 30)
    assert leanconv.explain(filter2d, x, kernels, device="cuda").chosen == "register_cache"
    with pytest.raises(ValueError, match="15x15 kernel is not the sum of at most 3 products"):
        filter2d(x, kernels, separable=True)
    with pytest.raises(ValueError, match="per_image=False"):
        filter2d(x[None], kernels[:1], separable=True, per_image=True)


def test_blocks_share_the_filters_out() -> None:
    """All filters in one pass as far as shared memory goes; beyond, parts of about the same size."""
    for filters, size, of_block in ((1, 5, 1), (32, 5, 32), (102, 5, 102), (103, 5, 52), (9, 32, 3), (3, 31, 3)):
        problem = filter_problem(2, 100, 300, size, size, filters=filters)
        assert filters_in_block(problem) == of_block and of_block * weight_bytes(problem) <= FILTER_BYTES
        for config in CACHE.configs(problem, TARGETS[0]):
            # the published scheme takes one filter
            assert filters == 1 or not isinstance(config, PartialSumsConfig)
            launch = CACHE.plan(problem, config, TARGETS[0]).launches[0]
            one = CACHE.plan(filter_problem(2, 100, 300, size, size), config, TARGETS[0]).launches[0]
            assert launch.grid == one.grid * -(-filters // of_block)
            assert launch.shared_bytes <= TARGETS[0].shared_per_block
    huge = filter_problem(2**16, 2**9, 2**9, 32, 32, filters=1024)
    assert "with 1024 filters may need more than 2**31 - 1 blocks" in CACHE.why_not(huge, TARGETS[0])[0]


@pytest.mark.gpu
def test_several_on_a_gpu_are_what_each_alone_is(rng: np.random.Generator) -> None:
    image = torch.from_numpy(drawn(rng, 2, 70, 301)).cuda()
    for filters, kh, kw in ((7, 3, 3), (32, 5, 4), (5, 32, 32)):
        kernels = torch.from_numpy(drawn(rng, filters, kh, kw)).cuda()
        together = filter2d(image, kernels, border="reflect")
        apart = torch.stack([filter2d(image, kernel, border="reflect") for kernel in kernels], 1)
        assert torch.equal(together, apart)


def test_kernels_of_the_same_bytes(fake_cupy: Any) -> None:
    """Neither another type nor another shape makes them one."""
    image, ints = fake_cupy.ndarray(np.zeros((8, 8), np.float32), 0), np.arange(9, dtype=np.int32)
    for kernel in (ints.view(np.float32).reshape(3, 3), ints.reshape(3, 3), ints.reshape(1, 9), ints.reshape(9, 1)):
        kept = kernel_beside(image, kernel)
        assert kept.shape == kernel.shape
        np.testing.assert_array_equal(kept.host, kernel.astype(np.float32))


def test_one_kernel_for_sums_of_several_types(fake_cupy: Any) -> None:
    kernel = np.full((3, 3), 2**24 + 1, np.int64)
    for dtype in (np.float32, np.int32, np.float32):
        assert kernel_beside(fake_cupy.ndarray(np.zeros((8, 8), dtype), 0), kernel).dtype == dtype


def test_one_kernel_for_two_libraries(fake_cupy: Any, torch_on_device: Any) -> None:
    kernel = np.ones((3, 3), np.float32)
    for _ in range(2):
        assert not isinstance(kernel_beside(fake_cupy.ndarray(np.zeros((8, 8), np.float32), 0), kernel), torch.Tensor)
        assert isinstance(kernel_beside(torch.zeros(8, 8), kernel), torch.Tensor)
