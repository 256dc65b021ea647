"""What the backend of torch.compile says of the graphs that it was given."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.stand_ins import HostDevice
from tests.torch.conftest import Played

torch = pytest.importorskip("torch")

import leanconv.torch as ours  # noqa: E402
from leanconv.torch import comparing, compile_report, fused_backend, squeeze  # noqa: E402
from tests.torch.test_fuse import TAKEN, Block, made, on_stand_in  # noqa: E402
from tests.torch.test_squeeze import SqueezeExcitation  # noqa: E402

__all__ = ["on_stand_in"]
nn, F = torch.nn, torch.nn.functional


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    ours.fused_report(reset=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution that can be is fused, no block of squeeze-and-excite."""
    monkeypatch.setattr(fused_backend, "_decide", lambda chain, precision: TAKEN)
    monkeypatch.setattr(fused_backend, "precompile", lambda *given, **options: None)


def compiled(model: Any, compiler: Any = "eager", **options: Any) -> Any:
    return torch.compile(model, backend=partial(ours.fused, compiler=compiler), **options)


def left_of(function: Callable[..., Any], *given: Any) -> dict[str, str]:
    """What is said of the one graph of a function, of which nothing is fused."""
    ours.fused_report(reset=True)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(*given), function(*given))
    (graph,) = ours.fused_report().graphs
    assert not graph.layers
    return dict(graph.left)


def test_each_layer_has_its_name_and_who_computes_it(
    on_stand_in: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    model, x = made(Block, 4, 8, 2), torch.randn(2, 4, 10, 10)
    assert str(ours.fused_report()) == "no graph has been compiled"
    with torch.no_grad():
        compiled(model)(x)
    report = ours.fused_report()
    assert report.counts == {"conv+bn+relu": 1, "conv+bn": 1, "conv+bn+add+relu": 1} and not report.dropped
    (graph,) = report.graphs
    assert not graph.left
    assert [(name, what) for name, what, _ in graph.layers] == [
        ("conv1", "conv+bn+relu"), ("conv2", "conv+bn"), ("down.0", "conv+bn+add+relu"),
    ]  # fmt: skip
    for _, _, (way,) in graph.layers:
        assert re.match(
            r"leanconv: (\w+), fprop NCHW float32 2x\dx\d+x\d+ k8 .* bias .*: \1 is expected to take 0.00 of", way
        )
    assert str(report).startswith("graph 1 of 1\n1 conv+bn+relu\n") and f"\nconv1: conv+bn+relu: {way[:9]}" in str(
        report
    )
    # PyTorch is expected to be quicker
    monkeypatch.setattr(comparing.expected_time, "pytorch_cycles", lambda problem, target, tf32: 1.0)
    left = left_of(model, x)
    assert left.keys() == {"conv1", "conv2", "down.0"}
    pattern = r"fprop NCHW float32 2x\dx.*: (\w+) is expected to take \d{4}\.\d\d of the time of PyTorch"
    assert all(re.match(pattern, why) for why in left.values())


def test_compiling_again_adds_a_graph(taken: None) -> None:
    """Calls add nothing; other sizes, other graphs and a reset of Dynamo do."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()).eval()
    graphs = []
    with torch.no_grad():
        run = compiled(model)
        for rows in (8, 8, 9, 10, 11):  # as it is, and of any number of rows
            run(torch.randn(1, 3, rows, 8))
            graphs.append(len(ours.fused_report().graphs))
        assert graphs == [1, 1, 2, 2, 2]
        torch._dynamo.reset()
        run(torch.randn(1, 3, 8, 8))
        report = ours.fused_report(reset=True)
        assert report.counts == {"conv+silu": 3} and report.graphs[0] == report.graphs[2]
        assert str(report).count("graph 2 of 3\n1 conv+silu\n0: conv+silu: leanconv: it, a problem: said so") == 1
        assert ours.fused_report() == ours.CompileReport(())
        # a graph break is between two graphs
        compiled(lambda x: model(x).sum().item() + model[1](model[0](x)).sum())(torch.randn(1, 3, 8, 8))
    assert [len(graph.layers) for graph in ours.fused_report().graphs] == [1, 1]


def test_the_name_of_the_backend() -> None:
    """It is the same function, and the same report: leanconv is installed where tests run."""
    with torch.no_grad():
        torch.compile(nn.Conv2d(3, 4, 1), backend="leanconv")(torch.randn(1, 3, 4, 4))
    assert str(ours.fused_report()).endswith(": its images are on cpu")


class Several(nn.Module):
    """Layers that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.up, self.signal = nn.ConvTranspose2d(4, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        return self.signal(self.up(self.norm(y) + self.other(x) + y).flatten(2))


def test_what_is_left_says_why(taken: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Several().eval(), torch.randn(2, 4, 5, 6)
    with torch.no_grad():
        compiled(model)(x)
    (graph,) = ours.fused_report().graphs
    assert graph.layers == (("conv", "conv", ("leanconv: it, a problem: others read its result; said so",)),)
    others = "no convolution stands before it, or others read that one's result"
    assert graph.left == (
        ("norm", others), ("other", others), ("up", "transposed convolutions are left"),
        ("signal", "convolutions of signals are left"),
    )  # fmt: skip
    w, one = torch.randn(4, 4, 1, 1), torch.ones(4)
    functions: dict[str, Callable[..., Any]] = {
        "its residual has not the shape": lambda x: F.conv2d(x, w) + x[:, :, :1],
        "changes something in place between": lambda x: ((y := F.conv2d(x, w)), x.mul_(2), y.relu())[2],
        "no parameter that layers alone read": lambda x: F.batch_norm(F.conv2d(x, w), x[0, :, 0, 0], one),
    }  # fmt: skip
    for why, function in functions.items():
        ours.fused_report(reset=True)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(function)(x.clone())
        (graph,) = ours.fused_report().graphs
        (name, said), *_ = graph.left
        assert "conv2d" in name or name == "y"
        assert why in said and not graph.layers
    assert left_of(ours.Conv2d(4, 4, 1), x) == {"conv2d": "it is a call of leanconv, without what follows it"}
    monkeypatch.undo()
    norm = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    with torch.no_grad():
        compiled(norm)(x)
    left = dict(ours.fused_report().graphs[-1].left)
    assert left["0"] == "its images are on cpu" and left["1"] == "it takes the statistics of the batch, as in training"


def test_derivatives_leave_a_graph(taken: None) -> None:
    model, x = Several().eval(), torch.randn(2, 4, 5, 6)
    compiled(model)(x)
    (graph,) = ours.fused_report(reset=True).graphs
    assert not graph.layers and [name for name, _ in graph.left] == ["conv", "up", "signal"]
    assert {why for _, why in graph.left} == {"a gradient is recorded, as it is not under torch.no_grad()"}
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(lambda x: torch.func.jvp(model.up, (x,), (x,))[1])(x)
    (graph,) = ours.fused_report().graphs
    assert not graph.layers and {why for _, why in graph.left} == {"a derivative is taken"}


def test_what_a_layer_of_other_types_says(on_stand_in: HostDevice) -> None:
    model, x = nn.Conv2d(4, 4, 1).eval(), torch.randn(2, 4, 5, 6)
    assert left_of(model.double(), x.double()) == {"conv2d": "its dtypes are torch.float64 and torch.float64"}
    assert "is not one for leanconv" in left_of(model.float(), x[0])["conv2d"]
    with torch.autocast("cpu", torch.bfloat16):
        assert left_of(model, x) == {"conv2d": "autocast is enabled"}


def test_sizes_that_depend_on_values(on_stand_in: HostDevice) -> None:
    conv, x, keep = nn.Conv2d(4, 4, 1).eval(), torch.randn(2, 4, 5, 6), torch.tensor([True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        left = left_of(lambda x, keep: conv(x[keep]), x, keep)
    assert left["conv2d"] == "a size of its images depends on values"


def test_a_graph_of_modules() -> None:
    """As nobody but torch.fx makes it, whose nodes have no values."""
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval())
    with torch.no_grad():
        ours.fused(graph, [], compiler="eager")
        ours.fused(torch.fx.symbolic_trace(lambda x, w: F.conv2d(x, w)), [], compiler="eager")
    one, other = ours.fused_report().graphs
    assert one.left == (("0", "its module is one node of the graph"),)
    assert other.left == (("conv2d", "nobody knows the shape of its result"),)


@pytest.mark.parametrize("path", [
    "L['self'].layers.0.conv", "G['net'].layers[0].conv", "L['self']._modules['layers']._modules['0']._modules['conv']",
    "L['f'].__closure__[1].cell_contents.layers.0.conv",
])  # fmt: skip
def test_names_are_those_of_the_model(path: str) -> None:
    """However Dynamo writes them."""
    node = torch.fx.Graph().placeholder("y")
    node.meta["nn_module_stack"] = {"1": ("L['self']", nn.Sequential), "2": (path, nn.Conv2d)}
    assert compile_report.name_of(node) == "layers.0.conv"
    node.meta["nn_module_stack"]["3"] = (f"{path}.of", nn.Sequential)
    assert compile_report.name_of(node) == "y"


def test_squeeze_and_excite(played: Played, taken: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(SqueezeExcitation(24, 5, nn.SiLU)).eval(), torch.randn(2, 24, 6, 8)
    squeeze._calls._ways.clear()
    with torch.no_grad():
        compiled(model, "aot_eager")(x)
        (graph,) = ours.fused_report(reset=True).graphs
        ((name, what, (way,)),) = graph.layers
        assert (name, what) == ("0", "mean+conv+silu+conv+sigmoid+mul") and not graph.left
        assert way.startswith("leanconv: squeeze_excite, ") and "of the time of inductor's" in way
        monkeypatch.setattr(comparing, "squeeze_cycles", lambda problem, target, compiled: 1.0)
        torch._dynamo.reset()
        compiled(model, "aot_eager")(x)
    (graph,) = ours.fused_report().graphs
    assert graph.counts == {"conv+silu": 1, "conv+sigmoid": 1}
    ((name, why),) = graph.left
    assert name == "0" and "of the time of inductor's" in why


def test_it_is_bounded_and_keeps_nothing_alive(taken: None) -> None:
    class Kept(nn.Conv2d):
        pass

    def graph_of(at: int) -> Any:
        return torch.fx.symbolic_trace(nn.Sequential(*(Kept(1, 1, 1) for _ in range(at % 3))))

    for at in range(70):
        ours.fused(graph_of(at), [], compiler=lambda graph, inputs: graph)
    report = ours.fused_report()
    assert len(report.graphs) == compile_report._MOST_GRAPHS == 64 and report.dropped == 6
    assert str(report).startswith("graph 7 of 70\n") and "graph 70 of 70" in str(report)
    model = nn.Sequential(Kept(3, 4, 1)).eval()
    alive, graphs = [weakref.ref(model[0]), weakref.ref(model[0].weight)], []
    with torch.no_grad():
        torch.compile(model, backend=partial(ours.fused, compiler=lambda graph, _: graphs.append(graph) or graph))(
            torch.randn(1, 3, 4, 4)
        )
    assert ours.fused_report().graphs[-1].layers
    alive.append(weakref.ref(graphs.pop()))
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_threads_lose_no_graph() -> None:
    report = compile_report.FuseReport((), ())
    threads = [threading.Thread(target=lambda: [compile_report.keep(report) for _ in range(500)]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    said = ours.fused_report(reset=True)
    assert said.dropped + len(said.graphs) == 2000
