"""torch.nn.Conv1d and Conv2d while `enable` lasts: what is not as PyTorch makes it goes PyTorch's way."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import torch.nn.utils.prune as prune  # noqa: E402

import leanconv.torch  # noqa: E402
from leanconv.torch import functions, module_call  # noqa: E402
from tests.torch.test_patched_functions import close  # noqa: E402

nn, F = torch.nn, torch.nn.functional
ORIGINAL = nn.Module.__call__


class Doubled(nn.Conv2d):
    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
        return 2 * super()._conv_forward(input, weight, bias)


class Twice(nn.Module):
    def __call__(self, *given: Any) -> Any:
        return 2 * super().__call__(*given)


class TwiceLayer(nn.Conv2d, Twice):
    """What stands behind Conv2d is called too."""


def of_its_own(layer: Any) -> Any:
    layer._conv_forward = lambda input, weight, bias: F.conv2d(input, weight, bias) + 1
    return layer


def pruned(layer: Any) -> Any:
    prune.random_unstructured(layer, "weight", amount=0.5)
    return layer


def replica(layer: Any) -> Any:
    """As DataParallel makes one: parameters are attributes."""
    copied = layer._replicate_for_data_parallel()
    copied.weight, copied.bias = layer.weight.detach() + 1, None
    return copied


def attribute(layer: Any) -> Any:
    layer.__dict__["weight"] = layer.weight.detach() + 1
    return layer


LAYERS: dict[str, Callable[[], Any]] = {
    "conv2d": lambda: nn.Conv2d(4, 6, 3, 2, 1, 2, 2),
    "conv1d": lambda: nn.Conv1d(4, 6, 3),
    "without a bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "padding in words": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    "a class of its own": lambda: Doubled(4, 6, 3),
    "a call of its own": lambda: TwiceLayer(4, 6, 3),
    "a function of its own": lambda: of_its_own(nn.Conv2d(4, 6, 3)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Conv2d(4, 6, 3)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
    "pruned": lambda: pruned(nn.Conv2d(4, 6, 3)),
    "a replica": lambda: replica(nn.Conv2d(4, 6, 3)),
    "an attribute before the parameter": lambda: attribute(nn.Conv2d(4, 6, 3)),
    "weight_norm of signals": lambda: nn.utils.weight_norm(nn.Conv1d(4, 6, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_module_computes_what_it_did(name: str, recorded: bool, device: HostDevice) -> None:
    layer = LAYERS[name]()
    x = torch.randn((2, 4, 9) if isinstance(layer, nn.Conv1d) else (2, 4, 9, 8))
    expected = layer(x).detach()
    with leanconv.torch.enable() as patch, torch.set_grad_enabled(recorded):
        for _ in range(3):
            close(layer(x), expected)
        assert patch.report().lines
        changed = {each: value.detach() * 2 for each, value in layer.named_parameters()}
    if changed and name != "an attribute before the parameter":
        expected = torch.func.functional_call(layer, changed, x).detach()
        with leanconv.torch.enable(), torch.set_grad_enabled(recorded):
            close(torch.func.functional_call(layer, changed, x), expected)


def test_a_module_asks_what_its_function_asks() -> None:
    """Whether a call is as the one before: the same words twice, since to call for them costs a microsecond."""

    def words(module: Any) -> str:
        source = inspect.getsource(module)
        asked = source[source.index("            layer = ") : source.index("        if known:")]
        return re.sub(r"\n? +#.*", "", asked)

    of_functions = words(functions).replace("(ignored or not function_modes())", "not function_modes()")
    assert words(module_call).replace("functions.latest", "latest") == of_functions


def test_a_layer_is_copied_and_pickled(device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = layer(x).detach()
    with leanconv.torch.enable():
        for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            close(each(x), expected)


def test_what_somebody_replaces_meanwhile_is_called(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3).requires_grad_(False), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable():
        layer(x)
        with monkeypatch.context() as patched:
            patched.setattr(nn.Conv2d, "_conv_forward", lambda self, input, weight, bias: "theirs")
            assert layer(x) == "theirs"
        with monkeypatch.context() as patched:
            patched.setattr(F, "conv2d", lambda *given: "function")
            assert layer(x) == "function"
        with monkeypatch.context() as patched:
            patched.setattr(nn.Conv2d, "forward", lambda self, input: "forward")
            assert layer(x) == "forward"
        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "__call__", lambda self, *given: "call")
            assert layer(x) == "call"
        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "_call_impl", lambda self, *given: "inner call")
            assert layer(x) == "inner call"
            leanconv.torch.disable()
            leanconv.torch.enable()
            assert nn.Conv2d.__call__ is ORIGINAL, "somebody looks at each call"
        leanconv.torch.disable()
        leanconv.torch.enable()
        layer.forward = lambda input, times=1: times * "its own"
        assert layer(x) == "its own" and layer(x, times=2) == layer(x, 2) == "its ownits own"
        del layer.forward
        layer._compiled_call_impl = lambda input: "compiled"
        assert layer(x) == "compiled"
        del layer._compiled_call_impl
        close(layer(input=x), layer(x))
        for wrong in ((), (x, x)):
            with pytest.raises(TypeError, match="forward"):
                layer(*wrong)
        nn.Conv2d.__call__ = theirs = lambda self, input: "call"  # type: ignore[method-assign]
        leanconv.torch.disable()
        assert layer(x) == "call", "what is not ours stays"
        with leanconv.torch.enable():
            assert nn.Conv2d.__call__ is theirs
        del nn.Conv2d.__call__


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "before": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "after": lambda layer, hook: layer.register_forward_hook(hook),
    "before, all": lambda layer, hook: nn.modules.module.register_module_forward_pre_hook(hook),
    "after, all": lambda layer, hook: nn.modules.module.register_module_forward_hook(hook),
    "before backward": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    "after backward": lambda layer, hook: layer.register_full_backward_hook(hook),
    "before backward, all": lambda layer, hook: nn.modules.module.register_module_full_backward_pre_hook(hook),
    "after backward, all": lambda layer, hook: nn.modules.module.register_module_full_backward_hook(hook),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_called(name: str, device: HostDevice) -> None:
    layer, x, called = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True), []
    with leanconv.torch.enable():
        for _ in range(3):
            layer(x).sum().backward()
        handle = HOOKS[name](layer, lambda *given: called.append(given))
        try:
            layer(x).sum().backward()
        finally:
            handle.remove()
        assert len(called) == 1
        layer(x).sum().backward()
        assert len(called) == 1


def test_the_call_is_pytorchs_before_and_after(device: HostDevice) -> None:
    assert nn.Conv2d.__call__ is ORIGINAL
    with leanconv.torch.enable():
        with leanconv.torch.enable():
            assert nn.Conv2d.__call__ is not ORIGINAL
        assert nn.Conv2d.__call__ is not ORIGINAL
        assert inspect.signature(nn.Conv2d.__call__) == inspect.signature(ORIGINAL)
    assert nn.Conv2d.__call__ is ORIGINAL and "__call__" not in vars(nn.Conv2d)


def test_parameters_are_not_looked_up_by_name(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable(), monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__getattr__", lambda self, name: pytest.fail(f"{name} was looked up"))
        layer(x)


def test_torchscript_reads_pytorchs_source(device: HostDevice) -> None:
    layer, x = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 1)), torch.randn(2, 4, 9, 8)
    expected = layer(x).detach()
    with leanconv.torch.enable():
        for _ in range(3):
            layer(x)
        close(torch.jit.script(layer)(x), expected)
        traced = torch.jit.trace(layer, x)
        close(traced(x), expected)
        assert "Conv2d" in str(traced.inlined_graph), "its nodes name the modules that they are of"
        followed = torch.fx.symbolic_trace(layer)
        close(followed(x), expected)
        assert [node.op for node in followed.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


@pytest.mark.parametrize("kind", [nn.Conv2d, Doubled])
def test_torch_compile_follows_pytorchs(kind: Any, device: HostDevice) -> None:
    layer, x = kind(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = layer(x).detach()
    with leanconv.torch.enable(), torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        close(compiled(x), expected)
