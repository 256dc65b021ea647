"""PyTorch's memory formats: which one a tensor is taken for, in which one the result comes back, and its numbers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from leanconv import conv1d, conv2d, conv2d_input
from leanconv.arrays.memory import lies_channels_last
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")
FORMATS = torch.contiguous_format, torch.channels_last

#: Run in a process of its own: what it looks for has ended in a segmentation fault.
FUZZ = """
import random, sys
import torch
from leanconv import conv2d, conv2d_input
from torch.nn import functional

torch.manual_seed(0)
torch.set_num_threads(1)
random = random.Random(int(sys.argv[1]))
FORMATS = torch.contiguous_format, torch.channels_last

def check(name, got, expected, layer):
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    assert error <= 1e-4 * max(1.0, expected.abs().max().item()), (name, error, layer)

def layer(n, c, h, w, k, r, s, stride, padding, dilation, groups, wide=0):
    given = locals()
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    x = torch.empty(n, c, h, w + wide, memory_format=random.choice(FORMATS)).normal_()[..., :w].requires_grad_()
    weights = torch.empty(k, c // groups, r, s, memory_format=random.choice(FORMATS)).normal_().requires_grad_()
    exact = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    expected = functional.conv2d(*(each.contiguous() for each in exact), **options)
    grad = torch.empty(expected.shape, memory_format=random.choice(FORMATS)).normal_()
    expected.backward(grad.double())
    for layout in None, "NHWC", "CHWN":
        x.grad = weights.grad = None
        y = conv2d(x, weights, layout=layout, **options)
        check("y", y, expected, given)
        y.backward(grad)
        check("dx", x.grad, exact[0].grad, given)
        check("dw", weights.grad, exact[1].grad, given)
        dx = conv2d_input(grad, weights, tuple(x.shape), layout=layout, **options)
        check("conv2d_input", dx, exact[0].grad, given)

one = (1, 1)
layer(2, 1, 8, 5, 8, 3, 5, (1, 2), (0, 0), one, 1, wide=4)
layer(2, 12, 13, 1, 24, 1, 1, (2, 2), (4, 3), (1, 4), 3)
layer(3, 1, 10, 3, 16, 5, 5, (1, 3), (3, 2), one, 1)
layer(2, 8, 6, 2, 2, 5, 1, (3, 3), (4, 1), (2, 4), 1)
layer(3, 1, 12, 8, 4, 7, 7, (1, 3), (2, 0), one, 1)
layer(1, 3, 40, 40, 8, 3, 3, one, one, one, 1)
done = 0
while done < int(sys.argv[2]):
    groups = random.choice((1, 1, 1, 2, 3))
    sides = (16, 30) if random.random() < 0.2 else (1, 14)
    height, width = random.randint(*sides), random.randint(*sides)
    sizes = random.choice((1, 2, 3)), groups * random.choice((1, 2, 3, 8)), height, width
    filters = groups * random.choice((1, 2, 3, 8)), random.choice((1, 1, 2, 3, 5)), random.choice((1, 1, 2, 3, 5))
    stride, dilation = ((random.randint(1, 3), random.randint(1, 3)) for _ in range(2))
    padding = random.randint(0, 4), random.randint(0, 4)
    covered = [each * (side - 1) + 1 for each, side in zip(dilation, filters[1:])]
    if all(side + 2 * pad >= least for side, pad, least in zip(sizes[2:], padding, covered)):
        layer(*sizes, *filters, stride, padding, dilation, groups, wide=random.choice((0, 0, 3)))
        done += 1
print("right:", done)
"""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_small_layers_on_the_cpu(seed: int) -> None:
    command = [sys.executable, "-c", FUZZ, str(seed), "200"]
    sources = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=sources, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout == "right: 200\n", run.stdout + run.stderr


SHAPES = list(itertools.product((1, 2), (1, 3), (1, 5), (1, 6)))


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_lies_channels_last_as_pytorch_decides_it(shape: tuple[int, ...], sliced: bool) -> None:
    """What PyTorch decides shows in the result of its own convolution."""
    *outer, width = shape
    for memory_format in FORMATS:
        x = torch.empty(*outer, width + 2 * sliced, memory_format=memory_format)[..., :width]
        y = torch.nn.functional.conv2d(x, torch.empty(2, shape[1], 1, 1))
        last = torch.empty(y.shape, memory_format=torch.channels_last).stride()
        assert y.stride() in (last, torch.empty(y.shape).stride())
        if y.shape[2:] != (1, 1):
            assert lies_channels_last(x.shape, x.stride()) == (y.stride() == last), (x.shape, x.stride())


@pytest.fixture(params=["on the CPU", "on a GPU"])
def somewhere(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("torch_on_device") if request.param == "on a GPU" else None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_come_back_in_the_format_of_pytorchs_own(shape: tuple[int, ...], somewhere: HostDevice | None) -> None:
    for memory_format, k in itertools.product(FORMATS, (1, 4)):
        x = torch.empty(shape, memory_format=memory_format).normal_()
        w = torch.randn(k, shape[1], 1, 1)
        y, expected = conv2d(x, w, padding=1), torch.nn.functional.conv2d(x, w, padding=1)
        torch.testing.assert_close(y, expected, check_stride=True)
        if somewhere is not None:
            assert somewhere.launches[-1][1]["x"] == x.data_ptr(), "nothing is copied"
        dx = conv2d_input(x, torch.randn(shape[1], 3, 1, 1), (shape[0], 3, *shape[2:]))
        channels_last = lies_channels_last(x.shape, x.stride())
        assert dx.stride() == torch.empty(dx.shape, memory_format=FORMATS[channels_last]).stride()


def test_signals_of_one_channel(somewhere: HostDevice | None) -> None:
    last, first = torch.randn(2, 6, 1).permute(0, 2, 1), torch.randn(2, 1, 6)
    assert conv1d(last, torch.ones(3, 1, 2)).stride() == (15, 1, 3)
    assert conv1d(first, torch.ones(3, 1, 2)).stride() == (15, 5, 1)
    assert torch.equal(conv1d(last, torch.ones(3, 1, 2)), conv1d(last.contiguous() + 0, torch.ones(3, 1, 2)))
