"""Calls in the words of the package: every argument checked, the place found, the problem made.

One function for each public one, of the same name and arguments. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from leanconv.arrays import Arrays, MemoryOrder, NumpyArrays, Shape, TorchArrays, arrays_of, carry
from leanconv.arrays.memory import row_pitched
from leanconv.call import arguments
from leanconv.call import run as calls
from leanconv.call.weights import PreparedWeights
from leanconv.dtypes import FILTERS, item_bytes
from leanconv.problem import ConvProblem, FilterProblem
from leanconv.runtime.launch import ALIGNMENT, device_index


@dataclass(frozen=True)
class Described:
    """A call as far as its arrays and arguments decide it."""

    arrays: Arrays
    problem: ConvProblem | FilterProblem
    #: GPU that runs it; None for the CPU
    device: int | None
    #: where the arrays lie; differs from ``device`` only for NumPy arrays
    home: int | None
    algorithm: str
    #: of the result, as the library shows it
    shape: Shape
    #: of x, w and the result in memory, where it is not the one that the library shows
    order: MemoryOrder = None
    #: which of x, w and bias cannot be read as they lie
    copies: tuple[bool, bool, bool] = (False, False, False)
    out_direct: bool = True
    #: bytes, as given by the caller or the environment; None for neither
    workspace_limit: int | None = None
    names: tuple[str, str] = ("x", "w")


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    activation: str | None = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Described:
    """Say what a `leanconv.conv2d` call computes and where. Raises as the call does."""
    x, w, bias = operands("x", x, w, bias)
    layer = _Layer({"x": x, "w": w, "bias": bias}, out, layout, arguments.LAYOUTS)
    problem = arguments.conv_problem(
        layer.logical(x), layer.logical(w), None if bias is None else tuple(bias.shape), stride, padding, dilation,
        groups, dtype=layer.dtype, layout=layer.layout, precision=precision, activation=activation,
    )  # fmt: skip
    shape = layer.shown((problem.n, problem.k, problem.p, problem.q))
    return layer.described(problem, shape, device, algorithm, workspace_limit)


def conv1d(
    x: Any,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    activation: str | None = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Described:
    """Say what a `leanconv.conv1d` call computes and where: a layer of images of one row. Raises as the call does."""
    x, w, bias = operands("x", x, w, bias)
    layer = _Layer({"x": x, "w": w, "bias": bias}, out, layout, arguments.LAYOUTS_1D)
    problem = arguments.conv1d_problem(
        layer.logical(x), layer.logical(w), None if bias is None else tuple(bias.shape), stride, padding, dilation,
        groups, dtype=layer.dtype, layout=layer.layout, precision=precision, activation=activation,
    )  # fmt: skip
    shape = layer.shown((problem.n, problem.k, problem.q))
    return layer.described(problem, shape, device, algorithm, workspace_limit)


def conv2d_input(
    grad: Any,
    w: Any,
    input_shape: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Described:
    """Say what a `leanconv.conv2d_input` call computes and where. Raises as the call does."""
    grad, w, _ = operands("grad", grad, w, None)
    layer = _Layer({"grad": grad, "w": w}, out, layout, arguments.LAYOUTS)
    input_shape = arguments.sizes("input_shape", input_shape, 4)
    forward = arguments.conv_problem(
        layer.logical_shape(input_shape), layer.logical(w), None, stride, padding, dilation, groups, dtype=layer.dtype,
        layout=layer.layout, precision=precision, activation=None, name="input_shape",
    )  # fmt: skip
    expected = layer.shown((forward.n, forward.k, forward.p, forward.q))
    if tuple(grad.shape) != expected:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, but the output has {expected} for input_shape={input_shape}, w of "
            f"shape {tuple(w.shape)}, stride={stride!r}, padding={padding!r}, dilation={dilation!r} and groups={groups}"
        )
    return layer.described(replace(forward, op="dgrad"), input_shape, device, algorithm, workspace_limit)


def filter2d(
    image: Any, kernel: Any, *, border: Any = "reflect101", anchor: Any = None, out: Any = None, device: Any = None
) -> Described:
    """Say what a `leanconv.filter2d` call computes and where. Raises as the call does."""
    image, kernel = carried(image, "image"), carried(kernel, "kernel")
    kernel = kernel_beside(image, kernel)
    names = {"image": image, "kernel": kernel}
    arrays, home = one_library({**names, "out": out})
    dtype = arguments.check_dtypes({name: arrays.dtype(array) for name, array in names.items()}, FILTERS)
    shape = tuple(image.shape)
    problem = arguments.filter_problem(shape, tuple(kernel.shape), border, anchor, dtype)
    if out is not None:
        calls.check_out(arrays, out, shape, dtype, home)
    place = _place(arrays, home, device)
    copy_image, out_direct = False, True
    if home is not None:
        pitched = _row_pitched(arrays, image, dtype)
        copy_image = pitched is None
        if pitched is not None:
            problem = replace(problem, x_pitch=pitched[0], x_step=pitched[1])
        if out is not None:
            pitched = _row_pitched(arrays, out, dtype)
            out_direct = pitched is not None
            if pitched is not None:
                problem = replace(problem, y_pitch=pitched[0], y_step=pitched[1])
    return Described(
        arrays=arrays,
        problem=problem,
        device=place,
        home=home,
        algorithm="auto",
        shape=shape,
        copies=(copy_image, not _readable(arrays, kernel), False),
        out_direct=out_direct,
        names=("image", "kernel"),
    )


class _Layer:
    """What the calls of a layer have in common: library, place, dtype, layout, and how shapes are read in it."""

    def __init__(self, given: dict[str, Any], out: Any, layout: str | None, layouts: Sequence[str]) -> None:
        """``given`` are the input by its name, ``w`` and perhaps ``bias``; ``layouts`` are `arguments.LAYOUTS`, or 1-D.

        An array of another library has been carried before.
        """
        self.arrays, self.home = one_library({**given, "out": out})
        if layout is not None:
            arguments.one_of("layout", layout, layouts)
        dtypes = {name: self.arrays.dtype(array) for name, array in given.items() if array is not None}
        self.dtype = arguments.check_dtypes(dtypes)
        channels_first, channels_last = layouts[:2]
        self._given, self._out, self._axes = given, out, len(channels_first)
        #: PyTorch shows N, C, ... whatever the order in memory; by default that of the input, if it is one of the two
        #: that PyTorch itself has a name for
        self._keeps_shape = isinstance(self.arrays, TorchArrays)
        first = next(iter(given.values()))
        if layout is None:
            layout = channels_first
            if self._keeps_shape and len(first.shape) == self._axes and not self.arrays.is_contiguous(first):
                last = self.arrays.is_contiguous(first, _axes(channels_first, channels_last))
                layout = channels_last if last else channels_first
        #: the shown axes of the logical ones, and the other way round
        self._to_shown, self._to_logical = _axes(channels_first, layout), _axes(layout, channels_first)
        #: in memory, of what is not shown as it lies
        self._order = self._to_shown if self._keeps_shape and layout != channels_first else None
        #: of the problem, in which a row is an image too
        self.layout = arguments.LAYOUTS[layouts.index(layout)]

    def logical(self, array: Any) -> Shape:
        """An array's shape in the order N, C, ..."""
        return self.logical_shape(tuple(array.shape))

    def logical_shape(self, shape: Shape) -> Shape:
        """A shape as the library shows it in the order N, C, ..."""
        if self._keeps_shape or len(shape) != self._axes:
            return shape
        return tuple(shape[axis] for axis in self._to_logical)

    def shown(self, shape: Shape) -> Shape:
        """A shape N, C, ... as the library shows it."""
        return shape if self._keeps_shape else tuple(shape[axis] for axis in self._to_shown)

    def described(
        self, problem: ConvProblem, shape: Shape, device: Any, algorithm: str, workspace_limit: int | None
    ) -> Described:
        """The call that computes ``problem``, with a result of ``shape``."""
        arrays, out = self.arrays, self._out
        if out is not None:
            calls.check_out(arrays, out, shape, problem.dtype, self.home)
        (name, first), w, bias = next(iter(self._given.items())), self._given["w"], self._given.get("bias")
        return Described(
            arrays=arrays,
            problem=problem,
            device=_place(arrays, self.home, device),
            home=self.home,
            algorithm=algorithm,
            workspace_limit=arguments.workspace_limit(workspace_limit),
            shape=shape,
            order=self._order,
            copies=(
                not _readable(arrays, first, self._order),
                not _readable(arrays, w, self._order),
                bias is not None and not _readable(arrays, bias),
            ),
            out_direct=out is None or _readable(arrays, out, self._order),
            names=(name, "w"),
        )


def _axes(have: str, want: str) -> tuple[int, ...]:
    """Where the axes named by ``want`` are among those named by ``have``."""
    return tuple(have.index(axis) for axis in want)


def one_library(given: dict[str, Any]) -> tuple[Arrays, int | None]:
    """The library and device that all arrays share; None among them is skipped."""
    found: list[tuple[str, Arrays, int | None, Any]] = []
    for name, array in given.items():
        if array is not None:
            arrays = arrays_of(array)
            if arrays is None:
                raise TypeError(f"{name} is a {type(array).__qualname__}; it must be an array of the inputs' library")
            found.append((name, arrays, arrays.device(array), array))
    first, arrays, home, array = found[0]
    for name, others, device, other in found[1:]:
        if others is not arrays or device != home:
            raise ValueError(
                f"{first} is an array of {arrays.name} on {arrays.where(array)}, {name} one of {others.name} on "
                f"{others.where(other)}; all arrays of a call must be of one library and on one device"
            )
    return arrays, home


def carried(array: Any, name: str) -> Any:
    """An array of a library that is served, or one that shares the memory of ``array``."""
    return array if arrays_of(array) is not None else carry(array, name)


def operands(name: str, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The arrays of a layer, carried where need be; filters that keep their preparation as the array that they are."""
    w = w.array if isinstance(w, PreparedWeights) else w
    return carried(x, name), carried(w, "w"), None if bias is None else carried(bias, "bias")


def _readable(arrays: Arrays, array: Any, order: MemoryOrder = None) -> bool:
    """Whether a kernel can use the array as it lies."""
    return arrays.is_contiguous(array, order) and arrays.misalignment(array) % ALIGNMENT == 0


def _row_pitched(arrays: Arrays, array: Any, dtype: str) -> tuple[int, int] | None:
    """Row pitch and image step where a filter can use the array as it lies, else None."""
    item = item_bytes(dtype)
    if arrays.misalignment(array) % item or arrays.negated(array):
        return None
    return row_pitched(tuple(array.shape), arrays.strides(array), item)


def _place(arrays: Arrays, home: int | None, device: Any) -> int | None:
    """Number of the GPU that runs the call, None for the CPU."""
    if device is None or (str(device) == "cpu" and home is None):
        return home
    index = None if str(device) == "cpu" else device_index(device)
    if isinstance(arrays, NumpyArrays):
        return index
    if index != home and not (home is not None and str(device) == "cuda"):
        where = "the CPU" if home is None else f"cuda:{home}"
        raise ValueError(f"device={device!r}, but the arrays lie on {where}; move them there, or leave device out")
    return home


_kernels: dict[Any, Any] = {}
#: NOTE: kept kernels are never dropped, since a captured graph may read them; so their number is bounded
_MAX_KERNELS = 256


def kernel_beside(image: Any, kernel: Any) -> Any:
    """A NumPy kernel where the image lies; any other as it is."""
    arrays = arrays_of(image)
    if arrays is None or isinstance(arrays, NumpyArrays) or type(kernel) is not np.ndarray:
        return kernel
    device = arrays.device(image)
    key = (arrays.name, device, kernel.shape, kernel.dtype, kernel.tobytes())
    found = _kernels.get(key)
    if found is None:
        found = arrays.from_numpy(calls.plain(kernel), device)
        if len(_kernels) < _MAX_KERNELS:
            _kernels[key] = found
    return found
