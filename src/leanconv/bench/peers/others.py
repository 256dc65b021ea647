"""What some users would take: torch.compile, cuFFT for long filters, causal_conv1d; and who is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from leanconv.bench.operands import Operands, as_nchw, in_order
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_cuda_torch, missing_module
from leanconv.bench.peers.torch_peer import arithmetic
from leanconv.bench.results import PEER_LAYOUTS
from leanconv.call.host_call import torch_epilogue
from leanconv.dtypes import is_integer, is_narrow
from leanconv.images.borders import BORDERS
from leanconv.problem import ConvProblem, FilterProblem, Problem

#: Taps along one axis from which on a Fourier transform is worth a try.
_LONG = 16


class CompilePeer(Peer):
    """torch.compile of the layer, by default and with max-autotune: it takes seconds a layer, so only by request."""

    name = "torch.compile"
    engines = tuple(
        f"compile-{kind}-{layout.lower()}"
        for kind in ("fp32", "tf32", "float16", "bfloat16")
        for layout in PEER_LAYOUTS
    )
    solves = ("conv2d",)
    needs_gpu = True
    module = "torch"
    by_request = True

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import torch
        from torch.nn.functional import conv2d

        assert problem.kind == "conv2d"
        top, bottom, left, right = problem.padding
        if problem.op != "fprop" or (top, left) != (bottom, right) or is_integer(problem.dtype):
            yield Unable(self.name, "written for the forward pass of floating-point layers with even padding")
            return
        layer = (problem.stride, (top, left), problem.dilation, problem.groups)

        def forward(x: Any, w: Any, bias: Any, scale: Any, add: Any) -> Any:
            y = conv2d(x, w, bias if scale is None else None, *layer)
            return torch_epilogue(y, 2, None if scale is None else bias, scale, add, problem.activation)

        kinds = ((problem.dtype, False),) if is_narrow(problem.dtype) else (("fp32", False), ("tf32", True))
        for kind, tf32 in kinds:
            for layout in PEER_LAYOUTS:
                x, w = (as_nchw(array, layout) for array in (operands.x(layout), operands.w(layout)))
                add = operands.residual(layout)
                beside = operands.bias, operands.scale, None if add is None else as_nchw(add, layout)
                for mode in ("default", "max-autotune-no-cudagraphs"):
                    torch._dynamo.reset()
                    run = torch.compile(forward, mode=mode, dynamic=False)

                    def call(run: Any = run, given: Any = (x, w, *beside), layout: Any = layout) -> Any:
                        return in_order(run(*given), layout)

                    yield Candidate(
                        f"compile-{kind}-{layout.lower()}", mode, call, layout, "measure",
                        arithmetic="tf32" if tf32 else "fp32",
                        scope=lambda tf32=tf32: arithmetic(tf32),  # type: ignore[misc]
                    )  # fmt: skip


class FourierPeer(Peer):
    """cuFFT through torch.fft: transforms of images and filters, products, and back. For layers of long filters, and
    filters of planes."""

    name = "cufft"
    engines = ("cufft",)
    solves = ("conv2d", "filter2d")
    needs_gpu = True
    module = "torch"

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import torch

        if problem.kind == "filter2d":
            yield from self._of_planes(problem, operands)
            return
        plain = problem.op == "fprop" and problem.stride == problem.dilation == (1, 1) and problem.dtype == "float32"
        if not plain or problem.fuses or max(problem.r, problem.s) < _LONG or problem.groups not in (1, problem.c):
            words = (
                f"written for float32 layers of {_LONG} taps and more in an axis, dense or depthwise, without strides"
            )
            yield Unable(self.name, words)
            return
        top, bottom, left, right = problem.padding
        sizes = (problem.h + top + bottom, problem.w + left + right)
        spectrum = 8 * sizes[0] * (sizes[1] // 2 + 1)
        needed = 3 * spectrum * (problem.n * (problem.c + problem.k) + problem.k * problem.group_c)
        if gpu and needed > 0.7 * (free := torch.cuda.mem_get_info()[0]):
            yield Unable(self.name, f"its spectra need {needed} bytes and {free} are free")
            return
        yield Candidate(
            self.name, "rfft2", _fourier(problem, operands, sizes), "NCHW", "measure", scope=lambda: arithmetic(False)
        )

    def _of_planes(self, problem: FilterProblem, operands: Operands) -> Iterator[Candidate | Unable]:
        import torch

        plain = problem.dtype == problem.result == "float32" and problem.channels == problem.filters == 1
        mode = BORDERS[problem.border].torch
        if not plain or problem.reduction or problem.valid or problem.per_image or problem.is_volume or mode is None:
            yield Unable(self.name, "written for float32 planes, a filter, and the borders of torch.nn.functional.pad")
            return
        x, kernel, (h, w), (ay, ax) = operands.image, operands.kernel, (problem.h, problem.w), problem.anchor
        around = (ax, problem.kw - 1 - ax, ay, problem.kh - 1 - ay)
        sizes = tuple(_fast_length(each) for each in (h + problem.kh - 1, w + problem.kw - 1))

        def call() -> Any:
            extended = torch.nn.functional.pad(x[:, None], around, mode)[:, 0]
            spectrum = torch.fft.rfft2(extended, s=sizes) * torch.fft.rfft2(kernel, s=sizes).conj()
            return torch.fft.irfft2(spectrum, s=sizes)[:, :h, :w]

        yield Candidate(self.name, "pad and rfft2", call, workspace_bytes=None)


def _fast_length(least: int) -> int:
    """The next length that has no prime factor above 7, for which cuFFT is fast."""
    rest = least
    for prime in (2, 3, 5, 7):
        while rest % prime == 0:
            rest //= prime
    return least if rest == 1 else _fast_length(least + 1)


def _fourier(problem: ConvProblem, operands: Operands, sizes: tuple[int, int]) -> Callable[[], Any]:
    import torch

    x, w = operands.x("NCHW"), operands.w("NCHW")
    top, bottom, left, right = problem.padding

    def call() -> Any:
        image = torch.nn.functional.pad(x, (left, right, top, bottom))
        spectrum, filters = torch.fft.rfft2(image), torch.fft.rfft2(w, s=sizes).conj()
        if problem.groups == 1:
            product = torch.einsum("nchw,kchw->nkhw", spectrum, filters)
        else:
            product = spectrum.repeat_interleave(problem.group_k, 1) * filters[:, 0]
        # a valid correlation: no window of these outputs goes over the edge, where the transform is periodic
        y = torch.fft.irfft2(product, s=sizes)[..., : problem.p, : problem.q]
        y = y if operands.bias is None else y + operands.bias[:, None, None]
        return y.relu() if problem.activation else y

    return call


class CausalPeer(Peer):
    """causal_conv1d, the kernels of Mamba: depthwise layers of 2 to 4 taps along a row, padded on the left."""

    name = "causal_conv1d"
    engines = ("causal_conv1d",)
    solves = ("conv2d",)
    needs_gpu = True
    module = "causal_conv1d"

    def absent(self) -> str | None:
        return missing_cuda_torch() or missing_module(self.module)

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        depthwise = problem.groups == problem.c == problem.k and problem.h == problem.r == 1 and 2 <= problem.s <= 4
        causal = problem.padding == (0, 0, problem.s - 1, 0) and problem.stride == problem.dilation == (1, 1)
        more = problem.activation or problem.fuses
        if problem.op != "fprop" or not depthwise or not causal or more or is_integer(problem.dtype):
            yield Unable(self.name, "written for causal depthwise layers of one row and 2 to 4 taps")
            return
        from causal_conv1d import causal_conv1d_fn

        for layout in PEER_LAYOUTS:
            x, w = as_nchw(operands.x(layout), layout)[:, :, 0], operands.w("NCHW")[:, 0, 0]

            def call(x: Any = x, w: Any = w, layout: Any = layout) -> Any:
                return in_order(causal_conv1d_fn(x, w, operands.bias)[:, :, None], layout)

            yield Candidate(self.name, layout, call, layout, "measure")


class UnmeasuredPeer(Peer):
    """A library that users would take and that nothing here runs yet: every file names it as absent."""

    solves = ("conv2d",)
    needs_gpu = True

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.engines, self._reason = name, (name,), reason  # type: ignore[misc]

    def absent(self) -> str:
        return self._reason

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        return iter(())
