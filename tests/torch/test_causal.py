"""Layers of videos that look back only: whole, in parts, with strides, and what they refuse.

Numbers are small integers, so that every order of sums has the same bits: a video in parts is the whole, exactly.
"""

from __future__ import annotations

import copy
import runpy
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

from leanconv.torch import CausalConv3d, causal, conv2d, conv3d  # noqa: E402

F = torch.nn.functional
FORMS = torch.contiguous_format, torch.channels_last_3d
#: kernel_size, stride, dilation, padding of rows and columns
LAYERS = {
    "3x3x3": (3, 1, 1, 1),
    "stride": ((3, 3, 3), (2, 2, 2), 1, (1, 0)),
    "stride as long as the filter": ((2, 1, 1), (2, 1, 1), 1, 0),
    "dilated": ((3, 1, 3), (1, 1, 1), (2, 1, 1), (0, 0, 2, 0)),
    "one frame": ((1, 3, 3), 1, 1, "same"),
}


def whole_numbers(*shape: int, form: Any = torch.contiguous_format, seed: int = 3) -> Any:
    made = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()
    return made.contiguous(memory_format=form) if len(shape) == 5 else made


def layer_of(name: str, **options: Any) -> Any:
    taps, stride, dilation, padding = LAYERS[name]
    layer = CausalConv3d(4, 6, taps, stride, padding, dilation, groups=2, **options)
    with torch.no_grad():
        layer.weight.copy_(whole_numbers(*layer.weight.shape, seed=5))
        layer.bias.copy_(whole_numbers(6))
    return layer


def expected(layer: Any, x: Any) -> Any:
    """By PyTorch, of a padded copy."""
    back, _, top, bottom, left, right = layer.padding
    if layer.time_padding == "replicate":
        x = torch.cat([x[:, :, :1].expand(-1, -1, back, -1, -1), x], 2)
        back = 0
    x = F.pad(x, (left, right, top, bottom, back, 0))
    return F.conv3d(x, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("time_padding", ["zeros", "replicate"])
@pytest.mark.parametrize("name", LAYERS)
def test_parts_are_the_whole(torch_on_device: HostDevice, name: str, time_padding: Any, form: Any) -> None:
    layer, x = layer_of(name, time_padding=time_padding), whole_numbers(1, 4, 14, 5, 6, form=form)
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(y, expected(layer, x)) and y.is_contiguous(memory_format=form)
        layer.streaming = True
        for parts in (14,), (1, 4, 4, 4, 1), (1,) * 14, (2, 12), (3, 11):
            layer.reset()
            found = [layer(part) for part in x.split(parts, 2)]
            assert torch.equal(torch.cat(found, 2), y), parts
            assert all(each.shape[:2] == y.shape[:2] and each.shape[3:] == y.shape[3:] for each in found)
        layer.reset()
        assert torch.equal(torch.cat([layer(part[0]) for part in x.split((5, 9), 2)], 1), y[0]), "without a batch"


def test_no_frame_is_copied_that_need_not_be(torch_on_device: HostDevice) -> None:
    layer = layer_of("3x3x3", streaming=True)
    x = whole_numbers(1, 4, 20, 5, 6, form=torch.channels_last_3d)
    with torch.no_grad():
        y = layer(x[:, :, :4])
        assert torch_on_device.launches[-1][1]["x"] == x.data_ptr(), "zeros before the first frame are the kernel's"
        rest, before = x[:, :, 4:], len(torch_on_device.launches)
        y = torch.cat([y, layer(rest)], 2)
        edge, inner = (values for _, values in torch_on_device.launches[before:])
        assert inner["x"] == rest.data_ptr() != edge["x"] and inner["y"] - edge["y"] == 2 * 6 * 5 * 6 * 4
        assert torch.equal(y, expected(layer, x))
        frames = layer._frames
        layer(rest), layer(whole_numbers(1, 4, 1, 5, 6))
        assert layer._frames is frames, "the kept frames stay where a CUDA graph finds them"
    with torch.inference_mode():
        layer(rest)


def test_gradients_of_parts_are_those_of_the_whole_but_for_what_is_kept(torch_on_device: HostDevice) -> None:
    layer, x = layer_of("stride", time_padding="replicate"), whole_numbers(2, 4, 7, 5, 6).requires_grad_()
    y = layer(x)
    given = x, *layer.parameters()
    grads = torch.autograd.grad(y.square().sum(), given)
    for one, other in zip(grads, torch.autograd.grad(expected(layer, x).square().sum(), given), strict=True):
        assert torch.equal(one, other)
    layer.streaming = True
    parts = [layer(part) for part in x.split((3, 4), 2)]
    dx, *parameters = torch.autograd.grad(torch.cat(parts, 2).square().sum(), given)
    assert all(map(torch.equal, parameters, grads[1:])) and torch.equal(dx[:, :, 3:], grads[0][:, :, 3:])
    assert not torch.equal(dx, grads[0]), "what is kept is a constant"


@pytest.mark.parametrize("recorded", [False, True])
def test_long_parts_of_a_layer_without_a_bias(torch_on_device: HostDevice, recorded: bool) -> None:
    """Recorded or not, which is asked only of parts that could be computed without a copy."""
    layer = CausalConv3d(2, 2, (2, 1, 1), bias=False, streaming=True).requires_grad_(recorded)
    x = whole_numbers(1, 2, 12, 3, 3, form=torch.channels_last_3d)
    y = torch.cat([layer(part) for part in x.split(6, 2)], 2)
    assert y.requires_grad is recorded
    torch.testing.assert_close(y, F.conv3d(F.pad(x, (0, 0, 0, 0, 1, 0)), layer.weight))


@pytest.mark.parametrize("name", LAYERS)
def test_parts_may_be_empty(torch_on_device: HostDevice, name: str) -> None:
    """Before the first frame, between others, and without a batch."""
    layer, x = layer_of(name, time_padding="replicate"), whole_numbers(1, 4, 6, 5, 6)
    with torch.no_grad():
        y = layer(x)
        layer.streaming = True
        assert torch.equal(torch.cat([layer(part) for part in x.split((0, 3, 0, 3, 0), 2)], 2), y)
        assert layer(x[0, :, :0]).shape == (*y.shape[1:2], 0, *y.shape[3:])


def test_it_is_a_module_of_pytorch(torch_on_device: HostDevice) -> None:
    layer = layer_of("3x3x3", precision="ieee", device="cpu", dtype=torch.float64)
    assert "padding=(2, 0, 1, 1, 1, 1)" in repr(layer) and "precision='ieee'" in repr(layer)
    plain = torch.nn.Conv3d(4, 6, 3, groups=2)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    model, x = torch.nn.Sequential(layer_of("3x3x3"), torch.nn.ReLU()), whole_numbers(1, 4, 3, 5, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    layer, x = layer_of("3x3x3", streaming=True), whole_numbers(1, 4, 12, 5, 6)
    compiled, parts = torch.compile(layer, fullgraph=True, backend="aot_eager"), x.split(4, 2)
    with torch.no_grad():
        found = [compiled(part) for part in parts]
        assert torch.equal(torch.cat(found, 2), expected(layer, x))
    layer, x = layer_of("stride", streaming=True), whole_numbers(1, 4, 20, 5, 6, form=FORMS[1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        parts = [layer(part) for part in x.split((1, 1, 18), 2)]
    assert [part.shape[2] for part in parts] == [1, 0, 9] and {part.dtype for part in parts} == {torch.bfloat16}


@pytest.mark.parametrize("time_padding", ["zeros", "replicate"])
def test_symbolic_tracing_keeps_it_whole(torch_on_device: HostDevice, time_padding: Any) -> None:
    """As PyTorch's own modules. Alone it is the functions that it calls, for videos of any size."""
    layer, x = layer_of("stride", time_padding=time_padding, activation="relu"), whole_numbers(2, 4, 7, 5, 6)
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(layer, torch.nn.ReLU()))
    assert [(node.op, node.target) for node in traced.graph.nodes][1] == ("call_module", "0")
    alone = torch.fx.symbolic_trace(layer)
    assert conv3d in [node.target for node in alone.graph.nodes]
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(y, expected(layer, x).relu())
        for each in traced, alone:
            assert torch.equal(each(x), y) and torch.equal(each(x[0]), y[0])
        layer.streaming = True
        assert torch.equal(torch.cat([traced(part) for part in x.split((3, 4), 2)], 2), y)
    with says(ValueError, "torch.fx cannot trace a layer that streams by itself", "a module that it is part of"):
        torch.fx.symbolic_trace(layer)


def test_two_numbers_for_each_axis(torch_on_device: HostDevice) -> None:
    """What causal layers are made of, for everybody."""
    x, w = whole_numbers(1, 4, 3, 5, 6), whole_numbers(2, 4, 3, 2, 2, seed=4)
    assert torch.equal(conv3d(x, w, padding=[2, 0, 1, 0, 0, 1]), F.conv3d(F.pad(x, (0, 1, 1, 0, 2, 0)), w))
    x, w = x[:, :, 0].contiguous(), w[:, :, 0].contiguous()
    assert torch.equal(conv2d(x, w, padding=(1, 0, 2, 1)), F.conv2d(F.pad(x, (2, 1, 1, 0)), w))
    with says(ValueError, "padding=-1 is below 0"):
        conv2d(x, w, padding=(1, 0, -1, 1))


def test_mistakes_are_named(torch_on_device: HostDevice) -> None:
    with says(ValueError, "stride=3 is 3 along time, greater than the 2 frames", "kernel_size=2 and dilation=1"):
        CausalConv3d(1, 1, 2, stride=3)
    with says(ValueError, "padding=(1, 1, 1) has numbers for the depth", "(vertical, horizontal)"):
        CausalConv3d(1, 1, 3, padding=(1, 1, 1))
    with says(ValueError, "padding_mode='circular'", "time_padding"):
        CausalConv3d(1, 1, 3, padding_mode="circular")
    with says(ValueError, "time_padding='reflect' is not known; choose one of 'zeros', 'replicate'"):
        CausalConv3d(1, 1, 3, time_padding="reflect")  # type: ignore[arg-type]
    with says(ValueError, "padding='same' needs stride=1, got stride=(2, 2)"):
        CausalConv3d(1, 1, 3, stride=(1, 2, 2), padding="same")
    with says(TypeError, "streaming='yes' is not True or False"):
        CausalConv3d(1, 1, 3, streaming="yes")  # type: ignore[arg-type]
    layer = CausalConv3d(1, 1, 3, streaming=True)
    with says(ValueError, "input has 3 dimensions", "it must have 5, or 4 without a batch"):
        layer(torch.ones(1, 4, 4))
    with torch.no_grad():
        layer(torch.ones(1, 1, 2, 4, 4))
        for other in torch.ones(1, 1, 2, 5, 4), torch.ones(2, 1, 2, 4, 4), torch.ones(1, 1, 2, 4, 4).half():
            with says(ValueError, "the frames that are kept of the last call have shape (1, 1, 2, 4, 4)", "reset()"):
                layer(other)
        layer.reset()
        layer(torch.ones(2, 1, 2, 4, 4))
    assert causal.CausalConv3d._frames is None


@pytest.mark.parametrize("part", ["1", "4"])
def test_the_example_decodes_parts_as_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "decode_video.py"
    options = ["--latents", "5", "--size", "4", "--channels", "8", "--part", part]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    runpy.run_path(str(script), run_name="__main__")
    whole, parts, difference = capsys.readouterr().out.splitlines()
    assert "(1, 3, 10, 16, 16)" in whole and f"parts of {part}: (1, 3, 10, 16, 16)" in parts
    assert float(difference.split()[-1]) < 1e-5


@pytest.mark.parametrize("time_padding", ["zeros", "replicate"])
def test_what_is_no_video_is_refused_by_name(time_padding: Any) -> None:
    layer = CausalConv3d(1, 1, 3, time_padding=time_padding)
    for given in whole_numbers(1, 1, 3, 5, 5).numpy(), [1.0]:
        with says(TypeError, f"input is of type {type(given).__name__}", "tensors of PyTorch"):
            layer(given)
    with says(ValueError, "input has 3 dimensions"):
        layer(torch.ones(3, 5, 5))
    for shape in (1, 1, 0, 5, 5), (1, 0, 5, 5):
        with says(ValueError, "input has 1 volumes of 1 channels, 0 slices", "only its batch may be empty"):
            layer(torch.ones(shape))
    layer.streaming = True
    assert layer(torch.ones(1, 1, 0, 3, 4)).shape == (1, 1, 0, 1, 2)
