"""Whole networks in several arithmetics: what is measured, which rows stay, and the table made of the times."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import deciding, patch, registration  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from leanconv.tuning.search import WrongResultError  # noqa: E402
from report import forward_passes, models, modes, network_tables, networks, records, timed  # noqa: E402
from report.energy import Work  # noqa: E402
from tests import made_up  # noqa: E402
from tests.stand_ins import HostDevice, patched_cpu, set_capturing  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_a_wrong_result_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.machine, "describe", lambda *_: made_up.ABOUT)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(modes, "network", lambda name, mode, training: (torch.nn.Identity(), torch.empty(4)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # as CUDA graphs, eagerly and fused, which may run other kernels
    errors = iter(((0.53, 9e-4, 9e-4), (9e-4, float("nan"), 9e-4), (9e-4, 9e-4, 0.2), (9e-4, 8e-4, 7e-4)))
    times = {f"{side}_graph_us": 1.0 for side in ("torch", "torch_nchw", "leanconv")}
    fields = "leanconv_error", "leanconv_eager_error", "leanconv_fused_error"
    monkeypatch.setattr(
        modes, "measure_forward",
        lambda *_, **__: times | {"torch_error": 5e-4} | dict(zip(fields, next(errors), strict=True)),
    )  # fmt: skip
    names = "swin3d_t", "vgg16", "unet", "resnet50"
    said = r"^swin3d_t, tf32: error 5.3e-01, PyTorch's 5.0e-04\nvgg16, tf32: error nan, .*\nunet, tf32: error 2.0e-01"
    with pytest.raises(WrongResultError, match=said):
        modes.measure(tmp_path, None, names, ("tf32",), ("forward",), None, False, False)
    assert [row["network"] for row in records.read(tmp_path / "nvidia-x/modes.json")["rows"]] == ["resnet50"]


def test_no_committed_row_is_of_a_wrong_result() -> None:
    rows = records.read(ROOT / "benchmarks/results/nvidia-h200/modes.json")["rows"]
    assert sum("leanconv_error" in row for row in rows) > 80 and all(map(modes.is_right, rows))


def test_rows_of_this_revision_stay_and_others_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = made_up.ABOUT | {"git_revision": "old"}
    monkeypatch.setattr(records.machine, "describe", lambda *_: about)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(modes, "network", lambda name, mode, training: (torch.nn.Identity(), torch.empty(4)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen: list[tuple[str, bool]] = []

    def forward(model: Any, x: Any, mode: networks.Mode, compiled: bool, tuned: bool, graph: bool) -> dict[str, float]:
        assert not compiled and tuned == graph
        seen.append((mode.title, torch.backends.cudnn.allow_tf32))
        if not graph:
            return {f"torch{each}_eager_us": 3000.0 for each in ("", "_nchw")} | {"leanconv_eager_us": 1500.0}
        return {f"torch{each}_graph_us": 3000.0 for each in ("", "_nchw")} | {
            "leanconv_graph_us": 2000.0 if mode.tf32 else 1000.0
        }

    monkeypatch.setattr(modes, "measure_forward", forward)
    monkeypatch.setattr(
        modes,
        "measure_step",
        lambda *_: {"torch_eager_us": 9000.0, "torch_nchw_eager_us": 9100.0, "leanconv_eager_us": 10000.0},
    )
    allowed = torch.backends.cudnn.allow_tf32
    names, passes = ("resnet18", "resnet50"), tuple(networks.PASSES)
    path = modes.measure(tmp_path, None, names, ("fp32", "tf32"), passes, None, False, True)
    assert torch.backends.cudnn.allow_tf32 == allowed
    assert seen == [("strict FP32", False)] * 2 + [("TF32", True)] * 2
    rows = records.read(path)["rows"]
    assert [(row["network"], row["mode"], row["pass"]) for row in rows] == [
        ("resnet50", "fp32", "forward"), ("resnet50", "tf32", "forward"), ("resnet18", "fp32", "forward"),
        ("resnet18", "tf32", "forward"), ("resnet50", "fp32", "training"), ("resnet50", "tf32", "training"),
    ]  # fmt: skip
    modes.measure(tmp_path, None, names, ("fp32", "tf32"), passes, None, False, True)
    assert len(seen) == 4, "nothing is measured twice"
    about["git_revision"] = "new"
    modes.measure(tmp_path, None, ("resnet18",), ("fp32",), ("forward",), None, False, True)
    assert len(seen) == 5 and len(records.read(path)["rows"]) == 6
    page = network_tables.section(records.read(path))
    strict = "| network | graph |\n|---|---|\n| resnet50 | 3.00 |\n| resnet18 | 3.00 |\n| geometric mean | 3.00 of 2 |"
    assert f"**Forward pass, strict FP32**\n\n{strict}" in page
    assert "**Training step, TF32**\n\n| network | eager |\n|---|---|\n| resnet50 | 0.90 |" in page
    assert modes.measure(tmp_path, None, ("unet",), ("fp32",), ("forward",), 0.0, False, True) == path
    assert len(seen) == 5, "there was no time left"
    modes.measure(tmp_path, None, ("mvit_v2_s",), ("tf32",), ("forward",), None, False, True)
    page = network_tables.section(records.read(path))
    assert "| network | graph | eager |" in page and "| mvit_v2_s | – | 2.00 |" in page
    assert "| geometric mean | 1.50 of 2 | 2.00 of 1 |" in page


def measured_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Networks are empty; what files of a machine and a revision tell."""
    about = made_up.ABOUT | {"git_revision": "b" * 40, "date": "2026-02-03T00:00:00"}
    monkeypatch.setattr(records.machine, "describe", lambda *_: about)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(modes, "network", lambda name, mode, training: (torch.nn.Identity(), torch.empty(4)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return about


@pytest.mark.parametrize("way", networks.WAYS)
def test_times_of_one_way_alone_are_measured_anew(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that the file has: the others of their times keep their revision."""
    about = measured_by(monkeypatch)
    asked: list[tuple[str, str]] = []
    new = {f"torch_{way}_us": 9.0, f"leanconv_{way}_us": 3.0}
    monkeypatch.setattr(modes, "measure_forward_way", lambda model, x, mode, *given: asked.append(given) or new)
    old = {"network": "resnet18", "mode": "fp32", "pass": "forward", "quicker": "NCHW", "torch_graph_us": 8.0,
           "leanconv_graph_us": 4.0, f"torch_{way}_us": 9.0, f"leanconv_{way}_us": 9.5, "revision": "a" * 40,
           "date": "2026-01-02T00:00:00"}  # fmt: skip
    unseen = old | {"network": "mvit_v2_s"}  # which PyTorch cannot capture
    path = records.write(tmp_path, "modes", about, [old, unseen])
    names = "resnet18", "resnet50", *(["mvit_v2_s"] * (way != "eager"))
    for _ in range(2):
        modes.measure(tmp_path, None, names, ("fp32",), networks.PASSES, None, False, False, way)
    assert asked == [(way, "NCHW", "NHWC")], "nothing is measured twice, and no row is new"
    assert records.read(path)["rows"] == [
        old | new | {f"{way}_revision": about["git_revision"], f"{way}_date": about["date"]}, unseen
    ]  # fmt: skip
    page = network_tables.section(records.read(path))
    assert f"| resnet18 |{'' if way == 'graph' else ' 2.00 |'} 3.00 |" in page
    assert "2026-01-02, revision aaaaaaaaaaaa; 2026-02-03, revision bbbbbbbbbbbb." in page
    # a row of this revision without this way's times gets them
    bare = {name: each for name, each in old.items() if way not in name} | {"revision": about["git_revision"]}
    records.write(tmp_path, "modes", about, [bare])
    modes.measure(tmp_path, None, ("resnet18",), ("fp32",), networks.PASSES, None, False, False, way)
    assert len(asked) == 2 and records.read(path)["rows"][0][f"leanconv_{way}_us"] == 3.0
    # of a wrong result nothing is kept, but the other times of its row are
    records.write(tmp_path, "modes", about, [old])
    new |= {"torch_error": 1e-7, f"leanconv_{way}_error": 0.3}
    with pytest.raises(WrongResultError, match="resnet18, fp32: error 3.0e-01"):
        modes.measure(tmp_path, None, ("resnet18",), ("fp32",), networks.PASSES, None, False, False, way)
    assert records.read(path)["rows"] == [old]


@pytest.mark.parametrize("way", networks.OF_STEPS)
def test_one_way_of_a_step_is_measured_anew(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side in the layout in which its graph was quicker; the other times of the row stay."""
    about = measured_by(monkeypatch)
    found = {f"torch_{way}_us": 5.0, f"leanconv_{way}_us": 4.0}
    asked: list[Any] = []
    monkeypatch.setattr(modes, "measure_step_way", lambda model, x, mode, *given: asked.append(given) or found)
    old = {"network": "resnet50", "mode": "fp32", "pass": "training", "torch_nchw_graph_us": 3.0, "taken": 7,
           "torch_nhwc_graph_us": 3.1, "leanconv_nchw_graph_us": 2.1, "leanconv_nhwc_graph_us": 2.0,
           "torch_eager_us": 9.0, "leanconv_eager_us": 9.0, "revision": "a" * 40,
           "date": "2026-01-02T00:00:00"}  # fmt: skip
    path = records.write(tmp_path, "modes", about, [old])
    for each in ("fused", way):
        modes.measure(tmp_path, None, ("resnet50", "unet"), ("fp32",), ("training",), None, False, False, each)
    (row,) = records.read(path)["rows"]
    assert asked == [(way, ("torch_nchw", "torch_nhwc"))]
    assert row == old | found | {f"{way}_revision": about["git_revision"], f"{way}_date": about["date"]}


@pytest.mark.parametrize("way", ["tuned", "fused", "compile", "backend"])
def test_a_way_alone_has_the_fields_of_a_whole_row(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []
    net = torch.nn.Conv2d(4, 6, 3).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 8).contiguous(memory_format=torch.channels_last)

    def graph(call: Any) -> tuple[Any, Any]:
        made.append((call.func, call.args[0].is_contiguous()))
        return SimpleNamespace(replay=lambda: None), call()

    for each in (networks, forward_passes):
        monkeypatch.setattr(each, "captured", graph)
    for each in (networks, forward_passes):
        monkeypatch.setattr(each, "in_turn", lambda calls: {who: 2.0 + i for i, who in enumerate(calls)})
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setattr(leanconv.torch, "fuse", lambda net, precision: torch.nn.Sequential(net, torch.nn.Identity()))
    enabled: list[Any] = []

    def enable(net: Any, precision: str, tune: Any = x) -> nullcontext[None]:
        enabled.append((precision, tune.is_contiguous(), len(made)))
        return nullcontext()

    monkeypatch.setattr(leanconv.torch, "enable", enable)
    row = forward_passes.measure_way(net, x, networks.MODES["fp32"], way, "NCHW", "NHWC")
    times = {f"torch_{way}_us": 2.0, f"leanconv_{way}_us": 3.0}
    if way == "fused":
        error = row.pop("leanconv_fused_error")
        assert error < 1e-6 and row == times | {"leanconv_nhwc_fused_us": 3.0, "leanconv_nchw_fused_us": 4.0}
        assert [(type(kind).__name__, first) for kind, first in made] == [
            ("Conv2d", True), ("Sequential", False), ("Sequential", True)
        ]  # fmt: skip
    elif way == "tuned":
        assert row.pop("leanconv_tuned_error") < 1e-6 and row == times and enabled == [("fp32", False, 1)]
        assert [first for _, first in made] == [True, False], "each in the layout in which it is quicker"
    else:
        assert row == times and len(made) == 2
        assert enabled == [("fp32", False, 1)] * (way == "compile"), "after PyTorch's graph, which runs without"


def test_a_row_counts_what_its_graph_runs(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of it others may be taken."""
    decision = Decision("", "it takes longer", 9.0 * CYCLES_PER_US, 8.0 * CYCLES_PER_US, "it")
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: decision)

    def captured(call: Any) -> tuple[Any, Any]:
        call()
        with monkeypatch.context() as capture:
            set_capturing(capture, True)
            return SimpleNamespace(replay=lambda: None), call()

    for each in (networks, forward_passes):
        monkeypatch.setattr(each, "captured", captured)
    monkeypatch.setattr(networks, "peak_bytes", lambda call: 1)
    for each in (networks, forward_passes):
        monkeypatch.setattr(each, "in_turn", lambda calls: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(
        forward_passes, "eager", lambda calls, patches: {who: float(len(call())) for who, call in calls.items()}
    )
    monkeypatch.setattr(leanconv.torch, "warm_up", lambda *given, **options: None)
    monkeypatch.setattr(leanconv.torch, "fuse", lambda net, precision: net)
    net, x = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(6, 4, 3)).eval(), torch.randn(2, 4, 9, 8)
    with patched_cpu(monkeypatch):
        for graph, taken in ((True, 0), (False, 2)):
            row = forward_passes.measure_forward(net, x, networks.MODES["fp32"], graph=graph)
            assert (row["taken"], row["left"]) == (taken, 2 - taken) and modes.is_right(row)
            if graph:
                alone = forward_passes.measure_way(net, x, networks.MODES["fp32"], "graph", row["quicker"], row["ours"])
                assert alone.items() <= row.items() and {"leanconv_graph_us", "taken", "leanconv_error"} <= {*alone}
    assert torch_on_device.launches


def test_replays_that_follow_one_another_are_metered_in_turns(
    torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch alone, fused, and with leanconv's layers; the second turn goes backward, after rests."""
    replayed, rests, meters = list[int](), list[float](), iter(((object(), "a"), (None, "no library")))
    monkeypatch.setattr(forward_passes, "open_meter", lambda: next(meters))
    monkeypatch.setattr(forward_passes.time, "sleep", rests.append)

    def captured(call: Any) -> tuple[Any, Any]:
        before, result = len(torch_on_device.launches), call()
        return SimpleNamespace(replay=len(torch_on_device.launches) - before), result

    def at_work(kernels: int, meter: Any, warm_s: float, run_s: float) -> Work:
        replayed.append(kernels)
        return Work(10.0 + len(replayed), *((500.0 + len(replayed), 1500.0) if meter else (None, None)))

    monkeypatch.setattr(forward_passes, "at_work", at_work)
    for each in (networks, forward_passes):
        monkeypatch.setattr(each, "captured", captured)
    monkeypatch.setattr(leanconv.torch, "warm_up", lambda *given, **options: None)
    monkeypatch.setattr(leanconv.torch, "fuse", lambda net, precision: lambda x: x[:, :, 2:-2, 2:-2])
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: Decision("it", "", 9.0, 99.0))
    net, x = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(6, 4, 3)).eval(), torch.randn(2, 4, 9, 8)
    with patched_cpu(monkeypatch):
        row = forward_passes.measure_way(net, x, networks.MODES["fp32"], "sustained", "NHWC", "NHWC")
        for who in "torch", "fused", "leanconv":
            assert (row[f"{who}_sustained_us"], row[f"{who}_watts"], row[f"{who}_mhz"]) == (13.5, 504, 1500)
        assert row["leanconv_sustained_error"] > 0.5, "of what only pretends to be fused"
        bare = forward_passes.measure_way(net, x, networks.MODES["fp32"], "sustained", "NHWC", "NHWC")
        assert "torch_sustained_us" in bare and not any(name.endswith(("watts", "mhz")) for name in bare)
    assert replayed == 2 * [0, 0, 2, 2, 0, 0] and len(rests) == 12


def test_both_sides_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    took = {"torch": 30000.0, "leanconv": 5000.0}

    def elapsed(call: Any, count: int) -> float:
        order.append(f"{call()} {count}")
        return took[call()]

    monkeypatch.setattr(timed, "elapsed_us", elapsed)
    calls = {name: lambda name=name: name for name in took}
    assert timed.in_turn(calls) == took
    assert order[2:6] == ["torch 1", "leanconv 3", "torch 1", "leanconv 3"] and len(order) == 2 + 2 * timed._ROUNDS


def test_what_python_launches_is_timed_in_many_rounds_each_with_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    active, order = list[str](), list[tuple[str, int, str]]()
    us = {"torch_nchw": 2000.0, "torch_nhwc": 3500.0, "leanconv_nhwc": 1000.0}
    monkeypatch.setattr(deciding, "active", active)
    monkeypatch.setattr(registration, "_libraries", {})
    monkeypatch.setattr(registration, "remove", active.remove)
    monkeypatch.setattr(registration, "add", active.append)

    def elapsed(call: Any, count: int) -> float:
        order.append((call(), count, "".join(active)))
        # the host is quick in the first calls, which tell how many are timed, and in the third round
        return us[call()] * (1 if len(order) < 4 or 9 < len(order) < 13 else 9)

    monkeypatch.setattr(timed, "elapsed_us", elapsed)
    calls = {name: lambda name=name: name for name in us}
    assert timed.eager(calls, {"leanconv_nhwc": "ours"}) == us and active == []
    turn = [("leanconv_nhwc", 6, "ours"), ("torch_nhwc", 2, ""), ("torch_nchw", 3, "")]
    assert order[3:9] == turn + turn[::-1], "each begins as often as it ends"
    assert len(order) == 3 + 3 * 111, "many rounds of what is short"
    order.clear()
    us = dict.fromkeys(us, 90000.0)
    timed.eager(calls, {"leanconv_nhwc": "ours"})
    assert len(order) == 3 + 3 * 9 and {count for _, count, _ in order[3:]} == {1}
    order.clear()
    timed.eager(calls, {"leanconv_nhwc": "ours"}, 60 * 6 * 90000.0)
    assert len(order) == 3 + 3 * 60


def test_both_layouts_are_compiled_before_and_the_last_one_that_is_enabled_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in 16 bits are compiled for what autocast makes of them."""
    compiled = list[Any]()

    def warm_up(net: Any, given: Any, tune: bool, progress: bool) -> None:
        assert not tune and not progress
        compiled.append((net.training, torch.is_autocast_enabled("cuda"), deciding.current()))

    monkeypatch.setattr(leanconv.torch, "warm_up", warm_up)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    x = torch.randn(2, 3, 8, 8)
    for train in True, False:
        nets = networks.in_layouts(
            torch.nn.Conv2d(3, 4, 3).train(train), x.contiguous(memory_format=torch.channels_last)
        )
        with ExitStack() as during:
            patches, waited = networks.enabled(during, nets, nets, networks.MODES["16-bit"])
            assert [*patches] == ["leanconv_nchw", "leanconv_nhwc"] and waited > 0
            assert deciding.current() is patches["leanconv_nhwc"]
            assert compiled == [(train, train, patch) for patch in patches.values()]
            calls = networks.with_ours(nets, patches)
            assert [*calls] == [*nets, *patches]
            assert all(calls[ours] is nets[ours.replace("leanconv", "torch")] for ours in patches)
        compiled.clear()
    assert deciding.current() is None


@pytest.mark.parametrize("name", ["unet", "vae_decoder", "edsr"])
def test_the_networks_of_our_own(name: str) -> None:
    """Their layers, and what comes out, without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    with FakeTensorMode():
        model = models.build(name).eval()
        y = model(torch.empty(networks.NETWORKS[name]))
        expected = {"unet": (8, 21, 256, 256), "vae_decoder": (4, 3, 256, 256), "edsr": (16, 3, 192, 192)}
        assert y.shape == expected[name]
        layers = sum(isinstance(each, kinds) for each in model.modules())
    assert layers == {"unet": 23, "vae_decoder": 31, "edsr": 35}[name]


def test_networks_run_in_both_layouts_and_the_quicker_counts() -> None:
    model, x = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.randn(2, 3, 5, 5)
    pairs = networks.in_layouts(model, x.contiguous(memory_format=torch.channels_last))
    assert list(pairs) == ["torch_nchw", "torch_nhwc"] and pairs["torch_nhwc"][0] is model
    assert all(given.is_contiguous() and copy.weight.is_contiguous() for copy, given in [pairs["torch_nchw"]])
    (first, given), (last, same) = pairs.values()
    assert torch.allclose(first(given), last(same), atol=1e-6)
    us = {"torch_nchw": 3.0, "torch_nhwc": 4.04, "leanconv_nhwc": 2.04, "leanconv_nchw": 2.5}
    found = networks.as_fields("graph", us)
    assert found == {f"{who}_graph_us": round(each, 1) for who, each in (us | {"torch": 3.0, "leanconv": 2.0}).items()}
    assert networks.quicker(found, "torch", "graph") == "torch_nchw"
    assert networks.quicker(found, "leanconv", "graph") == "leanconv_nhwc"
    assert networks.as_fields("compile", {"torch": 5.0, "leanconv": 2.0})["torch_compile_us"] == 5.0


def test_strict_rows_are_lines(tmp_path: Path) -> None:
    row = {"network": "net", "mode": "fp32", "pass": "forward", "batch": 4, "quicker": "NCHW", "taken": 3, "left": 1}
    for who, us in (("torch", 3000.0), ("leanconv", 1500.0)):
        row |= {f"{who}_graph_us": us, f"{who}_error": us * 1e-10, f"{who}_peak_bytes": int(us * 1000)}
    others = [row | {"mode": "tf32"}, {"network": "net", "mode": "fp32", "pass": "training", "torch_eager_us": 1.0}]
    records.write(tmp_path, "modes", made_up.ABOUT, [row, *others])
    page = made_up.filled(tmp_path, "strict modes")
    assert "NVIDIA X, 2026-11-22, revision abc000000000. A forward pass" in page
    line = "| net | 4 | 3.00 (NCHW) | 1.50 | 2.00 | 1.5e-07 / 3.0e-07 | 1.50 MB / 3.00 MB | 3 of 4 |"
    assert page.count("| net |") == 1 and line in page
