"""The gradient of a layer's input: what it is made of, parts of an output, the oracle and the CPU engine.

Kernels meet it in test_algorithms.py too, on the gradient cases.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.call.choose import NoAlgorithmError, by_model, choose
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.kernels.common import input_gradient
from leanconv.kernels.simt.implicit_gemm import segment_launch
from leanconv.plan import Launch, Plan
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import cases, emulator, proof, selection
from tests.cases import ALL, CONV_CASES, GRADIENT_CASES, TARGETS
from tests.variants import NAMED, VARIANTS

IM2COL = next(a for a in CPU_ALGORITHMS if a.stem == "im2col")
GEMM = NAMED["implicit_gemm"]
#: Layers whose gradients people compute: of unit stride, strided with unlike and with like phases, patches.
USUAL = {
    "deep": ConvProblem(128, 512, 7, 7, 512, 3, 3, padding=(1, 1, 1, 1), op="dgrad"),
    "strided": ConvProblem(32, 128, 56, 56, 256, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1), op="dgrad"),
    "strided-pointwise": ConvProblem(32, 256, 56, 56, 512, 1, 1, stride=(2, 2), op="dgrad"),
    "halved": ConvProblem(64, 128, 32, 32, 256, 4, 4, stride=(2, 2), padding=(1, 1, 1, 1), op="dgrad"),
    "patches": ConvProblem(64, 3, 224, 224, 768, 16, 16, stride=(16, 16), op="dgrad"),
}
LAYERS = tuple(USUAL)
USUAL |= {f"{name}-{layout.lower()}": replace(USUAL[name], layout=layout) for layout in ALL[1:] for name in LAYERS}
#: The axes of an array in each layout, as they lie in NCHW.
AXES = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "CHWN": (3, 0, 1, 2)}


@st.composite
def gradients(draw: st.DrawFn) -> ConvProblem:
    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    groups = size(1, 3)
    stride, dilation, r, s = (size(1, 6), size(1, 6)), (size(1, 6), size(1, 6)), size(1, 5), size(1, 5)
    top, bottom, left, right = (size(0, 5) for _ in range(4))
    h = max(1, dilation[0] * (r - 1) + 1 - top - bottom) + size(0, 9)
    w = max(1, dilation[1] * (s - 1) + 1 - left - right) + size(0, 9)
    return ConvProblem(
        size(1, 2), groups * size(1, 3), h, w, groups * size(1, 3), r, s, stride=stride,
        padding=(top, bottom, left, right), dilation=dilation, groups=groups,
        layout=draw(st.sampled_from(ALL)), dtype="float64", op="dgrad",
    )  # fmt: skip


def arrays(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(problem.x_shape), rng.standard_normal(problem.w_shape)


def test_shapes_bytes_and_text_are_those_of_the_operation():
    layer = ConvProblem(2, 3, 9, 8, 5, 3, 2, stride=(2, 1))
    gradient = replace(layer, op="dgrad")
    assert (gradient.x_shape, gradient.y_shape) == (layer.y_shape, layer.x_shape) == ((2, 5, 4, 7), (2, 3, 9, 8))
    assert gradient.w_shape == layer.w_shape
    assert (gradient.flops, gradient.bytes) == (layer.flops, layer.bytes)
    assert str(gradient).startswith("dgrad NCHW") and str(layer) == str(gradient).replace("dgrad", "fprop")
    assert replace(gradient, layout="NHWC").y_shape == (2, 9, 8, 3)
    assert replace(gradient, layout="CHWN").y_shape == (3, 9, 8, 2)


@pytest.mark.parametrize("change", [{"op": "fprop"}, {"stride": (1, 2)}], ids=str)
def test_only_a_gradient_of_unit_stride_is_one_forward_convolution(change):
    with pytest.raises(ValueError, match="is no forward convolution"):
        replace(GRADIENT_CASES[0].problem, **change).as_forward()


@settings(max_examples=60, deadline=None)
@given(gradients())
def test_the_gradient_is_the_forward_layers_adjoint(problem):
    """<grad, conv(x)> is <gradient(grad), x>, whatever x is: that alone defines it."""
    grad, w = arrays(problem)
    layer = replace(problem, op="fprop")
    result = oracle.conv2d(problem, grad, w)
    assert result.shape == layer.x_shape
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal(layer.x_shape)
        there, back = float((grad * oracle.conv2d(layer, x, w)).sum()), float((result * x).sum())
        assert there == pytest.approx(back, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", [c for c in GRADIENT_CASES if c.problem.n], ids=lambda c: c.name)
def test_the_oracle_agrees_with_pytorch(case):
    torch = pytest.importorskip("torch")
    problem = case.problem
    grad, w = arrays(problem)

    def nchw(array):
        return torch.from_numpy(array.transpose(AXES[problem.layout]))

    # PyTorch pads evenly: the layer sees a padded image, whose frame's gradient is dropped.
    top, bottom, left, right = problem.padding
    shape = (problem.n, problem.c, problem.h + top + bottom, problem.w + left + right)
    padded = torch.nn.grad.conv2d_input(
        shape, *(nchw(a) for a in (w, grad)), problem.stride, 0, problem.dilation, problem.groups
    )
    expected = padded[:, :, top : top + problem.h, left : left + problem.w].numpy()
    assert oracle.relative_error(oracle.conv2d(problem, grad, w).transpose(AXES[problem.layout]), expected) < 1e-12


@settings(max_examples=150, deadline=None)
@given(gradients())
def test_the_cpu_engine_agrees_with_the_oracle(problem):
    grad, w = arrays(problem)
    assert oracle.relative_error(IM2COL.run(problem, grad, w, None), oracle.conv2d(problem, grad, w)) < 1e-12


@pytest.mark.parametrize("case", [c for c in GRADIENT_CASES if not c.problem.accumulate], ids=lambda c: c.name)
def test_the_cpu_engine_keeps_the_bound_of_the_precision(case):
    inputs = cases.draw_conv(case.problem, "positive")
    result = choose(case.problem, None, "im2col").algorithm.run(case.problem, inputs["dy"], inputs["w"], None)
    assert result.dtype == np.float32
    reference = oracle.conv2d(case.problem, inputs["dy"], inputs["w"])
    assert oracle.relative_error(result, reference) <= oracle.error_bound(case.problem, inputs["dy"], inputs["w"])


@settings(max_examples=100, deadline=None)
@given(gradients())
def test_phases_take_every_product_once_and_every_pixel_once(problem):
    groups = input_gradient.phase_groups(problem)
    assert len(groups) <= 4
    met = np.zeros((problem.h, problem.w), int)
    products = 0
    for group in groups:
        for i, j in np.ndindex(*group.view.phases):
            _, (first_p, first_q) = group.view.phase(i, j)
            phase = met[first_p :: problem.stride[0], first_q :: problem.stride[1]]
            assert phase.shape[0] <= group.problem.p and phase.shape[1] <= group.problem.q
            phase += 1
            products += group.problem.r * group.problem.s
    assert met.max(initial=0) <= 1
    assert products <= problem.r * problem.s
    if min(problem.h, problem.w) >= 6:  # every phase has a pixel
        assert products == problem.r * problem.s
    # A pixel that no tap lays on a multiple of the stride is in no phase.
    rows, columns = (
        [any((i + pad - tap * dilation) % stride == 0 for tap in range(taps)) for i in range(extent)]
        for extent, taps, stride, dilation, pad in (
            (problem.h, problem.r, problem.stride[0], problem.dilation[0], problem.padding[0]),
            (problem.w, problem.s, problem.stride[1], problem.dilation[1], problem.padding[2]),
        )
    )
    np.testing.assert_array_equal(met, np.outer(rows, columns))
    assert input_gradient.zero_launches(problem) or met.all()


def test_few_launches_serve_many_phases():
    def launches(name: str) -> tuple[int, int]:
        problem = USUAL[name]
        plan = GEMM.plan(problem, next(iter(GEMM.configs(problem, TARGETS[0]))), TARGETS[0])
        assert plan.prepared_bytes == GEMM.prepared_bytes(problem) == 4 * np.prod(problem.w_shape)
        assert plan.workspace_bytes == 0
        return len(plan.prepare), len(plan.launches)

    assert {name: launches(name) for name in LAYERS} == {
        "deep": (1, 1),
        "strided": (1, 4),
        "strided-pointwise": (1, 2),  # three phases of four are zeros
        "halved": (1, 1),
        "patches": (1, 1),
    }


@pytest.mark.parametrize("problem", [*USUAL.values(), *(case.problem for case in GRADIENT_CASES)], ids=str)
def test_equal_phases_are_counted(problem: ConvProblem) -> None:
    single = input_gradient.single_phases(problem)
    distinct = input_gradient.distinct_phases(problem)
    assert Counter(phase.problem for phase in single) == {phase.problem: phase.times for phase in distinct}
    assert [replace(phase, times=1) for phase in distinct] == [
        next(phase for phase in single if phase.problem == each.problem) for each in distinct
    ]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_choice_asks_for_equal_phases_once(layout: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch embedding's gradient has 256 phases, which are all alike: only plans need each of them."""
    problem = replace(USUAL["patches"], layout=layout, dtype=dtype, n=65)
    assert [phase.times for phase in input_gradient.distinct_phases(problem)] == [256]
    monkeypatch.setattr(input_gradient, "_all_phases", lambda _: pytest.fail("all phases were made"))
    by_model(problem, TARGETS[0])
    assert not NAMED["tensor_gemm"].reasons(replace(problem, dtype="float32"), TARGETS[0])


def test_prepared_filters_are_no_workspace_and_count_where_a_limit_is_given():
    problem = GRADIENT_CASES[0].problem
    needed = GEMM.prepared_bytes(problem)
    assert choose(problem, TARGETS[0], "implicit_gemm").algorithm is GEMM
    assert choose(problem, TARGETS[0], "implicit_gemm", needed).algorithm is GEMM
    with pytest.raises(NoAlgorithmError, match=f"{needed} of packed weights"):
        choose(problem, TARGETS[0], "implicit_gemm", needed - 1)
    assert GEMM.prepared_bytes(replace(problem, op="fprop")) == 0


@pytest.mark.parametrize(
    "algorithm", [a for a in (*VARIANTS, *CPU_ALGORITHMS) if a.solves == "conv2d"], ids=lambda a: a.stem
)
def test_what_computes_no_gradients_says_so(algorithm):
    """Each operation is computed, or refused by its name, by all that take the layer in some operation."""
    problems = {op: replace(GRADIENT_CASES[0].problem, op=op, groups=8, c=8) for op in ("fprop", "dgrad", "wgrad")}
    reasons = {op: algorithm.reasons(problem, TARGETS[0]) for op, problem in problems.items()}
    for op, found in reasons.items():
        assert not found or any(repr(op) in reason for reason in found) or all(reasons.values())


def beginning_inside() -> list[ConvProblem]:
    """Padding is negative where a gradient is written as a forward convolution."""
    layer = ConvProblem(2, 6, 9, 12, 4, 3, 3, padding=(4, 3, 3, 5), op="dgrad")
    return [replace(layer, layout=layout).as_forward() for layout in ALL]


def each_inside():
    """Every algorithm in every layout; ``make test`` plays each algorithm once, and each family in every layout."""
    found = [
        (a, problem)
        for problem in beginning_inside()
        for a in VARIANTS
        if a.solves == "conv2d" and not a.reasons(problem, TARGETS[0])
    ]
    chosen = selection.cover(found, lambda each: (each[0].stem, (each[0].family, each[1].layout)))
    return selection.marked(found, chosen, lambda each: (each, f"{each[1].layout}-{each[0].stem}"))


@pytest.mark.parametrize(("algorithm", "problem"), each_inside())
def test_windows_that_begin_inside_the_image_right_on_emulator(algorithm, problem):
    assert problem.padding == (-2, -1, -1, -3)
    proof.check(algorithm, problem, kinds=cases.KINDS[:1])


def run(launch: Launch, values: dict[str, np.ndarray | None]) -> None:
    emulator.run_plan(Plan((launch,)), values)


def segmented(*names: str) -> list[cases.Case]:
    """Of the layouts that people use most one, by turns: each launch is built."""
    named = [case for case in CONV_CASES + GRADIENT_CASES if case.name.rsplit("-", 1)[0] in names]
    return [case for case in named if case.in_turn or case.problem.layout == "CHWN"]


SEGMENTED = [
    *segmented("plain", "odd", "one-row", "stride-uneven", "dilation-uneven", "groups-vector", "everything"),
    *segmented("gradient-plain", "gradient-odd", "gradient-padding-over-filter", "gradient-dilation"),
    *segmented("gradient-groups", "gradient-long-reduction"),
]


@pytest.mark.parametrize(
    "case",
    selection.marked(
        SEGMENTED,
        selection.cover(
            SEGMENTED,
            lambda case: (selection.layer_name(case).removeprefix("gradient-"), (case.problem.layout, case.problem.op)),
        ),
        lambda case: ((case,), case.name),
    ),
)
def test_segments_of_rows_are_right_and_touch_nothing_else(case):
    problem, first_weight = case.problem, 4 if case.problem.op == "dgrad" else 0
    written = problem.operands[-1].role
    values = cases.draw_conv(problem, "zero-mean")
    reference, bound = proof.expected(problem, np.zeros(problem.y_shape), values)
    if problem.op == "dgrad":
        values["prepared"] = np.full(first_weight + values["w"].size, np.nan, np.float32)
        run(input_gradient.filter_launch(problem, first_weight), values)
        assert np.isnan(values["prepared"][:first_weight]).all()
    values[written] = np.full(problem.y_shape, np.nan, np.float32)
    columns = values[written].transpose(AXES[problem.layout]).transpose(0, 2, 3, 1)
    width, half = columns.shape[2], columns.shape[2] // 8 * 4
    missing = np.ones(width, bool)
    for first, last in ((half, width - 1), (0, half), (width - 1, width)):
        if first < last:
            run(segment_launch(problem, first, last - first, TARGETS[0], first_weight), values)
            missing[first:last] = False
            assert np.isnan(columns[:, :, missing]).all()
    assert oracle.relative_error(values[written], reference) <= bound


def rearranged(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """The filters of every phase, one after the other, each as the forward convolution of that phase has them."""
    taps = problem.r, problem.s
    grouped = w.transpose(AXES[problem.layout]).reshape(problem.groups, problem.group_k, problem.group_c, *taps)
    # w[c, k, r, s] as NCHW has it, where k counts in the group of c
    exchanged = grouped.transpose(0, 2, 1, 3, 4).reshape(problem.c, problem.group_k, *taps)
    down, right = (stride // gcd(stride, apart) for stride, apart in zip(problem.stride, problem.dilation, strict=True))
    # those with one tap more first
    kinds = [(range(n % step), range(n % step, step)) for n, step in zip(taps, (down, right), strict=True)]
    found = []
    for rows, columns in product(*kinds):
        for i, j in product(rows, columns):
            phase = exchanged[:, :, i::down, j::right][:, :, ::-1, ::-1]
            found.append(phase.transpose(np.argsort(AXES[problem.layout])).ravel())
    return np.concatenate(found)


@pytest.mark.parametrize("problem", selection.each_layer(GRADIENT_CASES))
def test_prepared_filters_are_those_of_the_forward_convolutions(problem):
    values = cases.draw_conv(problem, "zero-mean")
    values["prepared"] = np.full(values["w"].size, np.nan, np.float32)
    run(input_gradient.filter_launch(problem), values)
    np.testing.assert_array_equal(values["prepared"], rearranged(problem, values["w"]))


def layers_to_compile():
    """Every layer in every layout for every GPU; in ``make test`` every layer, every layout and every GPU once."""
    found = [(problem, target, f"{name}-{target.arch}") for name, problem in USUAL.items() for target in TARGETS]

    def differs(each):
        problem, target, _name = each
        return replace(problem, layout="NCHW"), problem.layout, target.arch

    return selection.marked(found, selection.cover(found, differs), lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "target"), layers_to_compile())
def test_gradients_compile_without_spills(nvrtc, problem, target):
    plan = GEMM.plan(problem, next(iter(GEMM.configs(problem, target))), target)
    for launch in plan.every_launch:
        figure = compile_launch(launch, target.arch)
        assert (figure.spill_bytes, figure.stack_bytes) == (0, 0), f"{launch} on {target.arch} spills"
