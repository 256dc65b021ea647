"""The arrays of a call, resolved once: library, device, element type, layout, and which of them are read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leanconv import dtypes
from leanconv.arrays import Arrays, MemoryOrder, Shape, arrays_of, carried
from leanconv.arrays.memory import lies_channels_last, overlaps_itself, row_pitched
from leanconv.arrays.numpy import NUMPY, learn_bfloat16
from leanconv.dtypes import DtypeName
from leanconv.options import device_index, one_of
from leanconv.plan import ALIGNMENT


class Epilogue(NamedTuple):
    """What a caller gives beside x and w, in place of a bias, where there is more than that."""

    bias: Any
    scale: Any
    add: Any


def together(bias: Any, scale: Any, add: Any) -> Any:
    """The inverse of `as_epilogue`: what a call takes in place of a bias, the bias itself where it is all."""
    return bias if scale is None and add is None else Epilogue(bias, scale, add)


def as_epilogue(bias: Any) -> Epilogue:
    """What a ready call gets in place of a bias."""
    return bias if type(bias) is Epilogue else Epilogue(bias, None, None)


@dataclass(frozen=True)
class Operands:
    """The arrays of a call, all of one library and on one device; None for what a call does not have."""

    arrays: Arrays
    #: a GPU's number, None for the CPU
    device: int | None
    #: of x
    dtype: DtypeName
    x: Any
    w: Any
    bias: Any
    out: Any
    #: what the caller calls x and w
    names: tuple[str, str]
    #: the type of the result, and of w as the algorithm reads it
    result: DtypeName
    w_dtype: DtypeName
    #: in memory of x, w and the result, where it is not the one that the library shows
    order: MemoryOrder = None
    w_order: MemoryOrder = None
    out_order: MemoryOrder = None
    #: which of x, w and bias cannot be read in place
    copies: tuple[bool, bool, bool] = (False, False, False)
    #: whether the result can be written directly to ``out``
    out_direct: bool = True
    #: of forward layers, a number for each filter and a residual, and which of them cannot be read in place
    scale: Any = None
    add: Any = None
    copies_beside: tuple[bool, bool] = (False, False)

    def place(self, device: object) -> int | None:
        """Number of the GPU that runs the call, None for the CPU. Raises ValueError for one where they do not lie."""
        home = self.device
        if device is None or (str(device) == "cpu" and home is None):
            return home
        index = None if str(device) == "cpu" else device_index(device)
        if self.arrays.moves_to_gpu:
            return index
        if index != home and not (home is not None and str(device) == "cuda"):
            where = "the CPU" if home is None else f"cuda:{home}"
            raise ValueError(f"device={device!r}, but the arrays lie on {where}; move them there, or leave device out")
        return home

    def check_out(self, shape: Shape) -> None:
        """Raise ValueError unless ``out``, where there is one, can take a result of ``shape``."""
        arrays, out = self.arrays, self.out
        if out is None:
            return
        if tuple(out.shape) != tuple(shape):
            raise ValueError(f"out has shape {tuple(out.shape)}; the result has {tuple(shape)}")
        if arrays.dtype(out) != self.result:
            raise ValueError(f"out has dtype {arrays.dtype(out)}; the result has {self.result}")
        if overlaps_itself(shape, arrays.strides(out), dtypes.item_bytes(self.result)):
            raise ValueError(
                f"out has shape {tuple(shape)} and strides {arrays.strides(out)} in bytes: several of its elements "
                "share memory; give each its own"
            )


@dataclass(frozen=True)
class AxisOrder:
    """How a library shows the shapes of layers: in memory order or, as PyTorch does, always as N, C, ...

    Images without a batch have the same order, less N.
    """

    #: one of those of images, or of signals
    layout: str
    #: the logical axes: that layout with the channels first
    logical_layout: str
    keeps_shape: bool

    def memory_order(self, axes: int) -> MemoryOrder:
        """Of arrays with so many axes, where their library does not show it."""
        if not self.keeps_shape or self.layout == self.logical_layout or not self._fits(axes):
            return None
        return _axes(*self._layouts(axes))

    def logical(self, shape: Shape) -> Shape:
        """A shape as the library shows it in the order N, C, ..."""
        if self.keeps_shape or not self._fits(len(shape)):
            return shape
        logical, lying = self._layouts(len(shape))
        return tuple(shape[axis] for axis in _axes(lying, logical))

    def shown(self, shape: Shape) -> Shape:
        """A shape N, C, ... as the library shows it."""
        return shape if self.keeps_shape else tuple(shape[axis] for axis in _axes(*self._layouts(len(shape))))

    def _fits(self, axes: int) -> bool:
        return axes in (len(self.layout), len(self.layout) - 1)

    def _layouts(self, axes: int) -> tuple[str, str]:
        """The names of the logical axes and of those in memory, with a batch or without."""
        names = self.logical_layout, self.layout
        return names if axes == len(self.layout) else (names[0].replace("N", ""), names[1].replace("N", ""))


def layer_operands(
    x: Any,
    w: Any,
    bias: Any,
    out: Any,
    names: tuple[str, str],
    layout: str | None,
    layouts: Sequence[str],
    out_axes: int | None = None,
    integers: bool = True,
) -> tuple[Operands, AxisOrder]:
    """The two arrays of a layer, by the caller's ``names``, and what goes with them.

    ``layouts`` are those of images, or of signals. The result has ``out_axes`` axes, by default as many as x.
    Without ``layout``, it is the second where PyTorch's x lies channels last, as PyTorch decides it; otherwise the
    first. Without ``integers`` a message lists no type of theirs; the caller refuses these itself.

    Raises:
        TypeError: something is not an array, or has an element type that layers do not take.
        ValueError: arrays of several libraries, devices or element types, or a layout that is not known.
    """
    given, arrays, device = gather(x, w, bias, out, names)
    found = {each: arrays.dtype(array) for each, array in given.items()}
    listed = dtypes.LAYERS if integers or found[names[0]] in dtypes.INTEGER_LAYERS else dtypes.FLOAT_LAYERS
    dtype = check_dtypes(found, listed)
    channels_first, channels_last = layouts[:2]
    keeps_shape, x = arrays.keeps_shape, given[names[0]]
    if layout is None:
        layout = channels_first
        if keeps_shape and len(channels_first) - len(x.shape) in (0, 1):
            last = lies_channels_last(tuple(x.shape), arrays.strides(x), batch=len(x.shape) == len(channels_first))
            layout = channels_last if last else channels_first
    else:
        layout = one_of("layout", layout, layouts)
    axes = AxisOrder(layout, channels_first, keeps_shape)
    order = axes.memory_order(len(x.shape))
    w, bias = given[names[1]], given.get("bias")
    w_order = axes.memory_order(len(w.shape))
    copies = (
        not _readable(arrays, x, order),
        not _readable(arrays, w, w_order),
        bias is not None and not _readable(arrays, bias),
    )
    out_order = axes.memory_order(out_axes or len(x.shape))
    direct = out is None or _readable(arrays, out, out_order)
    types = dtypes.result_of(dtype), dtypes.weights_of(dtype)
    scale, add = given.get("scale"), given.get("add")
    beside = (
        scale is not None and not _readable(arrays, scale),
        add is not None and not _readable(arrays, add, out_order),
    )
    made = Operands(
        arrays, device, dtype, x, w, bias, out, names, *types, order, w_order, out_order, copies, direct, scale, add,
        beside,
    )  # fmt: skip
    return made, axes


#: Row pitch and image step, in elements.
Pitch = tuple[int, int]


def filter_operands(
    image: Any,
    kernel: Any,
    out: Any,
    result: DtypeName | None = None,
    channels_last: bool = False,
    first: str = "image",
) -> tuple[Operands, Pitch | None, Pitch | None]:
    """The arrays of `filter2d`; then row pitch and image step, in elements, of image and out.

    ``first`` is what the caller calls the image. Pitch and step are None where a filter cannot use the array in place
    on a GPU, where ``out`` is None, and on the CPU. Without ``result`` the result has the type of ``out``, else of the
    image. Raises as `layer_operands`.
    """
    given, arrays, device = gather(image, kernel, None, out, (first, "kernel"))
    image, kernel = given[first], given["kernel"]
    dtype, given_type = dtypes.one_of(first, arrays.dtype(image), dtypes.FILTERS), arrays.dtype(kernel)
    dtypes.check_weights("kernel", given_type)
    if result is None:
        result = dtype if out is None else dtypes.one_of("out", arrays.dtype(out), dtypes.FILTERS)
    if arrays is NUMPY and result == "bfloat16":
        learn_bfloat16()
    sums = dtypes.filter_sum(dtype, result, not given_type.startswith(("float", "bfloat", "longdouble")))
    x_pitch = y_pitch = None
    if device is not None:
        x_pitch = _pitch(arrays, image, dtype, channels_last)
        right = out is not None and arrays.dtype(out) == result
        y_pitch = _pitch(arrays, out, result, channels_last) if right else None
    copies = (device is not None and x_pitch is None, given_type != sums or not _readable(arrays, kernel), False)
    direct = device is None or out is None or y_pitch is not None
    operands = Operands(
        arrays, device, dtype, image, kernel, None, out, (first, "kernel"), result, sums, copies=copies,
        out_direct=direct,
    )  # fmt: skip
    return operands, x_pitch, y_pitch


def gather(x: Any, w: Any, bias: Any, out: Any, names: tuple[str, str]) -> tuple[dict[str, Any], Arrays, int | None]:
    """The inputs of a call by the caller's names, those of other libraries carried; their library, and their device.

    Raises TypeError for anything but an array, ValueError for arrays of several libraries or devices.
    """
    beside = as_epilogue(bias)._asdict()
    given = {names[0]: x, names[1]: w} | {name: array for name, array in beside.items() if array is not None}
    inputs = {name: carried(array, name) for name, array in given.items()}
    if out is not None and any(inputs[name] is not array for name, array in given.items()):
        raise TypeError("out is taken for arrays of NumPy, CuPy and PyTorch only")
    every = [(name, array, arrays_of(array)) for name, array in (*inputs.items(), ("out", out)) if array is not None]
    for name, array, own in every:
        if own is not None:
            own.refuse_without_memory(array, name)
    _, first, arrays = every[0]
    assert arrays is not None  # an array of another library has been carried
    device = arrays.device(first)
    for name, array, others in every:
        if others is None:
            raise TypeError(f"{name} is a {type(array).__qualname__}; it must be an array of the inputs' library")
        if others is not arrays or others.device(array) != device:
            raise ValueError(
                f"{names[0]} is an array of {arrays.name} on {arrays.where(first)}, {name} one of {others.name} on "
                f"{others.where(array)}; all arrays of a call must be of one library and on one device"
            )
    return inputs, arrays, device


def check_dtypes(named: dict[str, str], taken: Sequence[str]) -> DtypeName:
    """The element type of the first of the named arrays. Raises TypeError unless it is one of those taken, and the
    others' are those that go with it: the same, or what the table of types says of layers of integers."""
    (first, dtype), *others = named.items()
    found = dtypes.one_of(first, dtype, taken)
    for name, other in others:
        wanted = dtypes.result_of(found) if name in ("bias", "add") else dtypes.weights_of(found)
        if name == "scale":
            if dtypes.is_integer(found):
                raise TypeError(f"scale was given, and {first} has dtype {found}: the sums of integers stay integers")
            wanted = dtypes.accumulator(found).name
        if other != wanted:
            rule = "they must be the same" if wanted == dtype else f"with {dtype} it must be {wanted}"
            raise TypeError(f"{name} has dtype {other} and {first} {dtype}; {rule}")
    return found


def _axes(have: str, want: str) -> tuple[int, ...]:
    """The positions in ``have`` of the axes named by ``want``."""
    return tuple(have.index(axis) for axis in want)


def _readable(arrays: Arrays, array: Any, order: MemoryOrder = None) -> bool:
    """Whether a kernel can use the array in place."""
    if order is not None and len(order) != len(array.shape):
        return False
    return arrays.is_contiguous(array, order) and arrays.misalignment(array) % ALIGNMENT == 0


def _pitch(arrays: Arrays, array: Any, dtype: str, channels_last: bool) -> Pitch | None:
    """Row pitch and image step where a filter can use the array in place, else None."""
    item, shape = dtypes.item_bytes(dtype), tuple(array.shape)
    if arrays.misalignment(array) % item or arrays.negated(array) or len(shape) < 2 + channels_last:
        return None
    return row_pitched(shape, arrays.strides(array), item, channels_last)
