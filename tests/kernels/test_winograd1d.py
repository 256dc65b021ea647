"""Im2col-Winograd, beyond what every algorithm is asked: each kernel and configuration, cuts, filters, precisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from leanconv.cpu import oracle
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.cost import mean_products
from leanconv.kernels.simt.winograd1d import (
    LEAST_CHANNELS,
    MOST_TAPS,
    WinogradConfig,
    kernel_of,
    kernels_of,
    ranges_of,
    taps_of,
)
from leanconv.kernels.simt.winograd_tiles import forward_of, padded_sizes
from leanconv.kernels.winograd_matrices import LEAST_PRODUCTS, WIDTHS, matrices
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem
from tests import cases, emulator, proof, selection
from tests.cases import TARGETS
from tests.cases_volumes import VOLUME_CASES
from tests.variants import NAMED

WINOGRAD = NAMED["winograd1d"]
#: States and filter width of the eleven kernels.
ELEVEN = [(alpha, width) for alpha, widths in WIDTHS.items() for width in widths]
#: Widths of filters whose rows are cut into column blocks, and of the blocks: the last filled up with zeros, or whole.
WIDE = [(7, 4), (8, 4), (8, 3), (9, 5), (9, 3), (11, 4), (13, 5), (15, 5), (31, 4)]
LAYOUTS = ("NHWC", "NCHW", "CHWN")
each_kernel = pytest.mark.parametrize(("alpha", "width"), ELEVEN)


def layer(alpha: int, width: int, layout: str = "NHWC", **rest: Any) -> ConvProblem:
    """A small layer for Γalpha whose rows are whole tiles, at least two, and what is one output short of one more.

    Of one image, with images innermost of four: they are copied at once.
    """
    n, r = alpha + 1 - width, rest.pop("r", 3)
    q = 2 * n + max(1, n - 1)
    q += n * ceil_div(max(0, width - q), n)  # rows no narrower than the filter
    problem = ConvProblem(
        *(4 if layout == "CHWN" else 1, 1, 5, q, 37, r, width),
        padding=((r - 1) // 2, r // 2, width // 2, (width - 1) // 2),
        layout=layout,
        precision="relaxed" if alpha == 16 or (alpha, width) == (8, 2) else "fp32",
    )
    enough = next(c for c in count(1) if c % 4 and mean_products(replace(problem, c=c)) >= LEAST_PRODUCTS)
    problem = replace(problem, c=enough)
    return replace(problem, **rest)


def gradient(alpha: int, width: int, layout: str = "NHWC", **rest: Any) -> ConvProblem:
    """The gradient of a layer as above: the channels that it sums over are the layer's filters."""
    forward = layer(alpha, width, layout, **rest)
    return replace(forward, op="dgrad", c=forward.k, k=forward.c)


def configs(problem: ConvProblem, alpha: int) -> list[WinogradConfig]:
    """All configurations of the kernel of ``alpha`` states, on any GPU, the likeliest first."""
    found = [config for target in TARGETS for config in WINOGRAD.configs(problem, target)]
    return [config for config in dict.fromkeys(found) if kernel_of(problem, config) == (alpha, problem.s)]


def wide(width: int, block: int, layout: str = "NHWC", **rest: Any) -> tuple[ConvProblem, WinogradConfig]:
    """A small layer of wide filters, of rows that are no whole tiles, and the likeliest configuration of blocks."""
    r, q = rest.pop("r", 3), max(2 * (9 - block) + 1, 17)
    padding = ((r - 1) // 2, r // 2, width // 2, (width - 1) // 2)
    images = 4 if layout == "CHWN" else 2
    op, rest = rest.pop("op", "fprop"), {"n": images, "c": 0, **rest}
    problem = replace(ConvProblem(1, 1, 4, q, 37, r, width, padding=padding, layout=layout), **rest)
    channels = (c for c in count(1) if c % 4 and mean_products(replace(problem, c=c)) >= LEAST_PRODUCTS)
    problem = replace(problem, c=problem.c or next(channels))
    if op == "dgrad":
        problem = replace(problem, op=op, c=problem.k, k=problem.c)
        problem = replace(problem, k=next(c for c in count(1) if (8, block) in kernels_of(replace(problem, k=c))))
    return problem, next(c for c in WINOGRAD.configs(problem, TARGETS[0]) if c.column_block == block)


def every_config() -> list[Any]:
    """One layer for each number of states; configurations meet the layouts in turns.

    How many blocks run at once is nothing to the emulator. ``make test`` plays as few as have every number of every
    configuration, and every layout.
    """
    found = []
    for alpha, width in ((4, 3), (8, 5), (16, 9)):
        whole = [replace(c, min_blocks=1) for c in configs(layer(alpha, width), alpha) if not c.segments]
        for i, config in enumerate(dict.fromkeys(whole)):
            # a configuration whose tiles share pixels serves two layouts
            layouts = LAYOUTS[:2] if config.run > 1 else LAYOUTS
            found.append((layer(alpha, width, layouts[i % len(layouts)], bias=i % 4 == 0), config, f"{alpha}-{i}"))

    def differs(each: Any) -> Any:
        problem, config, _ = each
        return {(config.states, problem.layout), *((config.states, *constant) for constant in config.constants())}

    return selection.marked(found, selection.cover(found, differs), lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), every_config())
def test_every_configuration_is_right(problem: ConvProblem, config: WinogradConfig) -> None:
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1])


def whole_and_cut() -> list[Any]:
    """Every kernel in every way and layout, with images innermost of three images or four.

    ``make test`` plays every kernel once, every number of states in every direction, and cut, and every way and
    direction in every layout.
    """
    found = []
    for number, (alpha, width) in enumerate(ELEVEN):
        for problem_of, segments, layout in product((layer, gradient), (False, True), LAYOUTS):
            images = {"n": 3 + number // 4 % 2} if layout == "CHWN" else {}
            problem = problem_of(alpha, width, layout, **images)
            name = f"{problem.op}-{'cut' if segments else 'whole'}-{problem.layout}-{alpha}-{width}"
            found.append((problem, segments, alpha, name))

    def differs(each: Any) -> Any:
        problem, segments, alpha, _ = each
        yield from ((alpha, problem.s), (alpha, problem.op), (alpha, segments))
        yield from ((problem.layout, problem.op), (problem.layout, segments))

    return selection.marked(found, selection.cover(found, differs), lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("problem", "segments", "alpha"), whole_and_cut())
def test_every_kernel_is_right_whole_and_cut(problem: ConvProblem, segments: bool, alpha: int) -> None:
    config = next(c for c in configs(problem, alpha) if c.segments == segments)
    plan = WINOGRAD.plan(problem, config, TARGETS[0])
    ranges = ranges_of(problem, alpha, problem.s, segments)
    assert len(plan.launches) == len(ranges) and (len(plan.launches) > 1) == segments
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1])


def column_blocks() -> list[Any]:
    """``make test`` plays every width once, every width of blocks and every layout in both directions."""
    found = []
    for (width, block), op, layout in product(WIDE, ("fprop", "dgrad"), LAYOUTS):
        images = {"n": 3} if layout == "CHWN" and width % 2 else {}
        problem, config = wide(width, block, layout, op=op, bias=op == "fprop", dilation=(1 + width % 2, 1), **images)
        found.append((problem, config, f"{op}-{layout}-{width}-{block}"))

    def differs(each: Any) -> Any:
        problem, config, _ = each
        return (problem.s,), (config.column_block, problem.op), (problem.layout, problem.op)

    return selection.marked(found, selection.cover(found, differs), lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), column_blocks())
def test_column_blocks_of_wide_filters_are_right(problem: ConvProblem, config: WinogradConfig) -> None:
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1])


def kinds_of_blocks() -> list[Any]:
    """Each kind in each layout; in ``make test`` each in one."""
    found = list(product(("high", "groups", "offsets"), LAYOUTS))
    return selection.marked(found, found[::4], lambda each: (each, "-".join(each)))


@pytest.mark.parametrize(("kind", "layout"), kinds_of_blocks())
def test_column_blocks_of_high_filters_and_of_groups_are_right(kind: str, layout: str) -> None:
    """Row blocks and column blocks; groups; 64-bit offsets."""
    how: dict[str, Any] = {}
    if kind == "high":
        problem, config = wide(9, 5, layout, r=MOST_TAPS + 1, h=9)
        assert taps_of(problem)[1] == 2
    elif kind == "groups":
        problem, config = wide(8, 4, layout, groups=2, c=2 * LEAST_CHANNELS, k=66, bias=True, activation="relu")
    else:
        problem, config = wide(31, 4, layout, r=1, h=1, w=40)
        how["change"] = lambda plan: proof.wide_offsets(WINOGRAD, problem, config, TARGETS[0])
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1], **how)


@pytest.mark.parametrize("producers", [0, 4])
def test_every_configuration_of_column_blocks_shares_its_work_as_those_of_whole_rows(producers: int) -> None:
    """Warps that copy, and tiles that share pixels, read the blocks' columns too."""
    problem, _ = wide(15, 5, "NCHW", r=2, c=19)
    found = [c for c in WINOGRAD.configs(problem, TARGETS[0]) if c.column_block == 5 and c.producers == producers]
    for config in (found[0], next(c for c in found if c.run == 2)):
        proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1])


@pytest.mark.parametrize(("width", "block"), WIDE)
def test_filters_in_column_blocks_are_transformed_to_the_last_bits(width: int, block: int) -> None:
    """In the order of rows, then of column blocks; what is beyond the filter is zeros. For images of all sizes."""
    r = (3, MOST_TAPS + 1)[width % 2]
    problem, config = wide(width, block, LAYOUTS[width % 3], r=r, h=20, op=("fprop", "dgrad")[width // 2 % 2])
    w = cases.draw_conv(problem, "zero-mean")["w"]
    assert w is not None
    (c, k), (taps, row_blocks), forward = padded_sizes(forward_of(problem)), taps_of(problem), forward_of(problem)
    number = ceil_div(width, block)
    shape = (1, taps * row_blocks, number, c, 8, k)
    prepared = prepared_by(problem, config, w)
    found = prepared[: np.prod(shape)].reshape(shape).astype(np.float64)
    assert np.isnan(prepared[np.prod(shape) :]).all()
    for j in range(number):
        columns = slice(j * block, min(width, (j + 1) * block))
        expected, sizes = transformed(problem, w, 8, columns, block)
        inside = (slice(1), slice(r), j, slice(forward.group_c), slice(8), slice(forward.group_k))
        assert (abs(found[inside] - expected) <= (block + 2) * 2.0**-24 * sizes).all()
        found[inside] = 0
    assert not found.any()
    larger = replace(problem, n=3 * problem.n, h=problem.h + 4, w=problem.w + 30)
    prepare = WINOGRAD.plan(problem, config, TARGETS[0]).prepare
    assert WINOGRAD.plan(larger, config, TARGETS[0]).prepare == prepare


def volumes() -> list[Any]:
    """Each way of cutting rows in each direction and layout; in ``make test`` each way and each direction once."""
    ways = ("whole-4", "whole-8", "whole-16", "cut-8", "cut-16", "blocks-8", "producers-8", "offsets-8")
    found = list(product(ways, ("fprop", "dgrad"), LAYOUTS[:2]))
    chosen = [(way, ("fprop", "dgrad")[i % 2], LAYOUTS[i // 2 % 2]) for i, way in enumerate(ways)]
    return selection.marked(found, chosen, lambda each: (each, "-".join(each)))


@pytest.mark.parametrize(("way", "op", "layout"), volumes())
def test_volumes_are_right(way: str, op: str, layout: str) -> None:
    """Slices of filters as further row blocks; those of windows that lie outside of the volume; 64-bit offsets."""
    kind, alpha, how = way.split("-")[0], int(way.split("-")[1]), dict[str, Any]()
    slices: dict[str, Any] = {"h": 4, "d": 4, "t": 3, "dilation_d": 2, "padding_d": (3, 2), "dilation": (2, 1)}
    slices |= {"stride_d": 2, "bias": True} if op == "fprop" else {}
    slices["c"] = 21 if alpha == 8 else 9
    if kind == "blocks":
        problem, config = wide(9, 5, layout, op=op, **slices)
    else:
        slices |= {"k": 70} if kind == "producers" else {"r": 1 if alpha == 16 else 3}
        problem = (gradient if op == "dgrad" else layer)(alpha, {4: 3, 8: 3, 16: 9}[alpha], layout, **slices)
        found = [c for c in configs(problem, alpha) if c.segments == (kind == "cut")]
        config = next(c for c in found if bool(c.producers) == (kind == "producers"))
    if kind == "offsets":
        how["change"] = lambda plan: proof.wide_offsets(WINOGRAD, problem, config, TARGETS[0])
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[:1], **how)


def test_long_sums_are_made_of_short_ones() -> None:
    """16 states keep their precision by it; it takes as many registers again as the sums, which 8 states do without."""
    for alpha, width in ELEVEN:
        assert {config.promoted for config in configs(layer(alpha, width), alpha)} == {alpha == 16}
    problem = replace(layer(16, 7), c=128)
    values, errors = cases.draw_conv(problem, "positive"), {}
    for promoted in (True, False):
        config = replace(next(iter(configs(problem, 16))), promoted=promoted)
        y = np.full(problem.y_shape, np.nan, np.float32)
        emulator.run_plan(WINOGRAD.plan(problem, config, TARGETS[0]), {**values, "y": y}, orders=("ascending",))
        errors[promoted] = oracle.relative_error(y, oracle.conv2d(problem, values["x"], values["w"]))
    assert 3 * errors[True] < errors[False]


@st.composite
def drawn(draw: st.DrawFn) -> ConvProblem:
    """Any layer of unit stride, or its gradient, that some kernel serves."""
    groups, r, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 14)), draw(st.integers(1, 3))
    op = draw(st.sampled_from(("fprop", "dgrad")))
    problem = ConvProblem(
        *(draw(st.sampled_from((1, 2, 4))), groups * draw(st.integers(1, 19)), draw(st.integers(1, 9))),
        *(draw(st.integers(9, 40)), groups * draw(st.integers(1, 70)), r, draw(st.integers(2, 14))),
        padding=tuple(draw(st.integers(0, 9)) for _ in range(4)),
        dilation=(dilation, 1),
        groups=groups,
        layout=draw(st.sampled_from(LAYOUTS)),
        precision="relaxed",
        bias=op == "fprop" and draw(st.booleans()),
        op=op,
    )
    if problem.layout != "CHWN" and draw(st.booleans()):
        d, t, back, front = (draw(st.integers(*each)) for each in ((1, 3), (1, 2), (0, 2), (0, 2)))
        problem = replace(problem, d=d, t=t, padding_d=(front, back), dilation_d=draw(st.integers(1, 2)))
    assume(min(problem.z, problem.p, problem.q) > 0 and not WINOGRAD.reasons(problem, TARGETS[0]))
    return problem


@settings(
    max_examples=4,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(st.data())
def test_drawn_layers_are_right(data: st.DataObject) -> None:
    problem = data.draw(drawn())
    config = data.draw(st.sampled_from(list(WINOGRAD.configs(problem, TARGETS[0]))))
    proof.check(WINOGRAD, problem, config, kinds=cases.KINDS[1:])


def prepared_by(problem: ConvProblem, config: WinogradConfig, w: np.ndarray) -> np.ndarray:
    """What the preparing launches write; NaN where they write nothing."""
    plan = WINOGRAD.plan(problem, config, TARGETS[0])
    prepared = np.full(plan.prepared_bytes // 4, np.nan, np.float32)
    emulator.run_plan(Plan(plan.prepare), {"w": w, "prepared": prepared})
    return prepared


@each_kernel
@pytest.mark.parametrize("segments", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("problem_of", [layer, gradient], ids=["forward", "gradient"])
def test_filters_are_prepared_alike_for_every_size_of_image(problem_of, segments: bool, alpha: int, width: int) -> None:
    """Prepared once, filters serve images of all sizes whose rows are cut into the same kinds of tiles."""
    problem = problem_of(alpha, width)
    config = next(c for c in configs(problem, alpha) if c.segments == segments)
    prepare = WINOGRAD.plan(problem, config, TARGETS[0]).prepare
    assert prepare
    larger = {"n": 3, "h": problem.h + 4, "w": problem.w + 3 * (alpha + 1 - width), "layout": problem.layout}
    for target in TARGETS:
        assert WINOGRAD.plan(replace(problem, **larger), config, target).prepare == prepare
    assert WINOGRAD.plan(replace(problem, k=problem.k + 64, c=problem.c + 64), config, TARGETS[0]).prepare != prepare


@pytest.mark.parametrize("problem", [layer(8, 3), layer(16, 7, "NCHW"), gradient(8, 4, "CHWN")], ids=str)
def test_prepared_apart_is_the_same(problem: ConvProblem) -> None:
    alpha = max(states for states, _ in kernels_of(problem))
    config = next(c for c in configs(problem, alpha) if c.segments)
    plan = WINOGRAD.plan(problem, config, TARGETS[0])
    values = cases.draw_conv(problem, "zero-mean")
    together, apart = (np.full(problem.y_shape, np.nan, np.float32) for _ in range(2))
    (written,) = plan.outputs
    # the test above plays such plans in all orders of threads
    emulator.run_plan(plan, {**values, written: together}, orders=("ascending",))
    prepared = prepared_by(problem, config, values["w"])
    emulator.run_plan(Plan(plan.launches), {**values, written: apart, "prepared": prepared}, orders=("ascending",))
    np.testing.assert_array_equal(apart, together)
    assert np.isfinite(together).all()


def transformed(
    problem: ConvProblem, w: np.ndarray, alpha: int, columns: slice = slice(None), block: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Filters in ``alpha`` states, in float64 as [group][row][channel][state][filter] without padding; and their sums
    of absolute values, which rounding errors are measured by. Of ``columns`` of the rows, as blocks ``block`` wide."""
    forward = forward_of(problem)
    w = w.transpose({"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "CHWN": (3, 0, 1, 2)}[problem.layout])
    w = w.reshape(problem.groups, problem.group_k, problem.group_c, problem.r, problem.s).astype(np.float64)
    if problem.op == "dgrad":
        w = w.transpose(0, 2, 1, 3, 4)[..., ::-1, ::-1]
    w, width = w[..., columns], block or forward.s
    w = np.pad(w, ((0, 0),) * 4 + ((0, width - w.shape[-1]),))
    _, g, _ = matrices(alpha + 1 - width, width).arrays()
    states, sizes = (np.einsum("gkcrs,as->grcak", a, m) for a, m in ((w, g), (abs(w), abs(g))))
    return states, sizes


HIGH = [{}, {"r": MOST_TAPS + 2}, {"r": 2 * MOST_TAPS + 2}, {"groups": 2, "c": 38, "k": 74}]


@each_kernel
@pytest.mark.parametrize("problem_of", [layer, gradient], ids=["forward", "gradient"])
def test_filters_are_transformed_to_the_last_bits(problem_of, alpha: int, width: int) -> None:
    number = ELEVEN.index((alpha, width))
    problem = problem_of(alpha, width, LAYOUTS[number % 3], **HIGH[number % len(HIGH)])
    w = cases.draw_conv(problem, "zero-mean")["w"]
    config = next(c for c in configs(replace(problem, h=40), alpha) if not c.segments)
    (c, k), (taps, row_blocks), forward = padded_sizes(forward_of(problem)), taps_of(problem), forward_of(problem)
    shape = (problem.groups, taps * row_blocks, c, alpha, k)
    prepared = prepared_by(replace(problem, h=40), config, w)
    found = prepared[: np.prod(shape)].reshape(shape).astype(np.float64)
    expected, sizes = transformed(problem, w, alpha)
    inside = tuple(slice(extent) for extent in (problem.groups, forward.r, forward.group_c, alpha, forward.group_k))
    assert expected.shape == found[inside].shape
    # each number of g rounded once, each product and each sum
    assert (abs(found[inside] - expected) <= (width + 2) * 2.0**-24 * sizes).all()
    found[inside] = 0
    assert not found.any()  # padding, and no NaN left
    assert np.isnan(prepared[np.prod(shape) :]).all()


#: Floats behind the last row of transformed tiles, or of exchanged sums, that keep rows on different banks.
MOST_PADDING = 78


def each_number_of_states() -> list[Any]:
    chosen = selection.cover(ELEVEN, lambda kernel: kernel[:1])
    return selection.marked(ELEVEN, chosen, lambda kernel: (kernel, f"{kernel[0]}-{kernel[1]}"))


@pytest.mark.parametrize(("alpha", "width"), each_number_of_states())
def test_shared_memory_is_what_the_kernel_uses(alpha: int, width: int) -> None:
    """All of it is needed, up to what pads a row; that it is enough the fences say whenever a kernel runs.

    ``make test`` looks at each number of states: the number of bytes is a function of it and of the configuration.
    """
    problem = layer(alpha, width, LAYOUTS[width % 3], c=33)  # channels for two chunks of any configuration
    plan = WINOGRAD.plan(problem, next(c for c in configs(problem, alpha) if not c.segments), TARGETS[0])
    (launch,) = plan.launches
    less = replace(plan, launches=(replace(launch, shared_bytes=launch.shared_bytes - 4 * MOST_PADDING - 16),))
    values = cases.draw_conv(problem, "zero-mean")
    y = np.full(problem.y_shape, np.nan, np.float32)
    with pytest.raises(emulator.EmulatorError, match="use-after-poison|SEGV|overflow"):
        emulator.run_plan(less, {**values, "y": y}, orders=("ascending",))


def widths_and_gpus() -> list[Any]:
    """In ``make test`` each width once, each precision for each GPU."""
    found = list(product((*range(2, 10), 13, 31), ("fp32", "relaxed"), TARGETS))
    chosen = selection.cover(found, lambda each: (each[0], each[1:]))
    return selection.marked(found, chosen, lambda each: (each, f"{each[0]}-{each[1]}-{each[2].arch}"))


@pytest.mark.parametrize(("width", "precision", "target"), widths_and_gpus())
def test_every_layer_that_is_accepted_fits_every_gpu(width: int, precision: str, target: Target) -> None:
    tried = 0
    for r, layout in product((1, 2, 3, 7, MOST_TAPS, MOST_TAPS + 1, 2 * MOST_TAPS + 1, 40), LAYOUTS):
        for n, k in ((1, 5), (2**17, 130)):  # the latter with 64-bit offsets
            forward = ConvProblem(n, 48, 50, 51, k, r, width, layout=layout, precision=precision)
            for problem in (forward, replace(forward, op="dgrad")):
                if WINOGRAD.reasons(problem, TARGETS[0]):
                    continue
                found = list(WINOGRAD.configs(problem, target))
                # the cut ones have launches of other kernels, too
                for config in (found[0], found[-1], *[c for c in found if c.segments][:1]):
                    plan = WINOGRAD.plan(problem, config, target)
                    for launch in plan.every_launch:
                        assert launch.shared_bytes <= target.shared_per_block
                        if launch.symbol == "winograd1d":
                            # registers are not held back for blocks that cannot be there
                            together = launch.min_blocks * (launch.shared_bytes + 1024)
                            assert launch.min_blocks == 1 or together <= target.shared_per_multiprocessor
                    assert plan.prepared_bytes == WINOGRAD.prepared_bytes(problem)
                tried += 1
    assert tried > 40


def test_precisions() -> None:
    def reasons(width: int, **rest: Any) -> str:
        problem = replace(ConvProblem(1, 64, 30, 40, 8, 3, width), **rest)
        return "; ".join(WINOGRAD.reasons(problem, TARGETS[0]))

    def served(width: int, **rest: Any) -> tuple[tuple[int, int], ...]:
        return kernels_of(replace(ConvProblem(1, 64, 30, 40, 8, 3, width), **rest))

    blocks = ((8, 3), (8, 4), (8, 5))
    for width in range(2, 8):
        assert not reasons(width) and reasons(width, precision="ieee")
        assert ((8, width) in served(width)) == (width > 2)  # the error of Γ8(7, 2) is near the precision's limit
        assert not any(alpha == 16 for alpha, _ in served(width))
        assert (served(width)[-3:] == blocks) == (width >= 6)
    assert "1 wide" in reasons(1)
    for width in (8, 9, 10, 31):
        assert served(width) == blocks and not reasons(width) and reasons(width, precision="ieee")
        for precision in ("relaxed", "tf32"):
            assert not reasons(width, precision=precision)
    assert served(7, precision="relaxed") == ((16, 7), (8, 7), *blocks)
    assert served(9, precision="relaxed") == ((16, 9), *blocks)
    assert (8, 2) in served(2, precision="relaxed")
    # Groups of few channels would be padded to sixteen.
    for op in ("fprop", "dgrad"):
        assert f"column blocks are for groups of {LEAST_CHANNELS} channels and more, and groups have 4" in reasons(
            9, groups=2, c=8, k=8, r=9, op=op
        )
        assert served(7, groups=2, c=8, k=8, r=9, op=op) == ((8, 7),)
        assert not reasons(9, groups=2, c=16, k=16, op=op)
    # Short sums: 5 · 3 · 5 and 11 · 3 · 5 products at most, of the forward pass and of the gradient.
    for name, other in (("c", {}), ("k", {"op": "dgrad"})):
        few = mean_products(forward_of(replace(ConvProblem(1, 64, 30, 40, 8, 3, 5), **{name: 5}, **other)))
        assert (
            few <= 75
            and f"sums {few} products on average; precision 'fp32' is kept from {LEAST_PRODUCTS} on"
            in reasons(5, **{name: 5}, **other)
        )
        assert not reasons(5, **{name: 11}, **other) and not reasons(5, **{name: 5}, precision="relaxed", **other)
    assert "12" in reasons(3, r=MOST_TAPS + 1, t=2, d=3) and not reasons(3, r=MOST_TAPS, t=2, d=3, stride_d=2)
    assert "stride 2 along the depth" in reasons(3, t=2, d=3, stride_d=2, op="dgrad")
    assert "stride 1,2" in reasons(3, stride=(1, 2)) and "dilation 2 along the row" in reasons(3, dilation=(1, 2))
    assert not reasons(3, dilation=(2, 1)) and "wgrad" in reasons(3, op="wgrad")


FORWARD = [
    pytest.param(forward_of(c.problem), id=c.name)
    for c in (*cases.CONV_CASES, *cases.GRADIENT_CASES, *VOLUME_CASES)
    if c.problem.op == "fprop" or (c.problem.op == "dgrad" and (c.problem.stride_d, *c.problem.stride) == (1, 1, 1))
]


@pytest.mark.parametrize("layer", FORWARD)
def test_products_are_counted_where_pixels_are(layer: ConvProblem) -> None:
    """The mean over all outputs, by the definition."""
    ones = replace(layer, n=1, c=1, k=1, groups=1, bias=False, activation=None, layout="NCHW", dtype="float64")
    seen = oracle.conv2d(ones, np.ones(ones.x_shape), np.ones(ones.w_shape))
    assert mean_products(layer) == layer.group_c * int(seen.sum()) // seen.size


def test_mostly_padded_layers_are_left_to_fewer_states() -> None:
    """Half of their taps see padding: the sums are short, whatever the filter."""
    padded_layer = ConvProblem(1, 17, 11, 2, 15, 3, 3, padding=(2, 4, 0, 4), op="dgrad")
    assert mean_products(forward_of(padded_layer)) < LEAST_PRODUCTS <= 15 * 9
    assert kernels_of(padded_layer) == ((4, 3),)
    proof.check(WINOGRAD, padded_layer)
