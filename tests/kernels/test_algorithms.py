"""Every algorithm on every problem that it accepts, against float64: on the CPU emulator, and on a GPU (``-m gpu``)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import gcd

import numpy as np
import pytest

from leanconv.call.choose import NoAlgorithmError, choose
from leanconv.dtypes import item_bytes
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.common.input_gradient import phase_groups
from leanconv.kernels.cost import fitted
from leanconv.kernels.image_filter.register_cache import PartialSumsConfig
from leanconv.problem import ConvProblem, FilterProblem
from tests import cases, emulator, proof, selection
from tests.cases import ALL, CASES, CONV_CASES, GRADIENT_CASES, REFUSED, TARGETS, TRANSFORM_CASES
from tests.cases_16bit import NATIVE_CASES
from tests.cases_separable import SEPARABLE_CASES
from tests.cases_tensor import TF32_CASES, TF32_GROUP_CASES
from tests.cases_tensor_filter import TENSOR_FILTER_CASES
from tests.cases_volumes import TRANSFORM_VOLUMES, VOLUME_CASES
from tests.variants import VARIANTS

MET = [
    (a, c)
    for a in VARIANTS
    for c in (
        *CASES,
        *SEPARABLE_CASES,
        *NATIVE_CASES,
        *VOLUME_CASES,
        *(() if a.precision == "ieee" else (*TRANSFORM_CASES, *TRANSFORM_VOLUMES)),
    )
]
MET += [(a, c) for a in VARIANTS if a.name in ("register_cache", "tensor_filter") for c in TENSOR_FILTER_CASES]
MET += [(a, c) for a in VARIANTS if a.precision == "tf32" for c in TF32_CASES]
MET += [(a, c) for a in VARIANTS if a.strategy.startswith("groups") for c in TF32_GROUP_CASES]
ACCEPTED = [(a, c) for a, c in MET if not a.reasons(c.problem, TARGETS[0])]
THOROUGH = [(a, c) for a, c in ACCEPTED if c.thorough]


#: Algorithms that transform have thorough layers of their own; what those vary is not the others' loaders.
VARIED = [(a, c) for a, c in THOROUGH if a.precision == "ieee" or c in TRANSFORM_CASES or c in TRANSFORM_VOLUMES]
DECLINED = [(a, c.problem) for a, c in MET if a.reasons(c.problem, TARGETS[0])]


def _extremes():
    """The extreme configurations of each thorough layer, without the best guess, which runs on all cases."""
    found = []
    for algorithm, case in VARIED:
        configs = list(proof.extreme_configs(algorithm, case.problem, TARGETS[0]))
        for i, config in enumerate(configs[1:], 1):
            found.append((algorithm, case, config, f"{algorithm.stem}-{case.name}-{i}"))
    return found


def extremes():
    """In ``make test`` as few as have the least and the largest of every number, every kind, each type in each layout.

    Of image filters each kind with each filter.
    """
    found = _extremes()
    values = defaultdict(set)
    for algorithm, _, config, _ in found:
        for name, value in config.constants():
            values[algorithm.stem, type(config), name].add(value)

    def differs(each):
        algorithm, case, config, _ = each
        if algorithm.stem in ("winograd1d", "direct_tiled", "tensor_gemm", "tensor_gemm_sync"):
            return  # their own tests run each configuration
        kind = algorithm.stem, type(config)
        yield *kind, getattr(case.problem, "layout", case.name)
        yield *kind, *proof.decisions(config)
        for name, value in config.constants():
            known = values[(*kind, name)]
            if name == "split" or value in (min(known), max(known)):
                yield *kind, name, value

    def param(each):
        algorithm, case, config, name = each
        return (algorithm, _narrowed(case.problem, config), config), name

    return selection.marked(found, selection.cover(found, differs, lambda each: work(each[1])), param)


def work(case):
    """What the emulator has to do, about: products, and what it takes to build the kernels of a gradient's phases."""
    problem = case.problem
    strided = isinstance(problem, ConvProblem) and problem.op == "dgrad"
    return problem.flops + (10**6 * problem.stride_d * problem.stride[0] * problem.stride[1] if strided else 0)


def _narrowed(problem, config):
    """The images no wider than they need to be where a block makes one column: hundreds would take seconds."""
    if isinstance(config, PartialSumsConfig) and problem.kw == 32:
        return cases.filter_problem(
            *(problem.batch, problem.h, 37, problem.kh, problem.kw),
            anchor=problem.anchor,
            border=problem.border,
            dtype=problem.dtype,
        )
    return problem


def named(pairs, chosen=None):
    """A parameter for each pair; those that are not ``chosen`` are exhaustive."""
    params = selection.marked(pairs, pairs if chosen is None else chosen, lambda p: (p, f"{p[0].stem}-{p[1].name}"))
    return pytest.mark.parametrize(("algorithm", "case"), params)


def covering():
    """For each algorithm as few cases as have every layer once, and in each layout all that loaders depend on."""
    for algorithm in VARIANTS:
        mine = [(a, c) for a, c in ACCEPTED if a is algorithm]
        yield from selection.cover(mine, lambda pair: selection.traits(*pair), lambda pair: work(pair[1]))


CHOSEN = list(covering())
#: Of each algorithm the layer that is most work: it too is played in every order of threads.
MOST_WORK = {algorithm.stem: case.name for algorithm, case in sorted(CHOSEN, key=lambda pair: work(pair[1]))}


@named(ACCEPTED, CHOSEN)
def test_right_on_emulator(algorithm, case):
    # two kinds of data where the layer is thorough; elsewhere by turns, for indices are at stake, and not sums
    turn = len(case.name) % len(cases.KINDS)
    proof.check(algorithm, case.problem, kinds=cases.KINDS[turn : turn + 1])
    if case.thorough or case.name == MOST_WORK[algorithm.stem]:  # no other data have other races
        proof.check(algorithm, case.problem, run=proof.run_in_another_order, kinds=cases.KINDS[1 - turn : 2 - turn])


@pytest.mark.parametrize(("algorithm", "problem", "config"), extremes())
def test_extreme_configs_right_on_emulator(algorithm, problem, config):
    # one kind of data: the tuning changes indices, not arithmetic
    proof.check(algorithm, problem, config, kinds=cases.KINDS[:1])


WIDE = [(a, c) for a, c in VARIED if isinstance(c.problem, ConvProblem) and c.in_turn]


def wide_traits(pair):
    """Each algorithm; each direction and each layout once in a family, whose index arithmetic is one."""
    algorithm, case = pair
    yield algorithm.stem
    yield algorithm.family, case.problem.op
    yield algorithm.family, case.problem.layout


@named(WIDE, selection.cover(WIDE, wide_traits, lambda pair: work(pair[1])))
def test_wide_offsets_right_on_emulator(algorithm, case):
    """Tensors too large for 32-bit offsets select other code; the emulator runs that code on a small batch."""
    config = next(iter(algorithm.configs(case.problem, TARGETS[0])))
    wide = proof.wide_offsets(algorithm, case.problem, config, TARGETS[0])
    proof.check(algorithm, case.problem, config, kinds=cases.KINDS[:1], change=lambda plan: wide)


MANY = pytest.mark.exhaustive


IMAGES = [(a, c) for a, c in THOROUGH if isinstance(c.problem, FilterProblem)]


def alignments(pair):
    """What a kernel asks of alignment: the sizes of elements and whether there are channels, once each."""
    algorithm, case = pair
    yield algorithm.stem
    yield algorithm.stem, "element", item_bytes(case.problem.dtype)
    yield algorithm.stem, "channels", case.problem.channels > 1


@named(IMAGES, selection.cover(IMAGES, alignments, lambda pair: work(pair[1])))
@pytest.mark.parametrize(
    "offsets", [{"x": 4, "y": 12}, *(pytest.param(each, marks=MANY) for each in ({"x": 8, "y": 0}, {"x": 0, "y": 4}))],
    ids=str,
)  # fmt: skip
def test_unaligned_images_right_on_emulator(algorithm, case, offsets):
    """A part of an image begins anywhere; only its elements are aligned. Offsets are those of elements of 4 bytes."""
    items = {"x": item_bytes(case.problem.dtype), "y": item_bytes(case.problem.result)}
    run = partial(emulator.run_plan, offsets={role: at * items[role] // 4 for role, at in offsets.items()})
    proof.check(algorithm, case.problem, run=run, kinds=cases.KINDS[:1])


@pytest.mark.gpu
@named(ACCEPTED)
def test_right_on_gpu(algorithm, case, gpu_target):
    configs = proof.extreme_configs(algorithm, case.problem, gpu_target)
    for config in configs if case.thorough else [next(configs)]:
        proof.check(algorithm, case.problem, config, run=proof.run_on_gpu, target=gpu_target)


@pytest.fixture(scope="session")
def gpu_target():
    from leanconv.runtime.launch import open_device

    return open_device(0).target


@named([(a, c) for a, c in THOROUGH if c.name in ("odd-nchw", "odd-nhwc", "odd-chwn", "shape-7x7")])
def test_the_gpu_road_carries_every_argument(algorithm, case, host_device):
    """Where there is no GPU, what ``-m gpu`` does is at least done on a stand-in that computes by the definition."""
    proof.check(algorithm, case.problem, run=proof.run_on_gpu)
    assert len(host_device.launches) == len(cases.KINDS) and not host_device.memory


def test_every_case_is_accepted_by_some_algorithm():
    every = (*CASES, *SEPARABLE_CASES, *TENSOR_FILTER_CASES, *NATIVE_CASES, *VOLUME_CASES, *TRANSFORM_CASES)
    unsolved = [c.name for c in every if all(a.reasons(c.problem, TARGETS[0]) for a in VARIANTS)]
    assert not unsolved


def test_cases_cover_what_the_design_asks_for():
    convs = [c.problem for c in CONV_CASES]
    for layout in ALL:
        these = [p for p in convs if p.layout == layout]
        assert {p.groups > 1 for p in these} == {p.bias for p in these} == {True, False}
        assert any(p.n == 0 for p in these) and any(p.p * p.q == 1 for p in these)
        assert any(p.r > p.h and p.s > p.w for p in these)
        assert any(len(set(p.padding)) > 2 for p in these)
        assert any(p.stride[0] != p.stride[1] and p.dilation[0] != p.dilation[1] and p.groups > 1 for p in these)


def test_gradient_cases_cover_what_can_happen_to_a_pixel():
    gradients = [c.problem for c in GRADIENT_CASES]
    for layout in ALL:
        these = [p for p in gradients if p.layout == layout]
        assert {p.groups > 1 for p in these} == {p.n == 0 for p in these} == {True, False}
        unit = [p.as_forward().padding for p in these if p.stride == (1, 1)]
        assert any(min(padding) < 0 < max(padding) for padding in unit) and any(max(p) < 0 for p in unit)
        strided = [p for p in these if p.stride != (1, 1)]
        assert any(p.stride[0] > p.r and p.stride[1] > p.s for p in strided)
        assert any(min(gcd(*pair) for pair in zip(p.stride, p.dilation, strict=True)) > 1 for p in strided)
        # rows behind the last window, which no output reads
        assert any((p.p - 1) * p.stride[0] - p.padding[0] + p.dilation[0] * (p.r - 1) < p.h - 1 for p in strided)
        # one launch for many phases, and four for phases of four kinds
        kinds = {(len(found), max(each.phases for each in found)) for p in strided if (found := phase_groups(p))}
        assert {count for count, _ in kinds} == {1, 2, 4} and any(phases > 1 for count, phases in kinds if count == 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.stem)
def test_what_an_algorithm_declines_is_refused_with_its_reasons(algorithm):
    declined = [problem for a, problem in DECLINED if a.stem == algorithm.stem]
    assert declined
    kinds = {problem.kind: problem for problem in declined}
    for kind in kinds.keys() - {algorithm.solves}:
        with pytest.raises(ValueError, match=algorithm.stem):
            choose(kinds[kind], TARGETS[0], algorithm.stem)
    for problem in (problem for problem in declined if problem.kind == algorithm.solves):
        if not all(a.reasons(problem, TARGETS[0]) for a in ALGORITHMS if a.is_called(algorithm.stem)):
            continue  # another strategy takes it
        with pytest.raises(NoAlgorithmError) as refusal:
            choose(problem, TARGETS[0], algorithm.stem)
        for strategy in ALGORITHMS:
            if strategy.is_called(algorithm.stem):
                for reason in strategy.reasons(problem, TARGETS[0]):
                    assert reason in str(refusal.value), problem


@pytest.mark.parametrize(("problem", "word"), [pytest.param(p, w, id=w) for p, w in REFUSED])
def test_what_nothing_solves_is_refused_by_every_algorithm_by_name(problem, word):
    with pytest.raises(NoAlgorithmError) as refusal:
        choose(problem, TARGETS[0], "auto")
    lines = str(refusal.value).splitlines()
    for algorithm in ALGORITHMS:
        # the others take filters that are given otherwise, and say that
        if problem.kind == algorithm.solves and (problem.kind != "filter2d" or algorithm.stem == "register_cache"):
            assert any(line.strip().startswith(f"{algorithm.stem}:") and word in line for line in lines[1:])


def test_auto_chooses_the_quickest_that_accepts():
    for case in CASES:
        if case.name == "volume-per-image":
            continue
        able = [a for a in ALGORITHMS if not a.by_name_only and not a.reasons(case.problem, TARGETS[0])]
        costs = {
            a: fitted(a, case.problem, TARGETS[0]).cycles(found[0][0])
            for a in able
            if (found := a.within(case.problem, TARGETS[0], workspace=0))
        }
        assert costs[choose(case.problem, TARGETS[0]).algorithm] == min(costs.values()), case.name


def test_auto_knows_when_tensor_cores_and_transforms_pay():
    layer = ConvProblem(128, 128, 28, 28, 128, 3, 3, padding=(1, 1, 1, 1))
    assert choose(layer, TARGETS[0]).algorithm.name == "tensor_winograd"
    assert choose(replace(layer, stride=(2, 2)), TARGETS[0]).algorithm.name == "tensor_gemm"
    # where tensor cores have products of warps only, or none
    assert choose(layer, TARGETS[1]).algorithm.name.startswith(("winograd", "tensor_gemm_sync"))
    volume = replace(layer, n=8, d=8, t=3, padding_d=(1, 1))
    assert choose(volume, TARGETS[0]).algorithm.name.startswith("tensor")
    assert all(choose(volume, target).algorithm.name.startswith("winograd") for target in TARGETS[1:])
    assert choose(replace(volume, stride=(2, 2)), TARGETS[1]).algorithm.name == "implicit_gemm"
    assert choose(replace(layer, precision="ieee"), TARGETS[0]).algorithm.name == "im2win_fused"
    # one small image: the launch that prepares the filters would cost more than it saves
    assert choose(replace(layer, n=1), TARGETS[0]).algorithm.name == "im2win_fused"
    # no memory at all, not even for prepared filters
    assert choose(layer, TARGETS[0], limit=0).algorithm.name == "im2win_fused"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_wrong_results_are_noticed(kind):
    """The comparison itself: one wrong element among thousands, one unwritten one, one written gap."""
    conv, image = CONV_CASES[0].problem, cases.filter_problem(1, 30, 100, 3, 3, y_gap=2)
    from leanconv.cpu import oracle

    def answer(spoil):
        def run(plan, values):
            if "value" in values:
                dense = values["x"].reshape(30, 100)[None]
                result = oracle.filter2d(image, dense, values["w"], values["value"], values["delta"])[0]
                for i in range(30):
                    values["y"][i * 102 : i * 102 + 100] = result[i]
            else:
                values["y"][...] = oracle.conv2d(conv, values["x"], values["w"], values["bias"])
            spoil(values["y"])

        return run

    def nudge(y):
        y.flat[1234] *= np.float32(1.001)

    def forget(y):
        y.flat[1234] = np.nan

    def gap(y):
        y.flat[100] = 0

    for algorithm in VARIANTS:
        problem = conv if algorithm.solves == "conv2d" else image
        if algorithm.reasons(problem, TARGETS[0]):
            continue
        proof.check(algorithm, problem, run=answer(lambda y: None), kinds=(kind,))
        for spoil in (nudge, forget, gap) if problem is image else (nudge, forget):
            with pytest.raises(proof.WrongAnswer):
                proof.check(algorithm, problem, run=answer(spoil), kinds=(kind,))
