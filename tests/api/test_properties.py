"""Laws that hold for every problem: drawn by hypothesis, the arithmetic many times, kernels on the emulator a few.

A drawn kernel costs a compilation of a fifth of a second or more, so each is drawn once. That is no layer of one
channel and one tap, which hypothesis draws first and `tests.cases` has.
Draws are the same in every run: a red run must not be a matter of luck.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from leanconv.call.gpu_call import roles_of
from leanconv.dtypes import FILTERS
from leanconv.images.borders import BORDERS
from leanconv.kernels.common.layers import leaves_image
from leanconv.plan import role_of
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE, source
from tests import cases, proof
from tests.cases import GRADIENT_CASES, TARGETS, filter_problem
from tests.variants import VARIANTS

ARITHMETIC = settings(max_examples=25, derandomize=True, deadline=None, database=None)
KERNEL = settings(
    max_examples=1,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# that of volumes alone is drawn by tests of volumes
CONV_ALGORITHMS = [a for a in VARIANTS if a.solves == "conv2d" and a.stem != "implicit_gemm_patches"]
FILTER_ALGORITHMS = [a for a in VARIANTS if a.solves == "filter2d"]


def with_windows(problem):
    """Unit stride and six taps at least."""
    return replace(problem, stride=(1, 1), r=max(3, problem.r), s=max(2, problem.s))


def suited(algorithm, problem):
    """The problem as the algorithm takes it: depthwise, of integers, or the gradient that is all that it computes."""
    name = algorithm.stem
    if name == "implicit_gemm_dp4a":
        c, k = 4 * problem.c, problem.k
        return replace(problem, c=c, k=k, layout="NHWC", dtype="int8", op="fprop")
    if name == "tensor_winograd":
        # channels and filters, whichever a direction reads, in pieces of 32 where there are groups
        # and no more than four of them in all: sixteen times as many products for each are seconds of the emulator
        rows = 16 if problem.groups == 1 else 32
        dilation, w = (problem.dilation[0], 1), problem.w + 2
        channels, filters = (problem.groups * (1 + each // problem.groups % 4) for each in (problem.c, problem.k))
        shape = {"c": rows * channels, "k": rows * filters, "s": 3, "w": w}
        return replace(problem, layout="NHWC", stride=(1, 1), dilation=dilation, **shape)
    if name in ("native_gemm_16bit", "native_gemm_window"):
        rows = 8 if problem.groups == 1 else 16
        dtype = "float16" if problem.n % 2 else "bfloat16"
        problem = replace(problem, c=rows * problem.c, layout="NHWC", dtype=dtype)
        return with_windows(problem) if name == "native_gemm_window" else problem
    if name in ("native_weight_nhwc", "native_weight_nhwc_split_k"):
        c, k = (8 * problem.groups * (1 + each // problem.groups % 4) for each in (problem.c, problem.k))
        problem = replace(problem, c=c, k=k, layout="NHWC", dtype="float16" if problem.n % 2 else "bfloat16")
    if name.startswith("native_weight_kmajor"):
        # rows of x and of dy of whole 16 bytes
        reach, w = (problem.s - 1) * problem.dilation[1], 8 * (1 + problem.w % 3)
        stride, padding = (problem.stride[0], 1), (*problem.padding[:2], problem.n % 2, reach - problem.n % 2)
        problem = replace(problem, w=w, stride=stride, padding=padding)
    if name in ("native_gemm_pointwise", "native_gemm_planes"):
        # one tap; rows of filters of whole 16 bytes
        c, k = (8 * problem.groups * (1 + each // problem.groups % 4) for each in (problem.c, problem.k))
        problem = replace(problem, c=c, k=k, r=1, s=1, stride=(1, 1), padding=(0, 0, 0, 0))
        if name == "native_gemm_planes":
            problem = replace(problem, h=4 + problem.h % 5, w=4 + problem.w % 5)
    if name.startswith(("native_gemm_nchw", "native_gemm_p", "native_weight_nchw", "native_weight_kmajor")):
        problem = replace(problem, layout="NCHW", dtype="float16" if problem.n % 2 else "bfloat16")
    if name in ("native_gemm_rows", "native_weight_rows", "native_weight_rows_split_k", "tensor_gemm_sync_col2im"):
        # a group of few channels, neighbouring columns; rows of taps that fit
        r, s, dilation = min(problem.r, 7), min(problem.s, 7), (1, 1)
        problem = replace(problem, c=1 + problem.c % 4, groups=1, r=r, s=s, dilation=dilation)
        if name == "tensor_gemm_sync_col2im":
            layout = "NCHW" if problem.layout == "CHWN" else problem.layout
            problem = replace(problem, layout=layout, op="dgrad", bias=False, activation=None)
        else:
            planes = name == "native_gemm_rows" and problem.layout == "NCHW"
            layout = "NCHW" if planes else "NHWC"
            problem = replace(problem, layout=layout, dtype="float16" if problem.n % 2 else "bfloat16")
    if name in ("native_gemm_groups", "native_weight_groups", "native_weight_groups_split_k"):
        groups, layout = 2 + 2 * (problem.n % 2), "NCHW" if problem.layout == "CHWN" else problem.layout
        c, k = (4 * groups * (1 + each % 2) for each in (problem.c, problem.k))
        # images to share among partial sums
        n = problem.n + 6 * name.endswith("split_k")
        way = {"dtype": "float16"} if problem.w % 2 else {"dtype": "float32", "precision": "tf32"}
        problem = replace(problem, n=n, c=c, k=k, groups=groups, layout=layout, **way)
    if name == "native_gemm_skinny":
        # one tap; pairs of channels and of filters, images of whole 16 bytes
        c, k = (16 + 2 * (each % 9) for each in (problem.c, problem.k))
        shape = {"c": c, "k": k, "h": 2 * (1 + problem.h % 4), "w": 4 * (1 + problem.w % 3), "r": 1, "s": 1}
        problem = replace(problem, groups=1, stride=(1, 1), padding=(0, 0, 0, 0), **shape)
    if name in ("native_gemm_skinny", "native_gemm_sync", "native_weight_sync", "native_weight_sync_split_k"):
        problem = replace(problem, layout="NHWC", dtype="float16" if problem.n % 2 else "bfloat16")
    if name in ("native_gemm_tf32", "native_gemm_window_tf32"):
        rows = 4 if problem.groups == 1 else 8
        problem = replace(problem, c=rows * problem.c, layout="NHWC", precision="tf32")
        return with_windows(problem) if name == "native_gemm_window_tf32" else problem
    if name == "tensor_weight_images":
        channels, filters = (problem.groups * (16 + 4 * (each % 3)) for each in (problem.c, problem.k))
        r, s = min(problem.r, 3), min(problem.s + 1, 5)
        reach = (r - 1) * problem.dilation[0], (s - 1) * problem.dilation[1]
        sizes = {"n": 15 + problem.n, "h": min(problem.h, 4), "w": min(problem.w, 6), "r": r, "s": s}
        padding = (reach[0], problem.n % 2, reach[1], 1)
        problem = replace(problem, c=channels, k=filters, layout="NHWC", padding=padding, **sizes)
    if name.startswith("depthwise") or name == "single_channel":
        filters = 1 if name == "depthwise_window" else 1 + problem.k % 3
        layout = "NCHW" if problem.layout == "CHWN" else problem.layout
        problem = replace(problem, groups=problem.c, k=filters * problem.c, layout=layout)
    if name == "depthwise_row":
        w, s, dilation = 4 * problem.w, min(problem.s, 5), (1, min(problem.dilation[1], 2))
        problem = replace(problem, layout="NCHW", r=1, s=s, w=w, stride=(1, 1), dilation=dilation)
        return replace(problem, padding=(0, 0, dilation[1] * (s - 1), 0))
    if name.startswith("depthwise_weight_large"):
        r, s, units = problem.r + 8, problem.s + 10, {"stride": (1, 1), "dilation": (1, 1)}
        problem = replace(problem, r=r, s=s, padding=(r // 2, r // 2, s // 2 + 1, s // 2), **units)
    gradient = {"depthwise_input": "dgrad"}.get(name, "wgrad" if "_weight" in name else None)
    return replace(problem, op=gradient, bias=False, activation=None) if gradient else problem


def each(algorithms):
    return pytest.mark.parametrize("algorithm", algorithms, ids=lambda a: a.stem)


@st.composite
def conv_problems(draw, largest=300, most_channels=70, most_taps=12):
    """Any layer with a non-empty output; as often as not one that a Winograd algorithm takes."""
    groups = draw(st.integers(1, 4))
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    r, s = draw(st.integers(1, most_taps)), draw(st.integers(1, most_taps))
    stride, dilation = draw(pair), draw(pair)
    kind = draw(st.sampled_from(["any", "any", "winograd1d", "winograd2d"]))
    if kind == "winograd1d":
        stride, dilation, s = (1, 1), (dilation[0], 1), draw(st.integers(2, 3))
    if kind == "winograd2d":
        stride, dilation, r, s = (1, 1), (1, 1), 3, 3
    problem = ConvProblem(
        n=draw(st.integers(1, 5)),
        c=groups * draw(st.integers(1, most_channels // groups)),
        h=draw(st.integers(1, largest)),
        w=draw(st.integers(1, largest)),
        k=groups * draw(st.integers(1, most_channels // groups)),
        r=r,
        s=s,
        stride=stride,
        padding=tuple(draw(st.integers(0, 5)) for _ in range(4)),
        dilation=dilation,
        groups=groups,
        layout=draw(st.sampled_from(cases.ALL)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "relu"])),
    )
    assume(problem.p > 0 and problem.q > 0)
    return problem


def gradients(**limits):
    """The gradient of the input of any layer."""
    return conv_problems(**limits).map(lambda problem: replace(problem, op="dgrad", bias=False, activation=None))


def weight_gradients(**limits):
    """The gradient of the filters of any layer; every other one is depthwise."""

    def gradient(problem, depthwise):
        change = {"groups": problem.c, "k": problem.c * (1 + problem.k % 3)} if depthwise else {}
        return replace(problem, op="wgrad", bias=False, activation=None, **change)

    return st.builds(gradient, conv_problems(**limits), st.booleans())


@st.composite
def filter_problems(draw, largest=3000, shapes=None):
    """Any image and filter within the limits."""
    types = sorted(FILTERS)
    kh, kw = draw(shapes) if shapes is not None else (draw(st.integers(1, 32)), draw(st.integers(1, 32)))
    # NOTE: anchors are compiled in; with given shapes only the corners and the middle are drawn
    rows = st.integers(0, kh - 1) if shapes is None else st.sampled_from(sorted({0, kh // 2, kh - 1}))
    columns = st.integers(0, kw - 1) if shapes is None else st.sampled_from(sorted({0, kw // 2, kw - 1}))
    return filter_problem(
        *(draw(st.integers(1, 3)), draw(st.integers(1, largest)), draw(st.integers(1, largest)), kh, kw),
        anchor=(draw(rows), draw(columns)),
        gap=draw(st.integers(0, 5)),
        y_gap=draw(st.integers(0, 5)),
        rows_between=draw(st.integers(0, 1)),
        border=draw(st.sampled_from(tuple(BORDERS))),
        dtype=draw(st.sampled_from(types)),
        out_dtype=draw(st.sampled_from([None, *types])),
        filters=draw(st.integers(1, 3)),
        channels=draw(st.integers(1, 5)),
        per_image=draw(st.booleans()),
    )


def count_windows(size, before, after, taps, stride, dilation):
    """Where a window fits, by trying every place."""
    end = before + size + after
    return sum(1 for start in range(0, max(end, 0), stride) if start + dilation * (taps - 1) < end)


@ARITHMETIC
@given(conv_problems(largest=60))
def test_output_shape_is_the_number_of_windows(problem):
    top, bottom, left, right = problem.padding
    assert problem.p == count_windows(problem.h, top, bottom, problem.r, problem.stride[0], problem.dilation[0])
    assert problem.q == count_windows(problem.w, left, right, problem.s, problem.stride[1], problem.dilation[1])
    assert problem.y_shape == tuple(
        {"N": problem.n, "C": problem.k, "H": problem.p, "W": problem.q}[letter] for letter in problem.layout
    )


@ARITHMETIC
@given(conv_problems(largest=40, most_channels=8, most_taps=6))
def test_output_shape_is_pytorchs(problem):
    torch = pytest.importorskip("torch")
    top, bottom, left, right = problem.padding
    x = torch.empty(problem.n, problem.c, problem.h + top + bottom, problem.w + left + right, device="meta")
    w = torch.empty(problem.k, problem.group_c, problem.r, problem.s, device="meta")
    y = torch.nn.functional.conv2d(x, w, None, problem.stride, 0, problem.dilation, problem.groups)
    assert tuple(y.shape) == replace(problem, layout="NCHW").y_shape


def test_an_image_is_left_where_a_window_reads_padding():
    for size, taps, stride, before, after in product((1, 2, 5, 6), (1, 2, 3), (1, 2), (0, 1), (0, 1, 2)):
        if before + size + after < taps:
            continue
        row = ConvProblem(1, 1, 1, size, 1, 1, taps, stride=(1, stride), padding=(0, 0, before, after))
        column = replace(row, h=size, w=1, r=taps, s=1, stride=(stride, 1), padding=(before, after, 0, 0))
        read = {q * stride - before + s for q in range(row.q) for s in range(taps)}
        assert leaves_image(row) == leaves_image(column) == (not read <= set(range(size))), row


def check_plan(algorithm, problem, target):
    """What holds for every plan of every configuration."""
    assert algorithm.reasons(problem, TARGETS[0]) == algorithm.reasons(problem, TARGETS[0])
    if algorithm.reasons(problem, target):
        return
    configs = list(islice(algorithm.configs(problem, target), 200))
    assert configs and len(set(configs)) == len(configs)
    needed = [algorithm.workspace_bytes(problem, config) for config in configs]
    for limit in (0, min(needed), max(needed) // 2):
        fitting = [config for _, config in algorithm.within(problem, target, limit)]
        assert all(algorithm.workspace_bytes(problem, config) <= limit for config in fitting)
        assert {config for config, each in zip(configs, needed, strict=True) if not each} <= set(fitting)
    for config in configs[:3] + configs[-1:]:
        plan = algorithm.plan(problem, config, target)
        assert plan == algorithm.plan(problem, config, target) and hash(plan) == hash(plan)
        assert plan.launches and plan.workspace_bytes == algorithm.workspace_bytes(problem, config) >= 0
        assert plan.prepared_bytes == algorithm.prepared_bytes(problem) >= 0
        assert bool(plan.prepare) == bool(plan.prepared_bytes)
        for launch in plan.all_launches:
            assert 0 < launch.grid < 2**31
            assert launch.block % 32 == 0 and 32 <= launch.block <= 1024
            assert 1 <= launch.cluster <= target.most_in_cluster and launch.grid % launch.cluster == 0
            assert launch.min_blocks >= 1 and launch.min_blocks * launch.block <= 2048
            assert 0 <= launch.shared_bytes <= target.shared_per_block
            assert (INCLUDE / launch.header).is_file() and launch.symbol.isidentifier()
            bound = {role for a in launch.arguments if (role := role_of(a)) is not None}
            assert {"y", "dx", "dw", "workspace", "prepared"} & bound and bound <= set(plan.roles) <= set(
                roles_of(problem)
            )
            assert ("workspace" not in bound) or plan.workspace_bytes > 0
            assert ("prepared" not in bound) or plan.prepared_bytes > 0
            assert (launch not in plan.prepare) or {"prepared"} <= bound <= {"w", "prepared"}
            for constants in (launch.problem, launch.tuning):
                names = [name for name, _ in constants]
                assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)
        # What reads filters computes, and with this configuration; other launches move data, in their own way.
        computing = [launch for launch in plan.launches if {"w", "prepared"} & {role_of(a) for a in launch.arguments}]
        # rows of tensor_filter are an argument
        made = {each for each in config.constants() if (algorithm.stem, each[0]) != ("tensor_filter", "rows")}
        assert any(made <= set(launch.tuning) for launch in computing) or not computing


@each(CONV_ALGORITHMS)
@ARITHMETIC
@given(problem=conv_problems(), target=st.sampled_from(TARGETS))
def test_conv_plans_are_sound(algorithm, problem, target):
    check_plan(algorithm, problem, target)


@each(CONV_ALGORITHMS)
@ARITHMETIC
@given(problem=gradients(), target=st.sampled_from(TARGETS))
def test_gradient_plans_are_sound(algorithm, problem, target):
    check_plan(algorithm, problem, target)


@each(CONV_ALGORITHMS)
@ARITHMETIC
@given(problem=weight_gradients(), target=st.sampled_from(TARGETS))
def test_plans_of_gradients_of_filters_are_sound(algorithm, problem, target):
    check_plan(algorithm, problem, target)


def suited_filter(algorithm, problem):
    """The problem with a filter of the kind that the algorithm takes: whole, products, or without weights."""
    if algorithm.name == "register_cache":
        return problem
    types = {"float64": "float32", "int32": "int16"}
    dtype, result = (types.get(each, each) for each in (problem.dtype, problem.result))
    flat = replace(problem, dtype=dtype, out_dtype=result, sum_dtype=None, d=1, kd=1, anchor_z=0)
    if algorithm.name == "tensor_filter":
        return replace(flat, channels=min(problem.channels, 4))
    single = replace(flat, filters=1, per_image=False)
    if algorithm.stem in ("separable_tensor", "fourier_lines", "fourier_tiles"):
        return replace(single, rank=int(algorithm.stem != "fourier_tiles"))
    if algorithm.stem == "box_passes":
        rows, columns = 33 + problem.h % 8, 33 + problem.w % 8
        large = replace(single, dtype="float32", out_dtype=None, channels=1, valid=False, reduction="sum")
        return replace(large, kh=rows, kw=columns, anchor=(rows // 2, columns // 3))
    plain = replace(problem, filters=1, per_image=False)
    if algorithm.name == "separable":
        return replace(plain, rank=1 + problem.h % 3)
    if algorithm.name == "box":
        return replace(plain, reduction="sum" if problem.sums == "int32" else ("sum", "min", "max")[problem.h % 3])
    size = (3, 5, 7)[problem.h % 3]
    return replace(plain, kh=size, kw=size, anchor=(size // 2, size // 2), reduction="median")


# NOTE: spectra of transforms take more or fewer bytes by configuration
@each([algorithm for algorithm in FILTER_ALGORITHMS if algorithm.name != "fourier"])
@ARITHMETIC
@given(problem=filter_problems(), target=st.sampled_from(TARGETS))
def test_filter_plans_are_sound(algorithm, problem, target):
    check_plan(algorithm, suited_filter(algorithm, problem), target)


@each(CONV_ALGORITHMS)
@ARITHMETIC
@given(problem=conv_problems(largest=40))
def test_batch_is_not_compiled_in(algorithm, problem):
    """One compiled kernel serves every batch, and it gets the batch that it is called with.

    In CHWN there are two: one where all vectors of four adjacent images are whole, one for every other batch.
    """
    problem = suited(algorithm, problem)
    assume(not algorithm.reasons(problem, TARGETS[0]))
    config = next(iter(algorithm.configs(problem, TARGETS[0])), None)
    assume(config is not None)
    batch = problem.n + 3
    if problem.layout == "CHWN" and (problem.n % 4 == 0) != (batch % 4 == 0):
        batch = problem.n + 4
    one, more = (algorithm.plan(replace(problem, n=n), config, TARGETS[0]) for n in (problem.n, batch))
    assert [source(launch) for launch in one.launches] == [source(launch) for launch in more.launches]
    assert one != more


@each(CONV_ALGORITHMS)
@KERNEL
@given(problem=conv_problems(largest=14, most_channels=24, most_taps=4).filter(lambda problem: problem.terms > 1))
def test_drawn_convolutions_are_right(algorithm, problem):
    problem = suited(algorithm, problem)
    assume(not algorithm.reasons(problem, TARGETS[0]) and any(True for _ in algorithm.configs(problem, TARGETS[0])))
    proof.check(algorithm, problem, kinds=cases.KINDS[:1])


@each([a for a in CONV_ALGORITHMS if not a.reasons(GRADIENT_CASES[0].problem, TARGETS[0])])
@KERNEL
@given(problem=gradients(largest=14, most_channels=24, most_taps=4).filter(lambda problem: problem.terms > 1))
def test_drawn_gradients_are_right(algorithm, problem):
    problem = suited(algorithm, problem)
    assume(not algorithm.reasons(problem, TARGETS[0]))
    proof.check(algorithm, problem, kinds=cases.KINDS[:1])


SHAPES = st.sampled_from([(1, 1), (3, 3), (4, 6), (11, 2)])


@each(FILTER_ALGORITHMS)
@KERNEL
@given(problem=filter_problems(largest=300, shapes=SHAPES))
def test_drawn_filters_are_right(algorithm, problem):
    problem = suited_filter(algorithm, problem)
    assume(not algorithm.reasons(problem, TARGETS[0]))
    proof.check(algorithm, problem, kinds=cases.KINDS[:1])
