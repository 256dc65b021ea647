"""Filters that stay packed while `enable` lasts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.runtime.compile import CompileError  # noqa: E402
from leanconv.torch import decided, patch  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from tests.torch.test_patched_functions import close, pytorch  # noqa: E402

nn, F = torch.nn, torch.nn.functional
#: a layer whose algorithm packs its filters
PACKED = (32, 64, 3)


class TestPacked:
    """Filters that are packed once."""

    @pytest.fixture(autouse=True)
    def packing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is small runs on kernels that pack nothing."""
        choose = bind.choose

        def packs(problem: Any, target: Any, algorithm: str, limit: int | None, kept: str) -> Any:
            return choose(problem, target, "winograd1d" if problem.op == "fprop" else "implicit_gemm", limit, kept)

        monkeypatch.setattr(bind, "choose", packs)

    @pytest.fixture
    def layer(self, device: HostDevice) -> Any:
        return nn.Conv2d(*PACKED).eval()

    @pytest.fixture
    def x(self) -> Any:
        return torch.randn(2, 32, 10, 9)

    def test_from_the_second_call_on(self, device: HostDevice, layer: Any, x: Any) -> None:
        with torch.no_grad():
            expected = layer(x)
            with leanconv.torch.enable() as enabled:
                counts = []
                for _ in range(4):
                    close(layer(x), expected)
                    counts.append(device.prepared)
                assert counts == [1, 2, 2, 2], "the second call keeps what it has packed"
                assert enabled.report().packed_bytes > 0
                assert f"{enabled.report().packed_bytes} bytes of packed filters are kept" in str(enabled.report())
                close(layer(x[:1]), expected[:1])
                close(layer(x[:1]), expected[:1])
                assert device.prepared == 2, "another batch reads the same, if its kernel is the same"

    def test_packed_calls_give_the_bits_of_calls_that_pack(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So they are not asked for what is quickest where filters stay packed."""
        choose, asked = bind.choose, list[str]()

        def asks(*given: Any) -> Any:
            asked.append(given[-1])
            return choose(*given)

        monkeypatch.setattr(bind, "choose", asks)
        with torch.no_grad(), leanconv.torch.enable():
            results = [layer(x) for _ in range(3)]
        assert set(asked) == {"", "same bits"}
        assert all(torch.equal(each, results[0]) for each in results)

    def test_what_does_not_compile_for_packed_filters_packs_in_each_call(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        choose = bind.choose

        def fails(*given: Any) -> Any:
            if given[-1]:
                raise CompileError("too many registers", "", "")
            return choose(*given)

        monkeypatch.setattr(bind, "choose", fails)
        with torch.no_grad():
            expected = layer(x)
            with leanconv.torch.enable() as enabled, pytest.warns(RuntimeWarning, match="packs filters of .* in each"):
                for _ in range(3):
                    close(layer(x), expected)
                assert device.prepared == 3 and enabled.report().packed_bytes == 0

    @pytest.mark.parametrize("change", ["load", "step", "data"])
    def test_changes_are_followed(self, device: HostDevice, layer: Any, x: Any, change: str) -> None:
        other = nn.Conv2d(*PACKED)
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                layer(x)
            kept, count = enabled.report().packed_bytes, device.prepared
            if change == "load":
                layer.load_state_dict(other.state_dict())
            elif change == "step":
                layer.weight.add_(1)
            else:
                layer.weight.data = other.weight.data.clone()
            expected = pytorch(x, layer.weight, layer.bias)
            for _ in range(4):
                close(layer(x), expected)
            # other memory is decided anew by PyTorch's dispatcher first
            assert device.prepared == count + (3 if change == "data" else 2) and enabled.report().packed_bytes == kept

    def test_steps_that_pytorch_does_not_count_are_followed(self, device: HostDevice, layer: Any, x: Any) -> None:
        """Those of fused optimisers. What is kept of other layers stays."""
        other, steps = nn.Conv2d(*PACKED).eval(), torch.optim.Adam(layer.parameters(), lr=0.1, fused=True)
        layer(x).square().mean().backward()
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                layer(x), other(x)
            before, kept = layer.weight.detach().clone(), enabled.report().packed_bytes
            count = device.prepared
            steps.step()
            assert not torch.equal(before, layer.weight)
            assert 0 < enabled.report().packed_bytes < kept
            for _ in range(3):
                other(x)
            assert device.prepared == count
            for _ in range(4):
                close(layer(x), pytorch(x, layer.weight, layer.bias))
            assert enabled.report().packed_bytes == kept

    def test_training_drops_them(self, device: HostDevice, layer: Any, x: Any) -> None:
        """Some optimisers change parameters through ``.data``, which PyTorch does not count."""
        with leanconv.torch.enable():
            with torch.no_grad():
                for _ in range(3):
                    layer(x)
            layer(x).sum().backward()
            layer.weight.data.add_(1)
            with torch.no_grad():
                for _ in range(3):
                    close(layer(x), pytorch(x, layer.weight, layer.bias))

    def test_refresh(self, device: HostDevice, layer: Any, x: Any) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                layer(x)
            layer.weight.data.add_(1)
            enabled.refresh()
            assert enabled.report().packed_bytes == 0
            for _ in range(3):
                close(layer(x), pytorch(x, layer.weight, layer.bias))

    def test_freed_with_the_parameter(self, device: HostDevice, layer: Any, x: Any) -> None:
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                layer(x)
            (kept,) = enabled.layers._packed.values()
            held = weakref.ref(kept[1])
            del kept
            layer.weight = nn.Parameter(layer.weight.clone())
            gc.collect()
            assert enabled.report().packed_bytes == 0 and held() is None

    def test_within_a_bound(self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def kept() -> int:
            with torch.no_grad(), leanconv.torch.enable() as enabled:
                for _ in range(3):
                    layer(x)
                return enabled.report().packed_bytes

        needed = kept()
        monkeypatch.setattr(decided, "MOST_PACKED", needed)
        assert kept() == needed
        monkeypatch.setattr(decided, "MOST_PACKED", needed - 1)
        assert kept() == 0

    def test_the_bound_is_that_of_all_layers(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = nn.Sequential(layer, nn.Conv2d(64, 32, 1), nn.Conv2d(*PACKED))
        with torch.no_grad():
            with leanconv.torch.enable() as enabled:
                for _ in range(3):
                    layer(x)
                needed = enabled.report().packed_bytes
            monkeypatch.setattr(decided, "MOST_PACKED", needed)
            with leanconv.torch.enable() as enabled:
                for _ in range(3):
                    model(x)
                assert enabled.report().packed_bytes == needed

    def test_filters_of_one_call_pack_nothing(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decided, "PreparedCall", None)
        with torch.no_grad(), leanconv.torch.enable() as enabled:
            for _ in range(3):
                close(F.conv2d(x, layer.weight * 2), pytorch(x, layer.weight * 2))
        assert not enabled.layers._packed

    def test_a_graph_packs_what_it_finds(
        self, device: HostDevice, layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torch.no_grad(), leanconv.torch.enable():
            for _ in range(3):
                layer(x)
            count = device.prepared
            set_capturing(monkeypatch, True)
            layer(x)
            assert device.prepared == count + 1

    def test_signals_and_transposed_layers(self, device: HostDevice) -> None:
        for layer, shape in (
            (nn.Conv1d(64, 64, 3), (2, 64, 40)),
            (nn.ConvTranspose2d(64, 32, 2, stride=2), (2, 64, 9, 8)),
            (nn.ConvTranspose1d(64, 64, 3), (2, 64, 40)),
        ):
            x = torch.randn(shape)
            with torch.no_grad():
                expected = layer(x)
                with leanconv.torch.enable() as enabled:
                    for _ in range(3):
                        close(layer(x), expected)
                    assert enabled.report().packed_bytes > 0, layer

    def test_a_left_layer_stays_left_after_an_evaluation(
        self, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What an evaluation keeps of its filters is dropped by the next step, which PyTorch computes as before."""
        c, k, r = PACKED
        decide = patch.Patch.decide
        monkeypatch.setattr(
            patch.Patch, "decide", lambda *given: decide(*given)._replace(ours=0.0, pytorch=60.0 * CYCLES_PER_US)
        )
        layer, x = nn.Conv2d(c, k, r), torch.randn(1, c, 6, 6)
        with leanconv.torch.enable(layer) as patched:
            for _ in range(2):
                layer(x).sum().backward()
                with torch.no_grad():
                    for _ in range(3):
                        layer(x)
                assert patched.report().packed_bytes > 0
                launched = len(device.launches)
                y = layer(x)
                assert type(y.grad_fn).__name__ != "RecordedBackward" and patched.report().packed_bytes == 0
                y.sum().backward()
                assert len(device.launches) == launched
            lines = patched.report().lines
        assert all(line.calls for line in lines) and {line.when for line in lines if line.runs != "PyTorch"} == {
            "forward"
        }
