"""Promises of leanconv.torch that hold in calls after the first: keys of ready calls, refusals, limits, failures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv  # noqa: E402
import leanconv.torch  # noqa: E402
from leanconv.call import bind, lookup  # noqa: E402
from leanconv.runtime.compile import CompileError  # noqa: E402

nn = torch.nn


def grads(layer: Any, x: Any, form: Any = torch.contiguous_format) -> list[Any]:
    """Of the input and the filters, by a gradient of the result in a memory order."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(8))
    y.backward(grad.contiguous(memory_format=form))
    return [x.grad, layer.weight.grad]


def test_a_gradient_in_another_memory_order_is_another_call(device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 8, 3), torch.randn(2, 4, 9, 9)
    expected = grads(layer, x)
    with leanconv.torch.enable() as taken:
        for form in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            for mine, theirs in zip(grads(layer, x, form), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert len(taken.report().taken) == 3


@pytest.mark.parametrize("on_device", [False, True])
def test_batch_invariant_layers_have_gradients_of_gradients(on_device: bool, request: Any) -> None:
    """Those of the filters too, which are sums over the images."""
    if on_device:
        request.getfixturevalue("torch_on_device")
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(3, 4, 3, 3, requires_grad=True)

    def slopes(conv: Any) -> Any:
        (slope,) = torch.autograd.grad(conv(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, w))

    mine = slopes(lambda x, w: leanconv.torch.conv2d(x, w, batch_invariant=True))
    for one, other in zip(mine, slopes(nn.functional.conv2d), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


def test_a_kernel_that_does_not_compile_does_not_end_training(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Conv2d(4, 8, 3), torch.randn(2, 4, 9, 9)
    expected, executable = grads(layer, x), device.executable

    def fail(plan: Any, roles: Any) -> Any:
        if "dw" in str(plan.launches):
            raise CompileError("too many registers", "-o", "code")
        return executable(plan, roles)

    monkeypatch.setattr(device, "executable", fail)
    with leanconv.torch.enable() as taken:
        with pytest.warns(RuntimeWarning, match="leaves .* to PyTorch: too many registers"):
            first = grads(layer, x)
        for got in (first, grads(layer, x)):
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    report = taken.report()
    assert len(report.taken) == 2 and "too many registers" in report.left[0].why


@pytest.mark.parametrize("contiguous", [True, False], ids=["read in place", "copied"])
def test_packed_weights_that_require_a_gradient_are_refused(torch_on_device: HostDevice, contiguous: bool) -> None:
    """In every call: a copy of the filters has lost what refuses."""
    x, w = torch.randn(2, 16, 9, 9), torch.randn(32, 16, 3, 6)[..., ::2]
    w = (w.contiguous() if contiguous else w).detach().requires_grad_()
    packed = leanconv.prepare_weights(w)
    with torch.no_grad():
        expected = leanconv.conv2d(x, packed)
    for _ in range(2):
        with says(ValueError, "requires a gradient"):
            leanconv.conv2d(x, packed)
        with torch.no_grad():
            assert torch.equal(leanconv.conv2d(x, packed), expected)


@pytest.mark.parametrize("contiguous", [True, False], ids=["read in place", "copied"])
def test_packed_weights_follow_the_steps_of_optimisers(torch_on_device: HostDevice, contiguous: bool) -> None:
    """PyTorch counts no change of a fused one."""
    x, w = torch.randn(2, 16, 9, 9), torch.randn(32, 16, 3, 6)[..., ::2]
    w = torch.nn.Parameter(w.contiguous() if contiguous else w)
    packed, other = leanconv.prepare_weights(w.detach()), leanconv.prepare_weights(torch.randn(32, 16, 3, 3))
    for fused in (True, False):
        for _ in range(2):
            leanconv.conv2d(x, packed, algorithm="winograd1d"), leanconv.conv2d(x, other, algorithm="winograd1d")
        assert packed.nbytes and other.nbytes
        kept, w.grad = other.nbytes, torch.ones_like(w)
        torch.optim.SGD([w], lr=1.0, fused=fused).step()
        for _ in range(2):
            result = leanconv.conv2d(x, packed, algorithm="winograd1d")
            torch.testing.assert_close(result, torch.nn.functional.conv2d(x, w.detach()), rtol=1e-4, atol=1e-4)
        assert other.nbytes == kept


def test_ready_calls_are_dropped_and_follow_the_limit(
    torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3)

    def bound() -> int:
        before = torch_on_device.executables
        leanconv.torch.conv2d(x, w)
        return torch_on_device.executables - before

    assert [bound(), bound()] == [1, 0]
    lookup.forget()
    assert [bound(), bound()] == [1, 0]
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "1MiB")
    assert [bound(), bound()] == [1, 0]


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, (None, None, 32 << 20)), ("1MiB", (1 << 20,) * 3), ("0", (0,) * 3)]
)
def test_the_limit_holds_for_patched_gradients(
    limit: str | None, expected: Any, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen under it, and bound under it."""
    chosen: dict[str, set[Any]] = {}
    taken: dict[str, Any] = {}
    load, ready = bind.load, bind.bind

    def spy_load(problem: Any, index: Any, algorithm: Any, limit: Any) -> Any:
        loaded = load(problem, index, algorithm, limit)
        chosen.setdefault(problem.op, set()).add(limit)
        assert limit is None or loaded.plan.workspace_bytes <= limit
        return loaded

    def spy_bind(resolved: Any) -> Any:
        taken[resolved.problem.op] = resolved.workspace_limit
        return ready(resolved)

    monkeypatch.setattr(bind, "load", spy_load)
    monkeypatch.setattr(bind, "bind", spy_bind)
    if limit is None:
        monkeypatch.delenv("LEANCONV_WORKSPACE_LIMIT", raising=False)
    else:
        monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", limit)
    with leanconv.torch.enable():
        grads(nn.Conv2d(16, 32, 3), torch.randn(2, 16, 9, 9))
    assert [chosen[op] for op in ("fprop", "dgrad", "wgrad")] == [{each} for each in expected]
    assert [taken[op] for op in ("fprop", "dgrad", "wgrad")] == list(expected)
