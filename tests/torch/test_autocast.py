"""torch.nn.functional under autocast while `enable` lasts: decided before PyTorch's dispatcher, casts that are kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.torch import decided, packed, patch, switches  # noqa: E402
from tests.torch.test_patched_functions import LAYERS, no_kernel  # noqa: E402, F401
from tests.torch.versions import since  # noqa: E402

nn, F = torch.nn, torch.nn.functional
#: a layer that is small, and whose filters can be packed
PACKED = (16, 16, 3)
#: PyTorch's own
FUNCTIONS = {name: getattr(F, name) for name in ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")}


def cast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.float16, enabled=enabled)


def by_the_dispatcher(layer: Any, x: Any) -> Any:
    """What a layer computes by way of PyTorch's dispatcher under autocast: the bits that there must be."""
    with pytest.MonkeyPatch.context() as changed, leanconv.torch.enable(), cast():
        for name, function in FUNCTIONS.items():
            changed.setattr(F, name, function)
        return layer(x)


def equal(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype == torch.float16 and one.stride() == other.stride()
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("taken", [True, False])
def test_bits_are_those_of_the_dispatchers_way(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, name: str, taken: bool
) -> None:
    layer, shape = LAYERS[name]
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if taken else 1e-6)
    x = torch.randn(shape)
    if name == "conv2d":
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = by_the_dispatcher(layer, x)
        with leanconv.torch.enable(layer) as enabled:
            for given in x, x, x, x.half():
                with cast():
                    equal(layer(given), expected)
    assert sum(line.calls for line in enabled.report().lines) == 4
    for line in enabled.report().lines:
        assert (line.runs != "PyTorch") is taken and "float16" in line.problem


@since("2.13", "autocast keeps what it has cast without gradients")
@pytest.mark.usefixtures("no_kernel")
def test_the_dispatcher_is_not_asked(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable(layer) as enabled, cast():
        with torch.no_grad():
            for _ in range(4):
                assert layer(x).dtype == torch.float16
        monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
        enabled.choose_anew()
        with torch.inference_mode():
            assert layer(x).is_inference()
        layer(x).sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.bias.grad.abs().sum() > 0
    assert [line.calls for line in enabled.report().lines[:2]] == [4, 2]


def test_gradients_are_recorded(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for share in 1e12, 1e-6:
        monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32, share=share: share)
        layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
        wanted = [x, layer.weight, layer.bias]
        with leanconv.torch.enable(layer) as enabled:
            expected = torch.autograd.grad(by_the_dispatcher(layer, x).float().sum(), wanted)
            for _ in range(3):
                with cast():
                    y = layer(x)
                for one, other in zip(torch.autograd.grad(y.float().sum(), wanted), expected, strict=True):
                    assert torch.equal(one, other)
        assert {line.layer for line in enabled.report().lines} == {"Conv2d"}


def test_autocast_that_is_off_or_of_another_type(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable(layer):
        with cast(), cast(False):
            assert layer(x).dtype == torch.float32
        with pytest.MonkeyPatch.context() as changed, cast():
            changed.setattr(switches, "_KIND", "cuda")
            assert layer(x).dtype == torch.float32, "autocast of other devices"
        with cast():
            half = layer(x)
            assert layer.double()(x.double()).dtype == torch.float64, "autocast leaves float64"
            equal(layer.float()(x), half)
        monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with cast():
            equal(layer(x), half)


def test_layers_are_selected_by_name_without_gradients(device: HostDevice) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    for given in {"include": "0"}, {"exclude": "1"}:
        with cast(), leanconv.torch.enable(model, **given) as enabled:
            model(torch.randn(2, 4, 9, 8))
        assert [(line.layer, line.runs != "PyTorch") for line in enabled.report().lines] == [("0", True), ("1", False)]


class TestKept:
    """Casts, and what is packed of them."""

    @pytest.fixture(params=[False, True], ids=["cast", "packed"])
    def packs(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
        choose = bind.choose

        def packing(problem: Any, target: Any, algorithm: str, limit: int | None, kept: str) -> Any:
            named = "native_gemm_nchw" if request.param and problem.op == "fprop" else "implicit_gemm"
            return choose(problem, target, named, limit, kept)

        monkeypatch.setattr(bind, "choose", packing)
        return bool(request.param)

    @pytest.fixture
    def layer(self, device: HostDevice, packs: bool) -> Any:
        return nn.Conv2d(*PACKED).eval()

    @pytest.fixture
    def x(self) -> Any:
        return torch.randn(2, 16, 6, 8)

    def test_from_the_second_call_on(self, layer: Any, x: Any, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        own = 2 * (layer.weight.numel() + layer.bias.numel())
        lowered, casts = decided.lowered, []
        monkeypatch.setattr(decided, "lowered", lambda each, dtype: casts.append(each) or lowered(each, dtype))
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            kept = []
            for _ in range(4):
                with cast():
                    layer(x)
                kept.append(enabled.report().packed_bytes)
            assert kept[0] == 0 and kept[1] == kept[2] == kept[3]
            assert kept[1] > own if packs else kept[1] == own
            assert len(casts) == 2, "filters and bias, in the first call alone"
            with cast():
                equal(layer(x[:1]), layer(x)[:1])
            assert len(casts) == 2, "another batch reads the same"

    @pytest.mark.parametrize("autocast", [True, False])
    @pytest.mark.parametrize("name", ["weight", "bias"])
    def test_new_memory_at_an_address_of_before(self, layer: Any, x: Any, name: str, autocast: bool) -> None:
        """A parameter that gets other memory twice may find its first address again, uncounted."""
        parameter, kind = getattr(layer, name), torch.float16 if autocast else torch.float32
        with leanconv.torch.enable(), torch.no_grad(), cast(autocast):
            for _ in range(20):
                for _ in range(3):
                    layer(x)
                for _ in range(2):
                    parameter.data = torch.randn(parameter.shape)
                y = layer(x)
                with cast(False):
                    expected = FUNCTIONS["conv2d"](*(each.to(kind).float() for each in (x, layer.weight, layer.bias)))
                torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=0.2)

    @pytest.mark.parametrize("change", ["load", "weight", "bias", "data", "new bias"])
    def test_changes_are_followed(self, layer: Any, x: Any, change: str) -> None:
        other = nn.Conv2d(*PACKED)
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            with cast():
                for _ in range(3):
                    layer(x)
                if change == "load":
                    layer.load_state_dict(other.state_dict())
                elif change == "data":
                    layer.weight.data = other.weight.data.clone()
                elif change == "new bias":
                    at, layer.bias = layer.bias.data, None
                    gc.collect()
                    layer.bias = nn.Parameter(at.copy_(other.bias))  # in the same memory
                else:
                    getattr(layer, change).add_(1)
            expected = by_the_dispatcher(layer, x)
            for _ in range(4):
                with cast():
                    equal(layer(x), expected)
            assert enabled.report().packed_bytes > 0

    @pytest.mark.parametrize("trained", ["weight", "bias"])
    def test_steps_that_pytorch_does_not_count_are_followed(self, layer: Any, x: Any, trained: str) -> None:
        """Those of fused optimisers."""
        parameter = getattr(layer, trained)
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                with cast():
                    layer(x)
            assert enabled.report().packed_bytes > 0
            parameter.grad, before = torch.ones_like(parameter), parameter.detach().clone()
            torch.optim.SGD([parameter], lr=1.0, fused=True).step()
            assert not torch.equal(parameter, before)
            expected = by_the_dispatcher(layer, x)
            for _ in range(4):
                with cast():
                    equal(layer(x), expected)

    def test_training_drops_them(self, layer: Any, x: Any) -> None:
        """Whether autocast is on then or not: some optimisers change parameters unseen."""
        with leanconv.torch.enable():
            for trained, read in (True, True), (False, True), (True, False):
                with torch.no_grad(), cast(read):
                    for _ in range(3):
                        layer(x)
                with cast(trained):
                    loss = layer(x).float().sum()
                loss.backward()
                layer.weight.data.add_(1)
                with torch.no_grad(), cast(read):
                    changed = nn.Conv2d(*PACKED)
                    changed.load_state_dict(layer.state_dict())
                    assert torch.equal(layer(x), changed(x)) and torch.equal(layer(x), changed(x))

    def test_refresh(self, layer: Any, x: Any) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            with cast():
                for _ in range(3):
                    layer(x)
            layer.bias.data.add_(1)
            enabled.refresh()
            assert enabled.report().packed_bytes == 0
            expected = by_the_dispatcher(layer, x)
            for _ in range(3):
                with cast():
                    equal(layer(x), expected)

    def test_freed_with_the_parameter(self, layer: Any, x: Any) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            with cast():
                for _ in range(3):
                    layer(x)
            (kept,) = enabled.layers._packed.values()
            held = weakref.ref(kept[1])
            del kept
            layer.weight = nn.Parameter(layer.weight.clone())
            gc.collect()
            assert enabled.report().packed_bytes == 0 and held() is None

    def test_within_a_bound(self, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = by_the_dispatcher(layer, x).detach()

        def kept() -> int:
            with torch.no_grad(), leanconv.torch.enable() as enabled:
                for _ in range(3):
                    with cast():
                        equal(layer(x), expected)
                assert sum(line.calls for line in enabled.report().lines) == 3
                return enabled.report().packed_bytes

        needed = kept()
        monkeypatch.setattr(decided, "MOST_PACKED", needed)
        assert kept() == needed
        monkeypatch.setattr(decided, "MOST_PACKED", needed - 1)
        assert kept() == 0

    def test_a_graph_casts_what_it_finds(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled, cast():
            set_capturing(monkeypatch, True)
            for _ in range(3):
                layer(x)
            assert enabled.report().packed_bytes == 0
            set_capturing(monkeypatch, False)
            for _ in range(3):
                layer(x)
            assert enabled.report().packed_bytes > 0
            read = device.launches[-1][1]["w"]
            set_capturing(monkeypatch, True)
            layer(x)
            assert device.launches[-1][1]["w"] != read

    def test_what_a_graph_casts_is_not_kept(self, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has no values before the graph is replayed."""
        made = packed.CastFilters._make

        def make(*given: Any) -> Any:
            assert not decided.capturing()
            return made(*given)

        monkeypatch.setattr(packed.CastFilters, "_make", make)
        with torch.no_grad(), leanconv.torch.enable(), cast():
            for _ in range(3):
                layer(x)
            layer.weight.add_(1)
            set_capturing(monkeypatch, True)
            for _ in range(3):
                layer(x[:1])  # another layer, of the same filters
            set_capturing(monkeypatch, False)
            for _ in range(3):
                equal(layer(x[:1]), by_the_dispatcher(layer, x[:1]))

    def test_another_stream_waits(self, device: HostDevice, layer: Any, x: Any) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled, cast():
            for _ in range(3):
                layer(x)
            waited, read = len(device.waited), device.launches[-1][1]["w"]
            made, device.stream = device.stream, 0x77
            layer(x)
            assert device.waited[waited:] == [made] and device.launches[-1][1]["w"] == read
            own = [each for stream, each in device.used if stream == 0x77]
            assert {torch.float16} <= {each.dtype for each in own}
            layer(x)
            assert len(device.waited) == waited + 1
            device.captures.add(made)  # which nobody can wait for
            device.stream = 0x78
            expected = layer(x)
            device.captures.clear()
            equal(layer(x), expected)
            assert enabled.report().packed_bytes > 0


def test_what_is_left_is_cast_on_cuda() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "AutocastCUDA")
