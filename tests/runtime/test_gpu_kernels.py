"""On a GPU: kernels that are compiled side by side, unloaded when nothing uses them, and kept by graphs."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import leanconv
from leanconv import ConvProblem, conv2d
from leanconv.call import bind, lookup
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.launch import open_device

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three ready calls and three kernels are kept; gives the device's kernels."""
    lookup.forget()
    kernels = open_device(0)._kernels  # type: ignore[attr-defined]
    monkeypatch.setattr(lookup, "_calls", BoundedCache(3))
    monkeypatch.setattr(bind, "_loaded", BoundedCache(3))
    monkeypatch.setattr(kernels, "_kept", BoundedCache(3))
    return kernels


def layer(width: int) -> tuple[Any, Any]:
    generator = torch.Generator("cuda").manual_seed(width)
    return tuple(torch.randn(s, device="cuda", generator=generator) for s in ((2, 8, 9, width), (8, 8, 3, 3)))


def right(y: Any, x: Any, w: Any) -> bool:
    expected = torch.nn.functional.conv2d(x.double(), w.double())
    return bool((y - expected).norm() < 1e-5 * expected.norm())


def test_more_kernels_than_are_kept_stay_right(few: Any) -> None:
    gc.collect()
    before = len(few._alive)  # held by what other tests keep
    for turn in range(2):
        for width in range(8, 30):
            x, w = layer(width)
            assert right(conv2d(x, w, algorithm="direct"), x, w), (turn, width)
    gc.collect()
    assert len(few._alive) - before <= 14, "the others are unloaded"


def test_a_graph_replays_after_its_kernels_are_no_longer_kept(few: Any) -> None:
    x, w = layer(8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        conv2d(x, w, algorithm="implicit_gemm")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = conv2d(x, w, algorithm="implicit_gemm")
    assert few._captured
    for width in range(9, 40):
        conv2d(*layer(width), algorithm="implicit_gemm")
    gc.collect()
    conv2d(*layer(50), algorithm="implicit_gemm")
    x.copy_(layer(8)[0] + 1)
    graph.replay()
    torch.cuda.synchronize()
    assert right(y, x, w)


def test_unloading_does_not_break_a_capture_elsewhere(few: Any) -> None:
    x, _w = layer(8)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for width in range(8, 40):
        conv2d(*layer(width), algorithm="direct")
    gc.collect()
    prepared = [layer(width) for width in range(40, 44)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = torch.relu(x)
        # loads a kernel, and unloads others before
        from_disk = [threading.Thread(target=lambda p=p: conv2d(*p, algorithm="direct")) for p in prepared[:1]]
        for thread in from_disk:
            thread.start()
        for thread in from_disk:
            thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.relu(x))


def test_threads_with_different_shapes_get_right_results() -> None:
    lookup.forget()
    wrong: list[int] = []

    def use(start: int) -> None:
        for width in range(start, start + 6):
            x, w = layer(width)
            if not right(conv2d(x, w), x, w):
                wrong.append(width)

    threads = [threading.Thread(target=use, args=(60 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compile_leaves_nothing_to_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup.forget()
    problems = [ConvProblem(2, 8, 9, width, 8, 3, 3) for width in range(100, 108)]
    made = leanconv.precompile(problems, progress=False)
    assert made.problems == 8 and made.kernels >= 8
    from leanconv.runtime import cache

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("compiled or loaded again")

    monkeypatch.setattr(cache, "compiled", refuse)
    for width in range(100, 108):
        x, w = layer(width)
        assert right(conv2d(x, w), x, w)
