"""``batch_invariant=True``: an image has the same bits in the result of every batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.call import batches, host_call
from leanconv.call.choose import NoAlgorithmError, choose
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.dtypes import is_integer
from leanconv.kernels.common.split_gemm import SplitGemm
from leanconv.kernels.contract import Config, GpuAlgorithm
from leanconv.kernels.hopper_fp32.tensor_gemm import TensorGemm
from leanconv.kernels.simt.implicit_gemm import ImplicitGemm
from leanconv.problem import ConvProblem
from tests import cases, emulator, proof, selection
from tests.cases import CASES, TARGETS, TRANSFORM_CASES
from tests.cases_16bit import NATIVE_CASES
from tests.cases_tensor import TF32_CASES
from tests.variants import VARIANTS

#: So few multiprocessors that batches of 1, 2 and 5 images have different tiles and splits.
SMALL = replace(TARGETS[0], multiprocessors=4)
MOST = 5

OF_PRECISION = {"fp32": TRANSFORM_CASES, "tf32": (*TRANSFORM_CASES, *TF32_CASES)}
EVERY = [
    (algorithm, case)
    for algorithm in VARIANTS
    for case in (*CASES, *NATIVE_CASES, *OF_PRECISION.get(algorithm.precision, ()))
    if isinstance(case.problem, ConvProblem) and case.problem.op != "wgrad" and not case.problem.is_empty
    if not algorithm.reasons(replace(case.problem, n=MOST), SMALL)
]
#: not those of whole-image sizes: an algorithm's smallest case with a reduction that is worth a split
SOME = [
    min((pair for pair in EVERY if pair[0] is algorithm), key=lambda pair: abs(pair[1].problem.flops - 1e6))
    for algorithm in dict.fromkeys(algorithm for algorithm, _ in EVERY)
]


def named(pairs: list[Any], chosen: list[Any]) -> Any:
    return pytest.mark.parametrize(
        ("algorithm", "case"), selection.marked(pairs, chosen, lambda pair: (pair, f"{pair[0].stem}-{pair[1].name}"))
    )


def images(problem: ConvProblem) -> dict[str, np.ndarray | None]:
    """Inputs whose images have very different sizes: none may influence another one."""
    first, *_ = problem.operands
    inputs = cases.draw_conv(problem, "zero-mean")
    if not is_integer(problem.dtype):
        x = np.moveaxis(inputs[first.role], problem.layout.index("N"), 0)  # type: ignore[arg-type]
        x *= np.logspace(-3, 3, len(x)).reshape(-1, 1, 1, 1).astype(x.dtype)
    return inputs


def some_of(inputs: dict[str, Any], problem: ConvProblem, first: int, count: int) -> dict[str, Any]:
    """The inputs of a batch of ``count`` images, from number ``first`` on."""
    axis, numbers = problem.layout.index("N"), range(first, first + count)
    roles = {problem.operands[0].role, "add"} & {role for role, given in inputs.items() if given is not None}
    return inputs | {role: np.ascontiguousarray(np.take(inputs[role], numbers, axis)) for role in roles}


def result(algorithm: GpuAlgorithm, problem: ConvProblem, config: Config, inputs: dict[str, Any]) -> np.ndarray:
    """What the emulator computes, images first. Races, which other orders of threads show, are other tests' matter."""
    written = problem.operands[-1]
    y = np.full(problem.y_shape, 1 if problem.accumulate else proof.POISON[written.dtype], written.dtype)
    emulator.run_plan(algorithm.plan(problem, config, SMALL), {**inputs, written.role: y}, orders=("ascending",))
    return np.moveaxis(y, problem.layout.index("N"), 0)


def check(algorithm: GpuAlgorithm, problem: ConvProblem, most: int = MOST) -> None:
    """Raise AssertionError unless images have the bits that they have among ``most`` also alone and in twos."""
    problem = replace(problem, n=most, batch_invariant=True)
    inputs, expected = images(problem), None
    for first, count in ((0, most), (3, 1), (1, 2)):
        part = replace(problem, n=count)
        order = batches.order(algorithm, part, SMALL, lambda other: inf)
        assert order is not None
        config = batches.config(algorithm, part, SMALL, order[1], inf)
        assert config is not None
        y = result(algorithm, part, config, some_of(inputs, problem, first, count))
        expected = y if expected is None else expected
        assert y.tobytes() == np.ascontiguousarray(expected[first : first + count]).tobytes(), (first, count, config)


@named(EVERY, SOME)
def test_an_image_has_the_same_bits_in_every_batch(algorithm: GpuAlgorithm, case: cases.Case) -> None:
    check(algorithm, case.problem)


def test_every_algorithm_of_images_is_among_them() -> None:
    names = "tensor_weight", "native_weight", "implicit_gemm_weight"
    of_filters = {a.stem for a in VARIANTS if a.stem.startswith(names)}
    others = {a.stem for a in VARIANTS if a.name == "depthwise_weight"} | {"direct_weight"}
    others |= {a.stem for a in VARIANTS if a.solves == "filter2d"} | {"implicit_gemm_patches"}  # of volumes alone
    assert {algorithm.stem for algorithm, _ in SOME} == {a.stem for a in VARIANTS} - of_filters - others


ORDERED = [(a, c) for a, c in EVERY if c.thorough or a.stem.startswith(("depthwise", "single", "direct_tiled"))]


@named(
    ORDERED,
    [(a, c) for a, c in ORDERED if (a.stem, c.name) in {("implicit_gemm", "plain-nhwc"), ("winograd1d", "plain-nchw")}],
)
def test_configurations_of_one_order_give_the_same_bits(algorithm: GpuAlgorithm, case: cases.Case) -> None:
    problem = replace(case.problem, batch_invariant=True)
    inputs, found = images(problem), defaultdict(set)
    for config in proof.extreme_configs(algorithm, problem, SMALL):
        order = batches.order_of(algorithm, problem, config)
        if order is not None:
            found[order].add(result(algorithm, problem, config, inputs).tobytes())
    assert found and all(len(bits) == 1 for bits in found.values()), {order: len(b) for order, b in found.items()}


# Broken on purpose


#: Layers of which the small GPU shares the reduction of one image among blocks, but not that of five.
SHARED = ConvProblem(1, 128, 8, 8, 32, 1, 1)
LONG = ConvProblem(1, 128, 8, 8, 24, 3, 3, padding=(1, 1, 1, 1))


@pytest.fixture
def anew() -> Iterator[None]:
    """Orders of sums are found anew, before and after."""
    batches._order.cache_clear()
    yield
    batches._order.cache_clear()


@pytest.mark.parametrize(
    ("algorithm", "kind", "problem"),
    [
        pytest.param(ImplicitGemm(), ImplicitGemm, SHARED, id="implicit_gemm"),
        pytest.param(TensorGemm(), SplitGemm, LONG, id="tensor_gemm", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("anew")
def test_without_an_order_of_sums_the_batch_shows(
    algorithm: GpuAlgorithm, kind: Any, problem: ConvProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickest configuration of each batch gives other bits."""
    check(algorithm, problem)
    batches._order.cache_clear()
    monkeypatch.setattr(kind, "order_of_sums", lambda self, problem, config: ())
    with pytest.raises(AssertionError):
        check(algorithm, problem)


@pytest.mark.usefixtures("anew")
def test_where_clusters_share_the_tiles_that_are_left_over_the_batch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tiles four blocks have one each, and clusters of two share the fifth; of one tile that one."""
    timed, launch = TensorGemm.timed, TensorGemm.main_launch
    monkeypatch.setattr(
        TensorGemm, "timed", lambda *given: [(t, c) for t, c in timed(*given) if c.split == 2 and c.pixels == 128]
    )
    layer = replace(LONG, c=32)
    check(TensorGemm(), layer, most=9)
    by_default = lambda self, problem, *given: launch(self, replace(problem, batch_invariant=False), *given)  # noqa: E731
    monkeypatch.setattr(TensorGemm, "main_launch", by_default)
    with pytest.raises(AssertionError):
        check(TensorGemm(), layer, most=9)


@pytest.mark.parametrize("layout", cases.ALL)
def test_the_choice_does_not_depend_on_the_batch(layout: Any) -> None:
    layers = [(64, 56, 64, 3), (512, 7, 512, 3), (256, 14, 1024, 1), (3, 64, 32, 7), (96, 14, 96, 5)]
    for c, side, k, taps in layers:
        layer = ConvProblem(1, c, side, side, k, taps, taps, padding=(taps // 2,) * 4, layout=layout)
        for op in ("fprop", "dgrad"):
            chosen = set()
            for n in (1, 2, 3, 8, 20, 128, 300):
                problem = replace(layer, n=n, op=op, batch_invariant=True)  # type: ignore[arg-type]
                choice = choose(problem, TARGETS[0])
                assert isinstance(choice.algorithm, GpuAlgorithm) and choice.config is not None
                chosen.add((choice.algorithm.name, batches.order_of(choice.algorithm, problem, choice.config)))
            assert len(chosen) == 1, (layer, chosen)


def test_a_batch_that_the_choice_for_all_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem(4000, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), batch_invariant=True)
    chosen = choose(problem, TARGETS[0]).algorithm
    why_not = type(chosen).why_not
    monkeypatch.setattr(
        type(chosen), "why_not", lambda self, p, t: [*why_not(self, p, t), *(["it is too large"] if p.n > 1000 else [])]
    )
    with pytest.raises(NoAlgorithmError, match=f"{chosen.name} was chosen for every batch.*too large.*fewer images"):
        choose(problem, TARGETS[0])
    assert choose(replace(problem, n=999), TARGETS[0]).algorithm is chosen


# The calls


@pytest.mark.parametrize("layout", cases.ALL)
@pytest.mark.parametrize("name", ["auto", *(a.stem for a in CPU_ALGORITHMS if a.solves == "conv2d")])
def test_on_the_cpu(name: str, layout: Any) -> None:
    for problem in (
        ConvProblem(MOST, 6, 9, 11, 10, 3, 3, padding=(1, 1, 1, 1), bias=True),
        ConvProblem(MOST, 33, 1, 1, 17, 1, 1, activation="relu"),
        ConvProblem(MOST, 5, 9, 8, 5, 3, 3, groups=5),
    ):
        problem = replace(problem, layout=layout, batch_invariant=True)
        if name != "auto" and next(a for a in CPU_ALGORITHMS if a.stem == name).reasons(problem, None):
            continue
        inputs, axis = images(problem), layout.index("N")

        def call(first: int, count: int, problem: Any = problem, inputs: Any = inputs) -> np.ndarray:
            given = some_of(inputs, problem, first, count)
            return leanconv.conv2d(
                given["x"], given["w"], given["bias"], padding=problem.padding, groups=problem.groups, layout=layout,
                algorithm=name, activation=problem.activation, batch_invariant=True,
            )  # fmt: skip

        expected = call(0, MOST)
        for first, count in ((0, 1), (4, 1), (1, 2), (2, 3)):
            some = np.take(expected, range(first, first + count), axis)
            assert np.array_equal(call(first, count), some), (problem, first, count)


def test_the_cpu_computes_image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS sums a matrix by a vector in another order than by a matrix: one pixel alone shows it."""
    x, w = cases.draw(np.random.default_rng(0), (64, 300, 1, 1), "zero-mean"), np.ones((40, 300, 1, 1), np.float32)
    many, alone = leanconv.conv2d(x, w, batch_invariant=True), leanconv.conv2d(x[5:6], w, batch_invariant=True)
    assert np.array_equal(many[5:6], alone)
    computed: list[int] = []
    once = host_call.CpuCall._image_by_image
    monkeypatch.setattr(host_call.CpuCall, "_image_by_image", lambda *given: computed.append(1) or once(*given))
    leanconv.conv2d(x, w, batch_invariant=True)
    assert computed == [1]
    leanconv.conv2d(x, w)
    assert computed == [1]


def test_what_it_refuses() -> None:
    x, w = np.ones((2, 3, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32)
    with pytest.raises(TypeError, match="batch_invariant=1 is not True or False"):
        leanconv.conv2d(x, w, batch_invariant=1)  # type: ignore[arg-type]
    why = "the gradient of the filters is a sum over the images"
    with pytest.raises(ValueError, match=why):
        leanconv.conv2d_weight(x, np.ones((2, 4, 3, 3), np.float32), w.shape, batch_invariant=True)
    with pytest.raises(ValueError, match=why):
        leanconv.explain(ConvProblem(2, 3, 5, 5, 4, 3, 3, op="wgrad", batch_invariant=True))


def test_it_is_part_of_the_call_and_of_its_explanation() -> None:
    x, w = np.ones((2, 3, 5, 5), np.float32), np.ones((4, 3, 3, 3), np.float32)
    assert "batch_invariant" in str(leanconv.explain(leanconv.conv2d, x, w, batch_invariant=True))
    assert "batch_invariant" not in str(leanconv.explain(leanconv.conv2d, x, w))
    problem = ConvProblem(2, 64, 14, 14, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", batch_invariant=True)
    assert "over all batches" in leanconv.explain(problem, device="cuda").why


def test_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    ours = pytest.importorskip("leanconv.torch")
    torch.manual_seed(0)
    x, layer = torch.randn(MOST, 6, 9, 11), ours.Conv2d(6, 8, 3, padding=1, stride=2, batch_invariant=True)
    assert "batch_invariant=True" in repr(layer) and "batch_invariant" not in repr(ours.Conv2d(6, 8, 3))
    found = []
    for images in (x, x[3:4]):
        images = images.clone().requires_grad_()
        layer.zero_grad()
        y = layer(images)
        y.square().sum().backward()
        assert layer.weight.grad.abs().sum() > 0  # a sum over the images, as ever
        found.append((y.detach(), images.grad, ours.conv_transpose2d(y.detach(), layer.weight, batch_invariant=True)))
    for many, alone in zip(*found, strict=True):
        assert torch.equal(many[3:4], alone)


def test_a_patch_asks_for_it_in_both_directions_of_an_image() -> None:
    torch = pytest.importorskip("torch")
    from leanconv.torch import layers, patch, switch

    x, w = torch.zeros(2, 6, 9, 11), torch.zeros(8, 6, 3, 3)
    options = layers.Options((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    for wanted in (False, True):
        taken = patch.Patch(None, None, None, "fp32", wanted)
        problems = [taken.problem(op, options, x.dtype) for op in layers.operations(x, w, options)]
        assert [p.batch_invariant for p in problems] == [wanted, wanted, False]
    with pytest.raises(TypeError, match="batch_invariant='yes' is not True or False"):
        switch.enable(batch_invariant="yes")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", cases.ALL)
def test_on_a_gpu(layout: Any) -> None:
    rng = np.random.default_rng(2)
    for c, side, k, taps, dtype in (
        (64, 14, 64, 3, "float32"),
        (512, 7, 512, 3, "float32"),
        (96, 14, 32, 1, "float16"),
    ):
        problem = ConvProblem(37, c, side, side, k, taps, taps, dtype=dtype, layout=layout)  # type: ignore[arg-type]
        x, w = (cases.draw(rng, o.shape, "zero-mean", dtype) for o in problem.operands[:2])
        call: Any = lambda x, w=w: leanconv.conv2d(x, w, layout=layout, device="cuda", batch_invariant=True)  # noqa: E731
        axis, expected = layout.index("N"), call(x)
        for first, count in ((0, 1), (36, 1), (3, 8), (1, 32)):
            chosen = range(first, first + count)
            some = call(np.ascontiguousarray(np.take(x, chosen, axis)))
            assert np.array_equal(some, np.take(expected, chosen, axis)), (problem, first, count)
