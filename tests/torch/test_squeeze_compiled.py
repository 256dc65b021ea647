"""Squeeze-and-excite under torch.compile: what its backend finds in a graph, and the operator that it puts there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from leanconv.kernels.common.squeeze_excite import SqueezeExciteProblem
from leanconv.plan import Plan
from leanconv.runtime.compile import CompileError
from tests.torch.conftest import Played

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import comparing, fused_backend, fused_layer, squeeze  # noqa: E402
from tests.torch.test_fuse import TAKEN  # noqa: E402
from tests.torch.test_squeeze import Net, SqueezeExcitation, made  # noqa: E402

nn, F = torch.nn, torch.nn.functional


def compiled_by(model: Any, compiler: Any = None, **options: Any) -> Any:
    return torch.compile(model, backend=partial(ours.fused, compiler=compiler or eager), **options)


#: of each graph that has been compiled: how often it has the operator
counts: list[int] = []


def eager(graph: Any, inputs: Any) -> Any:
    counts.append(graph.code.count("leanconv.squeeze_excite"))
    return graph


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every block is taken that the backend finds, and every convolution: `counts`."""
    way = squeeze.Way("leanconv", "", "", Plan(()), 0)
    monkeypatch.setattr(squeeze, "decide", lambda *given, compiled: way)
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)
    torch._dynamo.reset()
    counts.clear()
    return counts


class Residual(nn.Module):
    """A block between convolutions, as EfficientNet, MobileNetV3 and RegNet-Y have it, whose result is a residual."""

    def __init__(self, block: Any, activation: Any) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2))
        self.block, self.activation = block, activation

    def forward(self, x: Any) -> Any:
        y = self.block(self.activation(self.first(x)))
        return F.relu(self.last(y) + y)


class Networks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            Residual(SqueezeExcitation(8, 2, partial(nn.SiLU, inplace=True)), nn.SiLU(inplace=True)),
            Residual(SqueezeExcitation(8, 3, nn.ReLU, nn.Hardsigmoid), nn.Hardswish(inplace=True)),
            Residual(SqueezeExcitation(8, 4), nn.ReLU(inplace=True)),
        )


def test_the_backend_finds_blocks(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a fused model. What is between them is fused as before; changed parameters are followed."""
    model, x = made(Networks), torch.randn(2, 8, 6, 5)
    graphs, asked = [], list[str]()
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: asked.append(chain.what) or TAKEN)
    compiled = compiled_by(model, lambda graph, inputs: graphs.append(graph) or eager(graph, inputs))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert len(asked) == 6 and asked.count("conv+bn+add+relu") == 3
        model[0].block.fc1.weight.mul_(2)
        model[1].block.fc2.bias = nn.Parameter(torch.randn(8))
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled_by(ours.fuse(model))(x), model(x))
        # a product in place changes the images, which others may read
        torch.testing.assert_close(compiled_by(made(Net))(x[:, :3]), made(Net)(x[:, :3]))
    assert taken == [3, 3, 4]
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert names.count("leanconv.fused_conv2d.default") == 6
    parts = "batch_norm", "relu", "silu", "hardswish", "pool", "function mul"
    assert not any(part in name for name in names for part in parts)
    taken.clear()
    torch.testing.assert_close(compiled(x), model(x))  # a gradient would be recorded
    with torch.no_grad():
        assert compiled_by(model.to("meta"))(x.to("meta")).is_meta
    assert taken == [0, 0]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_images_may_have_any_axes(axes: int, taken: list[int]) -> None:
    conv, x = getattr(nn, f"Conv{axes}d"), torch.randn(2, 4, *range(2, 2 + axes))
    pool = getattr(nn, f"AdaptiveAvgPool{axes}d")(1)
    model = made(nn.Sequential, pool, conv(4, 2, 1, stride=2), nn.Tanh(), conv(2, 4, 1, padding="same"), nn.Sigmoid())
    with torch.no_grad():
        torch.testing.assert_close(compiled_by(lambda x: torch.mul(x, model(x)))(x), model(x) * x)
    assert taken == [1]


def pooled(x: Any) -> Any:
    return F.adaptive_avg_pool2d(x, 1)


#: What is no block, of images, and of two layers of their means: each with a value that a block would not have.
REFUSED: dict[str, Callable[..., Any]] = {
    "the gates are read": lambda x, a, b: x * (g := torch.sigmoid(b(a(pooled(x)).relu()))) + g,
    "the mean is read": lambda x, a, b: x * torch.sigmoid(b(a(m := pooled(x)).relu())) + m,
    "what is between is read": lambda x, a, b: x * torch.sigmoid(b(h := a(pooled(x)).relu())) + h,
    "a sum is between": lambda x, a, b: x * torch.sigmoid(b(a(pooled(x)).relu() + 1)),
    "the mean is scaled": lambda x, a, b: x * torch.sigmoid(b(a(pooled(x) * 2).relu())),
    "the gates are scaled": lambda x, a, b: x * (torch.sigmoid(b(a(pooled(x)).relu())) * 2),
    "two activations": lambda x, a, b: x * torch.sigmoid(b(a(pooled(x)).relu().tanh())),
    "another gate": lambda x, a, b: x * torch.tanh(b(a(pooled(x)).relu())),
    "two gates": lambda x, a, b: x * F.hardsigmoid(torch.sigmoid(b(a(pooled(x)).relu()))),
    "a sum with the gates": lambda x, a, b: x + torch.sigmoid(b(a(pooled(x)).relu())),
    "rows": lambda x, a, b: x * torch.sigmoid(b(a(F.adaptive_avg_pool2d(x, (None, 1))).relu())),
    "two columns": lambda x, a, b: x[..., :2] * torch.sigmoid(b(a(F.adaptive_avg_pool2d(x, (1, 2))).relu())),
    "the largest": lambda x, a, b: x * torch.sigmoid(b(a(F.adaptive_max_pool2d(x, 1)).relu())),
    "part of the pixels": lambda x, a, b: x * torch.sigmoid(b(a(pooled(x[:, :, 1:])).relu())),
    "the mean of images too": lambda x, a, b: x * torch.sigmoid(b(a(x.mean((0, 2, 3), keepdim=True)).relu())),
    "a residual": lambda x, a, b: x * torch.sigmoid(b(a(pooled(x)).relu()) + x[:, :, :1, :1]),
    "one gate": lambda x, a, b: x * torch.sigmoid(F.conv2d(a(pooled(x)).relu(), b.weight[:1])),
    "groups": lambda x, a, b: x * torch.sigmoid(b(F.conv2d(pooled(x), a.weight[:, :2], a.bias, groups=2).relu())),
    "padding": lambda x, a, b: (y := x[..., :3, :3])
    * torch.sigmoid(b(F.conv2d(pooled(y), a.weight, a.bias, padding=1).relu())),
    "one layer": lambda x, a, b: x * torch.sigmoid(b(pooled(x))),
    "other images": lambda x, a, b: x[:, :1] * torch.sigmoid(b(a(pooled(x)).relu())),
}  # fmt: skip


class Refused(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, self.a, self.b = REFUSED[name], nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.function(x, self.a, self.b)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_block_stays(name: str, taken: list[int]) -> None:
    model, x = made(Refused, name), torch.randn(2, 4, 5, 4)
    fused = ours.fuse(model)
    with torch.no_grad():
        for y in fused(x), compiled_by(model)(x):
            torch.testing.assert_close(y, model(x))
    assert taken == [0] and not any("mul" in what for what in fused.report.counts)


@torch.library.custom_op("leanconv_tests::doubles", mutates_args={"x"})
def doubles(x: torch.Tensor) -> None:
    x.mul_(2)


#: What changes images in place.
CHANGES: dict[str, Callable[..., Any]] = {
    "a method": lambda x: x.mul_(2),
    "a view's method": lambda x: x[:, 1:].flatten(2).zero_(),
    "a special method": lambda x: x.__imul__(2),
    "a part": lambda x: x.__setitem__((slice(None), 0), 0),
    "a function": lambda x: torch.relu_(x.sub_(1)),
    "a function's option": lambda x: F.relu(x.sub_(1), inplace=True),
    "a function's third argument": lambda x: F.hardtanh(x, 0, 0.5, True),
    "an output": lambda x: torch.add(x, 1, out=x),
    "a function of lists": lambda x: torch._foreach_mul_([x], 2),
    "an operator": lambda x: torch.ops.leanconv_tests.doubles.default(x),
    "an operator of any name": lambda x: torch.ops.leanconv_tests.doubles(x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_images_stays_behind_what_reads_them(name: str, taken: list[int]) -> None:
    """A block would read them where it ends, and so would a convolution with its activation."""
    model, x = made(SqueezeExcitation, 4, 2), torch.randn(2, 4, 5, 4)

    def function(x: Any) -> Any:
        x = x.abs()
        mean, y = pooled(x), model.fc1(x)
        CHANGES[name](x)
        return x * torch.sigmoid(model.fc2(model.fc1(mean).relu())), y.relu()

    with torch.no_grad():
        torch.testing.assert_close(compiled_by(function)(x), function(x))
    assert taken == [0]


@contextmanager
def no_loops() -> Iterator[None]:
    """A call that vmap would repeat for each example raises an error."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_operator(axes: int) -> None:
    """Its values, derivatives and transforms are those of PyTorch's functions; what traces sees one call."""
    generator, ones = torch.Generator().manual_seed(axes), (1,) * axes
    shapes = (2, 4, *range(2, 2 + axes)), (3, 4, *ones), (3,), (4, 3, *ones), (4,)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    x, w1, b1, w2, b2 = given
    convolve, pixels = getattr(F, f"conv{axes}d"), tuple(range(2, 2 + axes))
    for gate in (torch.sigmoid, F.hardsigmoid):
        options = "silu", gate.__name__
        operator = lambda *given, options=options: squeeze.OPERATOR(*given, *options)  # noqa: E731
        expected = x * gate(convolve(F.silu(convolve(x.mean(pixels, keepdim=True), w1, b1)), w2, b2))
        for wanted in (True, False):
            with torch.set_grad_enabled(wanted):
                y = operator(*given)
            torch.testing.assert_close(y, expected)
            assert y.requires_grad is wanted
        assert torch.autograd.gradcheck(operator, given, check_forward_ad=True, fast_mode=True)
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(squeeze.OPERATOR, (*given, *options), test_utils=tests)
    plain = [each.detach() for each in given]
    torch.library.opcheck(squeeze.OPERATOR, (*plain, *options), test_utils=tests)
    for at in range(5):
        many = [torch.stack([each, each / 2]) if place == at else each for place, each in enumerate(plain)]
        with no_loops():
            mapped = torch.vmap(operator, tuple(0 if place == at else None for place in range(5)))(*many)
        halved = [each / 2 if place == at else each for place, each in enumerate(plain)]
        torch.testing.assert_close(mapped, torch.stack([operator(*plain), operator(*halved)]))
    got, expected = (
        torch.func.grad(lambda w, f=f: f(x, w, None, w2, None, *options).square().sum())(w1.detach())
        for f in (squeeze.OPERATOR, squeeze._by_pytorch)
    )
    torch.testing.assert_close(got, expected)
    last = x.detach().transpose(1, -1).contiguous().transpose(1, -1)
    assert operator(last, *plain[1:]).stride() == last.stride() and operator(*(e.to("meta") for e in plain)).is_meta
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        operator(*plain)
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 3


@pytest.fixture
def by_aot(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiles a model; what the backend has made of its graphs stands in `counts`."""
    rewrite = fused_backend.rewrite

    def counted(graph: Any, precision: Any) -> ours.FuseReport:
        report = rewrite(graph, precision)
        counts.append(len(report.layers))
        return report

    monkeypatch.setattr(fused_backend, "rewrite", counted)
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: fused_layer.Way("PyTorch", "", ""))
    torch._dynamo.reset()
    counts.clear()
    squeeze._calls._ways.clear()
    return lambda model, **options: compiled_by(model, "aot_eager", **options)


class Scaled(nn.Module):
    """A block whose images and scales are what was given, or views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale, self.more = SqueezeExcitation(4, 2), *(nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.block(x.contiguous()) * self.scale[:, None, None] * self.more.to(x.dtype).sum()


def test_what_shares_memory_with_its_argument_records_no_gradient(taken: list[int]) -> None:
    """Though its result requires one, as the argument does."""
    model, x = made(Scaled), torch.randn(2, 4, 5, 4)
    for given in (x, x.clone().requires_grad_(), x.clone().requires_grad_() * 2):
        with torch.no_grad():
            torch.testing.assert_close(compiled_by(model)(given), model(given))
    assert taken == [1, 1, 1]


def test_sizes_that_nobody_knows_are_pytorchs(played: Played, by_aot: Callable[..., Any]) -> None:
    """Those of filters that are given with the images, and those that depend on values."""
    model, x = made(SqueezeExcitation, 24, 5), torch.randn(4, 24, 6, 8)
    large, keep = torch.randn(24, 24, 3, 3), torch.tensor([True, False, True, True])

    def block(x: Any, w1: Any, w2: Any) -> Any:
        return x * torch.sigmoid(F.conv2d(F.conv2d(pooled(x), w1).relu(), w2))

    def gate(x: Any, w: Any) -> Any:
        return x * torch.sigmoid(F.conv2d(x, w, padding=1))

    def some(x: Any, keep: Any) -> Any:
        return model(x[keep])

    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for function, given in (
            (block, (model.fc1.weight.detach(), model.fc2.weight.detach())), (gate, (large,)), (some, (keep,)),
        ):  # fmt: skip
            torch.testing.assert_close(by_aot(function, dynamic=True)(x, *given), function(x, *given))
    assert len(counts) >= 3 and not any(counts) and not played.launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_compiled_block_is_one_launch(form: Any, dtype: Any, played: Played, by_aot: Callable[..., Any]) -> None:
    model, x = made(SqueezeExcitation, 24, 5, nn.SiLU, nn.Hardsigmoid), torch.randn(2, 24, 6, 8)
    expected = model(x)
    model, x = model.to(dtype), x.to(dtype).contiguous(memory_format=form)
    compiled = by_aot(model)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 3e-3, "atol": 3e-3}
    with torch.no_grad():
        for _ in range(2):
            y = compiled(x)
            torch.testing.assert_close(y.float(), expected, **tolerance)
            assert y.dtype is dtype and y.is_contiguous(memory_format=form)
        assert counts == [1] and len(played.launches) == 2 and len(played.loaded) == 1
        # parameters in other memory, with other values
        model.fc2.bias.data = torch.zeros(24, dtype=dtype)
        torch.testing.assert_close(compiled(x), model(x), **tolerance)
        assert len(played.launches) == 3
        # memory that a kernel cannot read
        x = torch.randn(x.numel() + 1).to(dtype)[1:].as_strided(x.shape, x.stride())
        torch.testing.assert_close(compiled(x), model(x), **tolerance)
    compiled(x.float().requires_grad_().to(dtype)).sum().backward()
    assert len(played.launches) == 3 and counts == [1]


def test_calls_differ_by_their_functions(played: Played) -> None:
    """Of the same tensors: the activation, and the gate."""
    given = [torch.randn(shape) for shape in ((2, 8, 4, 4), (4, 8, 1, 1), (4,), (8, 4, 1, 1), (8,))]
    for options in (("relu", "sigmoid"), ("silu", "sigmoid"), ("relu", "hardsigmoid")):
        torch.testing.assert_close(
            squeeze.OPERATOR(*given, *options), squeeze._by_pytorch(*given, *options), rtol=1e-5, atol=1e-6
        )
    assert len(played.launches) == 3


@pytest.mark.parametrize("nhwc", [True, False])
def test_inductor_is_expected_to_be_no_slower_than_pytorchs_functions(nhwc: bool) -> None:
    for images, c, pixels in ((1, 96, 49), (32, 96, 3136), (256, 1152, 49)):
        problem = SqueezeExciteProblem(images, c, pixels, c // 4, "float16", nhwc, "silu", "sigmoid")
        eager, compiled = (comparing.squeeze_cycles(problem, Played.target, each) for each in (False, True))
        memory = 3 * images * problem.image_bytes / Played.target.bytes_per_cycle
        assert memory < compiled and (compiled < eager if nhwc else compiled == eager)


def test_images_of_any_size_ask_who_is_quicker(
    played: Played, by_aot: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the model is compiled, beside what inductor makes; and in each call, beside PyTorch's functions."""
    model, asked = made(SqueezeExcitation, 24, 5), list[Any]()
    cycles = comparing.squeeze_cycles

    def asks(problem: Any, target: Any, compiled: bool) -> float:
        asked.append((problem.pixels, compiled))
        return cycles(problem, target, compiled) if problem.pixels < 100 else 1.0

    monkeypatch.setattr(comparing, "squeeze_cycles", asks)
    with torch.no_grad():
        compiled = by_aot(model, dynamic=True)
        for rows, launches in ((6, 1), (7, 2), (20, 2)):
            x = torch.randn(2, 24, rows, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
            assert len(played.launches) == launches
        assert counts == [1] and asked == [(48, True), (48, False), (56, False), (160, False)]
        torch._dynamo.reset()
        by_aot(model)(x)
    assert counts == [1, 0] and asked[-1] == (160, True) and len(played.launches) == 2


def test_what_a_compiled_launch_would_miss_is_pytorchs(
    played: Played, by_aot: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(SqueezeExcitation, 24, 5), torch.randn(2, 24, 6, 8)
    expected = model(x).detach()

    def within(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def tangent(x: Any) -> Any:
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]

    with torch.no_grad():
        # autocast, around and inside of what is compiled; weights of another type
        for function in (within, torch.autocast("cpu", torch.bfloat16)(model)):
            y = by_aot(function)(x)
            assert torch.equal(y, function(x)) and (y - expected).abs().max() > 1e-4
        # tensors that are not dense
        torch.testing.assert_close(by_aot(model)(x[:, :, ::2]), model(x[:, :, ::2]))
        assert not any(counts)
        # transforms
        images = torch.stack([x, -x])
        torch.testing.assert_close(by_aot(torch.vmap(model))(images), torch.vmap(model)(images))
        torch.testing.assert_close(by_aot(tangent)(x), tangent(x))
        assert not played.launches

        # a kernel that the compiler refuses
        def refuses(*given: Any) -> Any:
            raise CompileError("no such instruction", (), "")

        monkeypatch.setattr(played, "load", refuses)
        monkeypatch.setattr(played, "executable", refuses)
        torch._dynamo.reset()
        with pytest.warns(RuntimeWarning, match="to PyTorch: no such instruction"):
            torch.testing.assert_close(by_aot(model)(x), expected)
    assert counts[-1] == 1
