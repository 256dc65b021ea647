"""prepare_weights: right values, one preparation for many calls, and when it is made again; on stand-ins for a GPU."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, NoAlgorithmError, PreparedWeights, conv1d, conv2d, explain, prepare_weights
from leanconv.arrays import arrays_of
from leanconv.call import choose
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.simt.implicit_gemm import ImplicitGemm
from leanconv.kernels.simt.tiles import TileConfig
from leanconv.plan import ALIGNMENT, Launch, Plan, Pointer, Target
from tests.cases import TARGETS
from tests.messages import says
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice, Other

PROBLEM = ConvProblem(n=2, c=4, h=9, w=7, k=6, r=3, s=2, padding=(1, 1, 1, 1))
WEIGHTS = 4 * 6 * 4 * 3 * 2
#: more than the filters, and no multiple of the alignment
MORE = 20
PREPARED = WEIGHTS + MORE
WORKSPACE = 36
TOLERANCE = 2e-6
STREAM = 0x51

_plan = ImplicitGemm.plan


class Preparing(ImplicitGemm):
    """implicit_gemm as if it made something of its filters first."""

    name = "preparing"

    def prepared_bytes(self, problem: ConvProblem, config: Any = None) -> int:
        return 4 * problem.k * problem.group_c * problem.r * problem.s + MORE

    def workspace_bytes(self, problem: ConvProblem, config: Any) -> int:
        return WORKSPACE

    def plan(self, problem: ConvProblem, config: Any, target: Target) -> Plan:
        constants = (("k", problem.k), ("r", problem.r), ("layout", problem.layout))
        arguments = (Pointer("w"), Pointer("prepared", written=True))
        launch = Launch("p.cuh", "leanconv::p", constants, (), arguments, grid=1, block=32)
        made = _plan(self, problem, config, target)
        return replace(made, workspace_bytes=WORKSPACE, prepare=(launch,), prepared_bytes=self.prepared_bytes(problem))


@pytest.fixture(autouse=True)
def preparing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparing]:
    """An algorithm of its own, in the registry before the stand-in for a GPU looks there."""
    algorithm = Preparing()
    monkeypatch.delenv("LEANCONV_WORKSPACE_LIMIT", raising=False)
    monkeypatch.setattr(choose, "ALGORITHMS", (*ALGORITHMS, algorithm))
    yield algorithm


@pytest.fixture
def device(preparing: Preparing, host_device: HostDevice) -> HostDevice:
    return host_device


@pytest.fixture
def given(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, w = (rng.standard_normal(shape, np.float32) for shape in (PROBLEM.x_shape, PROBLEM.w_shape))
    return x, w


def run(x: Any, w: Any, *arrays: Any, algorithm: str = "preparing", **options: Any) -> Any:
    return conv2d(x, w, *arrays, padding=1, algorithm=algorithm, **options)


def right(y: Any, x: np.ndarray, w: np.ndarray, problem: ConvProblem = PROBLEM) -> bool:
    return relative_error(y if isinstance(y, np.ndarray) else y.host, oracle_conv(problem, x, w, None)) < TOLERANCE


# Without prepare_weights


def test_each_call_prepares_in_one_allocation_with_its_workspace(
    device: HostDevice, fake_cupy: Any, given: Any
) -> None:
    x, w = map(fake_cupy.asarray, given)
    for calls in (1, 2, 3):
        fake_cupy.allocations = 0
        y = run(x, w)
        assert right(y, *given) and device.prepared == calls and fake_cupy.allocations == 2
        workspace, prepared = (device.launches[-1][1][role] for role in ("workspace", "prepared"))
        assert workspace and prepared >= workspace + WORKSPACE and prepared % ALIGNMENT == 0
    assert device.waited == []
    w.host[...] *= 2
    assert right(run(x, w), given[0], 2 * given[1]), "nothing is kept"


def test_the_memory_of_a_preparation_lives_until_the_launch(
    device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    empty = fake_cupy.empty
    monkeypatch.setattr(fake_cupy, "empty", lambda shape, dtype: made.append(empty(shape, dtype)) or made[-1])
    run(*map(fake_cupy.asarray, given))
    scratch = made[-1]
    workspace, prepared = (device.launches[-1][1][role] for role in ("workspace", "prepared"))
    assert workspace == scratch.data.ptr and prepared + PREPARED <= workspace + scratch.host.nbytes


def test_numpy_arrays_bring_both_and_give_them_back(device: HostDevice, given: Any) -> None:
    for w in (given[1], prepare_weights(given[1])):
        assert right(run(given[0], w, device="cuda"), *given)
        assert device.memory == {}
    assert device.prepared == 2, "NumPy's filters keep nothing"


# Preparing once


def test_one_preparation_serves_all_calls(device: HostDevice, fake_cupy: Any, given: Any) -> None:
    x, w = map(fake_cupy.asarray, given)
    prepared = prepare_weights(w)
    assert prepared.nbytes == 0 and device.prepared == 0, "nothing is made before it is known what for"
    fake_cupy.allocations = 0
    for calls in range(1, 4):
        y = run(x, prepared)
        assert right(y, *given)
        # what is kept once; the result and the workspace each time
        assert fake_cupy.allocations == 1 + 2 * calls and fake_cupy.copies == 0
    assert device.prepared == 1 and device.waited == [STREAM] and prepared.nbytes == PREPARED
    kept = {values["prepared"] for _, values in device.launches}
    assert len(kept) == 1 and 0 not in kept
    # another batch, stride and bias: other launches behind the same preparation
    more = np.concatenate([given[0], given[0]])
    y = run(fake_cupy.asarray(more), prepared, fake_cupy.asarray(np.zeros(6, np.float32)), 2)
    assert right(y, more, given[1], replace(PROBLEM, n=4, stride=(2, 2)))
    assert device.prepared == 1 and prepared.nbytes == PREPARED
    # an algorithm that prepares nothing, or one that is free to choose
    for name in ("implicit_gemm", "auto"):
        assert right(run(x, prepared, algorithm=name), *given)


def test_other_launches_prepare_for_themselves(device: HostDevice, fake_cupy: Any, rng: np.random.Generator) -> None:
    # a shape that every layout can read
    x, w = (rng.standard_normal((4, 4, 4, 4), np.float32) for _ in range(2))
    prepared = prepare_weights(fake_cupy.asarray(w))
    for calls in (1, 2):
        for layout in ("NCHW", "NHWC", "CHWN"):
            problem = ConvProblem(4, 4, 4, 4, 4, 4, 4, layout=layout)  # type: ignore[arg-type]
            y = conv2d(fake_cupy.asarray(x), prepared, layout=layout, algorithm="preparing")
            assert right(y, x, w, problem)
        assert device.prepared == 3 and prepared.nbytes == 3 * (4 * w.size + MORE), calls


def test_refresh(device: HostDevice, fake_cupy: Any, given: Any) -> None:
    x, w = map(fake_cupy.asarray, given)
    prepared = prepare_weights(w)
    run(x, prepared)
    w.host[...] *= 3
    assert right(run(x, prepared), *given), "the launches read what is kept, not w"
    prepared.refresh()
    assert prepared.nbytes == 0
    for _ in range(2):
        assert right(run(x, prepared), given[0], 3 * given[1])
    assert device.prepared == 2 and prepared.nbytes == PREPARED


@pytest.mark.parametrize("name, bytes_kept", [("preparing", PREPARED + WEIGHTS), ("implicit_gemm", WEIGHTS)])
def test_filters_that_no_kernel_can_read_are_copied_once(
    name: str, bytes_kept: int, device: HostDevice, fake_cupy: Any, given: Any
) -> None:
    x, w = fake_cupy.asarray(given[0]), fake_cupy.asarray(given[1][..., ::-1].copy())[..., ::-1]
    assert not w.flags.c_contiguous
    prepared = prepare_weights(w)
    for _ in range(3):
        assert right(run(x, prepared, algorithm=name), *given)
    assert fake_cupy.copies == 1 and prepared.nbytes == bytes_kept
    assert right(run(x, w, algorithm=name), *given) and fake_cupy.copies == 2
    # the copy is shared by what else is made of the filters
    run(x, prepared, algorithm="implicit_gemm" if name == "preparing" else "preparing")
    assert fake_cupy.copies == 2 and prepared.nbytes == PREPARED + WEIGHTS


def test_out_is_checked_and_filled(device: HostDevice, fake_cupy: Any, rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((1, 4, 4, 4), (4, 4, 1, 1)))
    whole = fake_cupy.asarray(np.zeros((1, 8, 4, 4), np.float32))
    prepared = prepare_weights(fake_cupy.asarray(w))
    with says(ValueError, "out has shape (1, 8, 4, 4); the result has (1, 4, 4, 4)"):
        conv2d(fake_cupy.asarray(x), prepared, out=whole, algorithm="preparing")
    for out in (whole[:, :4], whole[:, ::2]):
        assert conv2d(fake_cupy.asarray(x), prepared, out=out, algorithm="preparing") is out
        assert relative_error(out.host, oracle_conv(ConvProblem(1, 4, 4, 4, 4, 1, 1), x, w, None)) < TOLERANCE
    filters = whole[:, :4]  # one of 4 channels, 4x4; what is written must not be read
    image = fake_cupy.asarray(np.ones((1, 4, 7, 7), np.float32))
    for _ in range(2):
        with says(ValueError, "out overlaps w in memory"):
            conv2d(image, prepare_weights(filters), out=whole[:, 2:3], algorithm="preparing")


def test_an_empty_batch_prepares_nothing(device: HostDevice, fake_cupy: Any, given: Any) -> None:
    prepared = prepare_weights(fake_cupy.asarray(given[1]))
    y = run(fake_cupy.asarray(given[0][:0]), prepared)
    assert y.shape == (0, *PROBLEM.y_shape[1:]) and prepared.nbytes == 0 and device.launches == []


# Streams, graphs, threads, failures


@pytest.mark.parametrize("copied", [False, True])
def test_every_stream_reads_what_one_has_made(
    copied: bool, device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = map(fake_cupy.asarray, given)
    if copied:
        w = fake_cupy.asarray(given[1][..., ::-1].copy())[..., ::-1]
    told: list[Any] = []
    monkeypatch.setattr(type(arrays_of(x)), "in_use", lambda self, array, index: told.append((array, index)))
    prepared = prepare_weights(w)
    stream = fake_cupy.cuda.get_current_stream()
    for handle, streams in ((STREAM, 0), (7, 1), (STREAM, 1), (7, 1), (9, 2)):
        stream.ptr = handle
        assert right(run(x, prepared), *given)
        assert device.launches[-1][0] == handle
        # the allocator has to know of all that is kept, once for each stream
        assert len(told) == streams * (2 if copied else 1)
    assert device.prepared == 1 and device.waited == [STREAM]
    values = device.launches[-1][1]
    assert {array.data.ptr for array, _ in told} == (
        {values["w"], values["prepared"]} if copied else {values["prepared"]}
    )
    assert {index for _, index in told} == {0}
    # other work on the same copy, first on a stream that has not seen it
    stream.ptr = 11
    assert right(run(x, prepared, algorithm="implicit_gemm"), *given)
    assert [array.data.ptr for array, _ in told[2 * (1 + copied) :]] == [values["w"]] * copied


def test_a_graph_prepares_for_itself_unless_something_is_kept(device: HostDevice, fake_cupy: Any, given: Any) -> None:
    x, w = map(fake_cupy.asarray, given)
    prepared = prepare_weights(w)
    device.captures.add(STREAM)
    for calls in (1, 2):
        assert right(run(x, prepared), *given)
        assert device.prepared == calls and prepared.nbytes == 0
    device.captures.clear()
    run(x, prepared)
    device.captures.add(STREAM)
    launched = len(device.launches)
    assert right(run(x, prepared), *given)
    assert device.prepared == 3 and len(device.launches) == launched + 1


def test_threads_make_it_once(device: HostDevice, fake_cupy: Any, given: Any) -> None:
    x, w = map(fake_cupy.asarray, given)
    run(x, w), run(x, prepare_weights(w))  # compiled, so that all threads arrive at the preparation
    prepared, before = prepare_weights(w), device.prepared
    barrier, results = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        results.append(run(x, prepared))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(right(y, *given) for y in results)
    assert device.prepared == before + 1


def test_a_preparation_that_fails_is_not_kept(
    device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, prepared = fake_cupy.asarray(given[0]), prepare_weights(fake_cupy.asarray(given[1]))

    def fail(stream: int) -> None:
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as patch:
        patch.setattr(device, "wait", fail)
        with says(RuntimeError, "an illegal address"):
            run(x, prepared)
    assert prepared.nbytes == 0
    assert right(run(x, prepared), *given) and prepared.nbytes == PREPARED


# What it is to its owner


def test_it_stands_for_its_array_on_the_cpu(given: Any) -> None:
    expected = oracle_conv(PROBLEM, *given, None)
    prepared = prepare_weights(given[1])
    for name in ("auto", "im2win", "im2col"):
        assert relative_error(run(given[0], prepared, algorithm=name), expected) < TOLERANCE
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(given[0]), torch.from_numpy(given[1]).requires_grad_()
    y = run(x, prepare_weights(w), algorithm="auto")
    assert relative_error(y.detach().numpy(), expected) < TOLERANCE
    y.sum().backward()
    assert w.grad is not None and prepared.nbytes == 0


def test_what_is_asked_of_it(fake_cupy: Any, given: Any, device: HostDevice) -> None:
    w = fake_cupy.asarray(given[1])
    prepared = prepare_weights(w)
    assert isinstance(prepared, PreparedWeights) and prepared.array is w and prepare_weights(prepared) is prepared
    assert prepared.shape == w.shape and prepared.dtype == w.dtype and prepared.ndim == 4
    run(fake_cupy.asarray(given[0]), prepared)
    assert repr(prepared) == f"<PreparedWeights: CuPy (6, 4, 3, 2) float32 on cuda:0, {PREPARED} bytes kept>"
    with pytest.raises(AttributeError, match="'ndarray' object has no attribute 'size_of_it'"):
        _ = prepared.size_of_it
    assert not hasattr(prepared, "__dlpack__") and not hasattr(prepared, "__array__"), "it is no array"
    again = prepare_weights(given[1])
    for made in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert np.array_equal(made.array, given[1]) and made.nbytes == 0


def test_numpy_images_and_cupy_filters_do_not_mix(fake_cupy: Any, given: Any, device: HostDevice) -> None:
    # what NumPy asks of the filters for the key of a warm call, CuPy's answer alike
    assert run(given[0], prepare_weights(given[1]), algorithm="auto").shape == PROBLEM.y_shape
    with says(ValueError, "x is an array of NumPy on the CPU, w one of CuPy on cuda:0"):
        run(given[0], prepare_weights(fake_cupy.asarray(given[1])), algorithm="auto")
    with says(ValueError, "x is an array of CuPy on cuda:0, w one of NumPy on the CPU"):
        run(fake_cupy.asarray(given[0]), prepare_weights(given[1]), algorithm="auto")


@pytest.mark.parametrize(
    "w, kind, message",
    [([[1.0]], TypeError, "w is a list; it must be an array"),
     (np.ones((3, 3), np.float32), ValueError, "w has 2 dimensions, shape (3, 3); it must have 4, or 3 for conv1d"),
     (np.ones((1, 1, 3, 3), np.int64), TypeError, "w has dtype int64; supported are float32")],
)  # fmt: skip
def test_what_cannot_be_prepared(w: Any, kind: type[Exception], message: str) -> None:
    with says(kind, message):
        prepare_weights(w)


def test_arrays_of_other_libraries(given: Any) -> None:
    prepared = prepare_weights(Other(given[1]))
    expected = oracle_conv(PROBLEM, *given, None)
    for x in (given[0], Other(given[0])):
        assert relative_error(run(x, prepared, algorithm="auto"), expected) < TOLERANCE


def test_the_filters_of_a_signal(device: HostDevice, fake_cupy: Any, rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((2, 4, 30), (6, 4, 5)))
    problem = ConvProblem(2, 4, 1, 30, 6, 1, 5)
    prepared = prepare_weights(fake_cupy.asarray(w))
    for _ in range(3):
        y = conv1d(fake_cupy.asarray(x), prepared, algorithm="preparing")
        assert relative_error(y.host[:, :, None], oracle_conv(problem, x[:, :, None], w[:, :, None], None)) < TOLERANCE
    assert device.prepared == 1


# Limits


def test_a_limit_that_is_given_counts_what_is_prepared(preparing: Preparing) -> None:
    needs = f"it needs {WORKSPACE} bytes of workspace and {PREPARED} of packed weights, and workspace_limit is "

    def why_not(name: str, limit: int | None) -> tuple[str, ...]:
        return choose.consider(preparing, PROBLEM, TARGETS[0], name, limit).reasons

    for name in ("preparing", "auto"):
        assert why_not(name, WORKSPACE + PREPARED) == ()
        assert why_not(name, WORKSPACE + PREPARED - 1) == (f"{needs}{WORKSPACE + PREPARED - 1}",)
    assert why_not("preparing", None) == ()
    # without a limit the workspace counts alone
    assert why_not("auto", None) == (f"it needs {WORKSPACE} bytes of workspace, and workspace_limit is 0",)
    assert preparing.within(PROBLEM, TARGETS[0], WORKSPACE) and not preparing.within(PROBLEM, TARGETS[0], WORKSPACE - 1)
    with says(NoAlgorithmError, f"preparing: {needs}50"):
        choose.choose(PROBLEM, TARGETS[0], "preparing", 50)
    assert choose.choose(PROBLEM, TARGETS[0], "preparing").algorithm is preparing


def test_auto_takes_what_is_prepared_but_no_workspace_unless_told(
    preparing: Preparing, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparing, "timed", lambda self, problem, target: [(-1.0, TileConfig())])

    def chosen(**options: Any) -> bool:
        return explain(PROBLEM, device="cuda", **options).chosen == "preparing"

    assert not chosen(), "its workspace is more than none"
    assert not chosen(workspace_limit=WORKSPACE + PREPARED - 1) and chosen(workspace_limit=WORKSPACE + PREPARED)
    monkeypatch.setattr(Preparing, "workspace_bytes", lambda self, problem, config: 0)
    assert chosen() and not chosen(workspace_limit=0) and not chosen(workspace_limit=PREPARED - 1)
    assert chosen(workspace_limit=PREPARED)
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "0")
    assert not chosen(), "a limit of the environment is given too"
    told = explain(PROBLEM, device="cuda", algorithm="preparing", workspace_limit=PREPARED)
    assert (told.workspace_bytes, told.prepared_bytes) == (0, PREPARED)
    assert f"workspace 0 bytes, packed weights {PREPARED} bytes (workspace_limit {PREPARED})" in str(told)


def test_a_limit_of_zero_and_none_are_different_calls(
    device: HostDevice, fake_cupy: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparing, "timed", lambda self, problem, target: [(-1.0, TileConfig())])
    monkeypatch.setattr(Preparing, "workspace_bytes", lambda self, problem, config: 0)
    x, w = map(fake_cupy.asarray, given)
    for calls in (1, 2):
        assert right(run(x, w, algorithm="auto"), *given) and device.prepared == calls
        assert right(run(x, w, algorithm="auto", workspace_limit=0), *given) and device.prepared == calls


def test_changes_that_pytorch_counts_are_followed(
    preparing: Preparing, torch_on_device: HostDevice, given: Any
) -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(given[0]), torch.from_numpy(given[1].copy()).requires_grad_()
    prepared, device = prepare_weights(w), torch_on_device
    optimiser = torch.optim.SGD([w], 0.1)
    for preparations in (1, 2, 3):
        with torch.no_grad():
            for _ in range(2):
                y = run(x, prepared)
                assert relative_error(y.numpy(), oracle_conv(PROBLEM, given[0], w.numpy(), None)) < TOLERANCE
        assert device.prepared == preparations
        w.grad = torch.ones_like(w)
        optimiser.step()
    with torch.inference_mode():
        frozen = prepare_weights(torch.from_numpy(given[1].copy()))
        assert right_torch(run(x, frozen), given) and right_torch(run(x, frozen), given)
    assert device.prepared == 4


@pytest.mark.parametrize("changed", ["counted", "told"])
def test_a_copy_of_strided_filters_follows_them(torch_on_device: HostDevice, given: Any, changed: str) -> None:
    torch = pytest.importorskip("torch")
    x, twice = torch.from_numpy(given[0]), torch.from_numpy(np.repeat(given[1], 2, axis=3))
    w = twice[..., ::2]
    prepared = prepare_weights(w)
    for _ in range(3):
        values = w.contiguous().numpy().copy()
        assert right_torch(run(x, prepared), (given[0], values))
        if changed == "counted":
            w.add_(1.0)
        else:
            w.data.add_(1.0)
            prepared.refresh()


def test_each_memory_order_has_its_copy(torch_on_device: HostDevice, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, twice = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in ((2, 4, 9, 9), (8, 4, 3, 6)))
    prepared = prepare_weights(twice[..., ::2])
    expected = torch.nn.functional.conv2d(x, twice[..., ::2]).numpy()
    for layout, order in [("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)] * 2:
        # one of the plans that prepare nothing, so that orders are all that tells the copies apart
        y = conv2d(x.to(memory_format=order), prepared, layout=layout, algorithm="implicit_gemm")  # type: ignore[arg-type]
        assert relative_error(y.numpy(), expected) < TOLERANCE, layout
    assert prepared.nbytes == 2 * 4 * 8 * 4 * 3 * 3


def right_torch(y: Any, given: Any) -> bool:
    return relative_error(y.numpy(), oracle_conv(PROBLEM, *given, None)) < TOLERANCE


def test_strided_filters_after_contiguous_ones(torch_on_device: Any) -> None:
    """Of the same sizes and order: ones are read in place, the others are copied."""
    torch = pytest.importorskip("torch")
    x, twice = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 6)
    for w in (twice[..., ::2].contiguous(), twice[..., ::2], twice[..., 1::2].contiguous(), twice[..., 1::2]):
        y = conv2d(x, prepare_weights(w), algorithm="winograd1d")
        assert relative_error(y.numpy(), torch.nn.functional.conv2d(x, w).numpy()) < 1e-5
