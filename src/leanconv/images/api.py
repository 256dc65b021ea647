"""The public functions on images: what they take, and what they mean. `leanconv.call` carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from leanconv.arrays import Shape, arrays_of, carried
from leanconv.arrays.operands import Operands, filter_operands
from leanconv.call import lookup
from leanconv.call.as_before import as_before
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.resolve import filter_problem
from leanconv.call.weights import given_kernel, kernel_beside
from leanconv.dtypes import DTYPES, check_weights, filter_sum, is_integer
from leanconv.images import separable as products
from leanconv.options import Border, FilterOptions, filter_numbers, filter_options, integer, yes_or_no
from leanconv.problem import FilterProblem

Array = TypeVar("Array")


@as_before
def filter2d(
    image: Array,
    kernel: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Literal["same", "valid"] = "same",
    per_image: bool = False,
    separable: bool | None = None,
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Correlate images with a small kernel, as ``cv2.filter2D`` does, or with several at once.

    ``y[i,j] = delta + sum over u,v of kernel[u,v] * image[i + u - anchor_y, j + v - anchor_x]``: as large as the image.
    Several kernels take one pass over the image, and each gives a result of its own; where each is separable and that
    is faster, each takes its own.

    Args:
        image: array (..., height, width) of uint8, int8, uint16, int16, int32, float16, bfloat16, float32 or float64;
            leading axes are a batch. Rows may be any distance apart: a crop of a larger image is read in place.
        kernel: numbers (kh, kw), or (f, kh, kw): f kernels of one size. A list, an array of NumPy, or one of the
            image's library; of any real dtype. With an image on the GPU a copy of a list or of a NumPy array is kept
            there for each content, for the first 256 of them; one that lies there already is converted in each
            call, unless it has the dtype of the sums. On the GPU kernels above 32x32 are filtered by Fourier
            transforms, in the type of the sums: they take a workspace, no more than LEANCONV_WORKSPACE_LIMIT, and
            their errors are relative to the pixels around. Of one that is not separable (below) an Inf or a NaN
            reaches a whole tile.
        border: what lies outside the image ``a b c d``: ``"constant"`` ``v|abcd|v``, ``"replicate"`` ``a|abcd|d``,
            ``"reflect"`` ``ba|abcd|dc``, ``"reflect101"`` ``cb|abcd|cb``, ``"wrap"`` ``cd|abcd|ab``. SciPy's names
            (``nearest``, ``mirror``, ``grid-mirror``, ``grid-wrap``, ``grid-constant``) and OpenCV's
            (``BORDER_REFLECT_101``, ...; also its numbers, as ``cv2.BORDER_REFLECT_101`` is one) are accepted too; see
            ``leanconv.images.borders``.
        value: the constant border's pixel, a number that the image's dtype holds.
        anchor: (row, column) of the kernel element over the output pixel, by default (kh // 2, kw // 2); -1 means
            that middle, as in OpenCV, which writes (column, row).
        delta: added to every output pixel, before it is rounded.
        dtype: of the result; by default that of ``out`` or of the image. Integers are rounded, of two the even one,
            and saturate: what is beyond uint8 is 0 or 255, and NaN is 0.
        channels_last: True for pictures (..., height, width, channels), each channel filtered by itself. An image
            (height, width, 3) or (height, width, 4) is refused without a word; False says that it is a batch of planes.
        mode: ``"valid"``: only where the kernel lies inside the image, (height - kh + 1, width - kw + 1); border and
            anchor play no part.
        per_image: the kernel's axes begin with those of the batch: (..., kh, kw) or (..., f, kh, kw), for each image
            its own.
        separable: whether to filter rows and columns apart, with a kernel that is a sum of up to three products of a
            column and a row. None: where that is faster, of a list or an array of NumPy. The products are found by
            rank, in float64; they leave out at most 2⁻²⁴ of the kernel's norm, some units of 2⁻⁵² where sums are
            float64, and nothing where they are int32, or float64 of integers with a kernel of integers: there they are
            one product. True: a kernel that is no such sum is an error. Of several all are, or none.
        out: array for the result; must not share memory with the inputs.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.

    Returns:
        Array of the image's shape and library, computed on the caller's current stream; ``out`` if given. With f
        kernels its shape is (..., f, height, width), also for f = 1, and (..., f, height, width, channels).

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    Sums are taken in float32; in float64 where image or result is float64 or int32. An int32 image with a kernel of
    integers is exact, and wraps around where the result is int32 too. On the CPU large kernels that are no products
    are filtered by transforms in float64, whose errors are relative to the largest numbers nearby (``transforms`` in
    `explain`). The kernel is not flipped; ``kernel[::-1, ::-1]`` makes it a convolution. PyTorch's CPU tensors are
    filtered by the NumPy engine.

    >>> import numpy as np
    >>> filter2d(np.arange(4, dtype=np.float32)[None], np.ones((1, 3), np.float32), border="replicate").tolist()
    [[1.0, 3.0, 6.0, 8.0]]
    >>> filter2d(np.array([[10, 200, 100]], np.uint8), [[0.5, 0.5, 0.5]]).tolist()
    [[205, 155, 250]]
    >>> kernels = [[[1, 0, 0]], [[0, 0, 1]]]  # the pixel before, the pixel after
    >>> filter2d(np.arange(4, dtype=np.float32)[None], kernels, border="wrap").tolist()
    [[[3.0, 0.0, 1.0, 2.0]], [[1.0, 2.0, 3.0, 0.0]]]
    """
    kernel = given_kernel(kernel)
    requested = filter_options(border, anchor, device, dtype, channels_last, mode, per_image)
    if (each := _several(requested, image, kernel, separable, out)) is not None:
        return _one_by_one(requested, image, kernel, each, value, delta, out)
    split, factors = _split(requested, image, kernel, separable, out)
    if separable or split.window is None or max(split.window) > products.DIRECT:
        return run(split, image, factors, value, delta, out)
    try:
        return run(split, image, factors, value, delta, out)
    except NoAlgorithmError:  # a GPU whose blocks have less shared memory
        return run(requested, image, kernel, value, delta, out)


def filter3d(
    volume: Array,
    kernel: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Literal["same", "valid"] = "same",
    per_image: bool = False,
    separable: bool | None = None,
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Correlate volumes with a small kernel, as ``scipy.ndimage.correlate`` does, or with several at once.

    ``y[z,i,j] = delta + sum over t,u,v of kernel[t,u,v] * volume[z + t - a, i + u - b, j + v - c]``, anchor (a, b, c).

    Args:
        volume: array (..., depth, height, width) of any type that `filter2d` takes; leading axes are a batch. It is
            read in place where its slices, images of any row pitch, lie evenly apart.
        kernel: numbers (kd, kh, kw), or (f, kd, kh, kw): f kernels of one size; as in `filter2d`, up to 32x32 on the
            GPU, of any depth.
        anchor: (slice, row, column) of the kernel element over the output pixel, by default the middle; -1 means it.
        channels_last: True for volumes (..., depth, height, width, channels), each channel filtered by itself.
        per_image: the kernel's axes begin with those of the batch: (..., kd, kh, kw) or (..., f, kd, kh, kw), for each
            volume its own; on the GPU these take a launch each.
        separable: whether to filter across slices and within them apart, with one kernel that is a product of a line
            and a plane: in two passes, the first of which gives volumes in the type of the sums; the plane may be
            separable too. None: where that is faster, of a list or an array of NumPy. True: any other is an error.
        border, value, delta, dtype, mode, out, device: as in `filter2d`; a border is one along all three axes.

    Returns:
        Array of the volume's shape and library, as `filter2d`; with f kernels (..., f, depth, height, width).

    Raises:
        As `filter2d`. No workspace is taken but by separable kernels: a block goes over the slices of the kernel, with
        its sums in registers. `explain` shows of these the pass within slices.

    >>> import numpy as np
    >>> volume = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    >>> filter3d(volume, np.ones((3, 1, 1)), border="constant").ravel().tolist()
    [1.0, 3.0, 3.0]
    """
    requested, kernel = _volume_options(kernel, border, anchor, device, dtype, channels_last, mode, per_image)
    factors = _split_volume(requested, volume, kernel, separable, out)
    if factors is None:
        return run(requested, volume, kernel, value, delta, out)
    return _across_and_within(requested, volume, factors, value, delta, out)


def run(requested: FilterOptions, image: Any, kernel: Any, value: Any, delta: Any, out: Any) -> Any:
    """Filter with a kernel, or with the products that ``requested.window`` says it is."""
    if type(kernel) in (np.ndarray, list, tuple):
        kernel = kernel_beside(image, kernel, requested.dtype)
    # NOTE: 0.0 and False are no int, and a launch packs the numbers of an int32 image as int32
    numbers: tuple[Any, ...] = ()
    if type(value) is not int or type(delta) is not int or value or delta:
        numbers = value, delta
    return lookup.run(requested, image, kernel, None, out, numbers)


def requested_volume_filter(
    volume: Any, kernel: Any, border: Any, anchor: Any, device: Any, dtype: Any, channels_last: Any, mode: Any,
    per_image: Any, separable: Any, out: Any, value: Any, delta: Any,
) -> tuple[FilterOptions, Any]:  # fmt: skip
    """The options of a call of `filter3d`, and its kernel on the volume's device; of a separable one those of the pass
    within slices."""
    requested, kernel = _volume_options(kernel, border, anchor, device, dtype, channels_last, mode, per_image)
    factors = _split_volume(requested, volume, kernel, separable, out)
    if factors is not None:
        requested, kernel = _split(
            requested._replace(slice_anchor=None), volume, factors.plane, None, out, factors.exact
        )
    return requested, kernel_beside(volume, kernel, requested.dtype)


def _volume_options(
    kernel: Any, border: Any, anchor: Any, device: Any, dtype: Any, channels_last: Any, mode: Any, per_image: Any
) -> Part:
    slices, *within = _volume_anchor(anchor)
    last = False if channels_last is None else channels_last
    requested = filter_options(border, within, device, dtype, last, mode, per_image)
    return requested._replace(slice_anchor=slices), given_kernel(kernel)


class VolumeFactors(NamedTuple):
    """A line across slices and a plane, in the type of the sums, whose product a kernel (kd, kh, kw) is."""

    line: np.ndarray
    plane: np.ndarray
    #: whether sums of whole numbers must stay exact
    exact: bool


def _split_volume(
    requested: FilterOptions, volume: Any, kernel: Any, separable: bool | None, out: Any
) -> VolumeFactors | None:
    """The factors of a kernel (kd, kh, kw); None where it has none, or is as fast whole."""
    if separable is None:
        # arrays that a call moves to a GPU would be moved twice
        if type(kernel) is not np.ndarray or arrays_of(volume) is None or requested.device is not None:
            return None
    elif not yes_or_no("separable", separable) or arrays_of(volume) is None:  # which the call refuses
        return None
    arrays = arrays_of(kernel)
    given = np.asarray(kernel) if arrays is None else arrays.to_numpy(kernel)
    if given.ndim != 3 or min(given.shape) < 1 or requested.per_image:
        if separable:
            raise ValueError(f"separable=True: kernel has shape {given.shape}; it must be one kernel (kd, kh, kw)")
        return None
    kd, *size = given.shape
    if not (separable or products.worth_it_in_volumes(*given.shape)):
        return None
    check_weights("kernel", given.dtype.name)
    sums, exact = _sums(requested, volume, out, given.dtype)
    found = products.products(given.reshape(kd, -1), sums, 1, exact)
    if found is not None:
        return VolumeFactors(found[0, :kd], found[0, kd:].reshape(size), exact)
    if separable:
        raise ValueError(f"separable=True: the {kd}x{size[0]}x{size[1]} kernel is no product of a line and a plane")
    return None


def _across_and_within(
    requested: FilterOptions, volume: Any, factors: VolumeFactors, value: Any, delta: Any, out: Any
) -> Any:
    """`filter3d` in two passes."""
    line, plane, exact = factors
    line = line[:, None]
    operands, problem, _ = _resolved(requested, volume, line, (len(line), *plane.shape), out)
    pixel, _ = filter_numbers(value, delta, operands.dtype, line.dtype.name, operands.result)
    last, shape = bool(requested.channels_last), tuple(volume.shape)
    axis = len(shape) - 3 - last
    anchor = None if requested.valid else (problem.anchor_z, 0)
    # slices are rows of all their pixels
    sums = DTYPES[line.dtype.name].name
    across = requested._replace(slice_anchor=None, channels_last=False, anchor=anchor, dtype=sums)
    y = run(across, volume.reshape(*shape[: axis + 1], prod(shape[axis + 1 :])), line, value, 0, None)
    y = y.reshape(*shape[:axis], problem.out_d, *shape[axis + 1 :])
    within = requested._replace(slice_anchor=None, dtype=operands.result)
    # what a slice outside of a constant border has become; int32 wraps around, as the sums do
    beyond: float = 0
    if requested.border == "constant" and line.dtype.kind == "i":
        beyond = int(np.multiply(line.sum(dtype=line.dtype), line.dtype.type(pixel), dtype=line.dtype))
    elif requested.border == "constant":
        beyond = pixel * float(line.sum(dtype=np.float64))
    options, kernel = _split(within, y, plane, None, out, exact)
    return run(options, y, kernel, beyond, delta, out)


def _volume_anchor(anchor: Any) -> tuple[int, int, int]:
    if anchor is None:
        return -1, -1, -1
    if not isinstance(anchor, (tuple, list)) or len(anchor) != 3:
        raise ValueError(f"anchor={anchor!r} must be None or (slice, row, column), with -1 for the middle")
    slices, row, column = (integer("anchor", each, -1) for each in anchor)
    return slices, row, column


def requested_filter(
    image: Any, kernel: Any, border: Any, anchor: Any, device: Any, dtype: Any, channels_last: Any, mode: Any,
    per_image: Any, separable: Any, out: Any, value: Any, delta: Any,
) -> tuple[FilterOptions, Any]:  # fmt: skip
    """The options of a call of `filter2d`, and its kernel on the image's device."""
    kernel = given_kernel(kernel)
    requested = filter_options(border, anchor, device, dtype, channels_last, mode, per_image)
    if (each := _several(requested, image, kernel, separable, out)) is not None:
        requested, kernel = each[0]
    else:
        requested, kernel = _split(requested, image, kernel, separable, out)
    return requested, kernel_beside(image, kernel, requested.dtype)


#: The options and the products of one of several kernels.
Part = tuple[FilterOptions, Any]


def _several(requested: FilterOptions, image: Any, kernel: Any, separable: bool | None, out: Any) -> list[Part] | None:
    """Of kernels (f, kh, kw) that are separable, each by itself; None for all else."""
    shape = tuple(getattr(kernel, "shape", ()))
    if len(shape) != 3 or min(shape) < 1 or requested.per_image:
        return None
    arrays = arrays_of(kernel)
    if arrays is None or arrays_of(image) is None:
        return None
    if separable is not True and type(kernel) is not np.ndarray:
        return None  # it may lie on a GPU
    each = []
    for one in arrays.to_numpy(kernel) if separable is not False else ():
        part = _split(requested, image, one, separable, out)
        if part[0].window is None:
            return None
        each.append(part)
    return each or None


def _one_by_one(
    requested: FilterOptions, image: Any, kernel: Any, each: list[Part], value: Any, delta: Any, out: Any
) -> Any:
    """The results of several kernels, each of which takes a pass."""
    operands, problem, shape = _resolved(requested, image, each[0][1], tuple(kernel.shape), out)
    y = operands.arrays.empty(shape, operands.result, operands.device) if out is None else out
    inside = (slice(None),) * (2 + (problem.channels != 1 or bool(requested.channels_last)))
    for number, (options, factors) in enumerate(each):
        place = (..., number, *inside)
        run(options, image, factors, value, delta, y[place])
    return y


def _resolved(
    requested: FilterOptions, image: Any, weights: np.ndarray, kernel: Shape, out: Any
) -> tuple[Operands, FilterProblem, Shape]:
    """The operands, the problem and the result's shape of a call of several passes, the first with ``weights``; of its
    whole kernel, which has shape ``kernel``, and with all of ``out``."""
    name, last = "image" if requested.slice_anchor is None else "volume", bool(requested.channels_last)
    weights = kernel_beside(image, weights, requested.dtype)
    operands, *_ = filter_operands(image, weights, out, requested.dtype, last, name)
    problem, shape = filter_problem(requested, tuple(image.shape), kernel, operands.dtype)
    operands.check_out(shape)
    return operands, problem, shape


def _split(
    requested: FilterOptions, image: Any, kernel: Any, separable: bool | None, out: Any, exact: bool = False
) -> tuple[FilterOptions, Any]:
    """The options and the kernel, or in its place the products that it is a sum of; ``exact``: whatever the types, it
    must be one product without an error."""
    if separable is None:
        if type(kernel) not in (np.ndarray, list, tuple):
            return requested, kernel  # it may lie on a GPU
    elif not yes_or_no("separable", separable):
        return requested, kernel
    arrays = arrays_of(kernel)
    given = np.asarray(kernel) if arrays is None else arrays.to_numpy(kernel)
    if given.ndim != 2 or min(given.shape) < 1:
        if separable:
            wanted = "(kh, kw), or with per_image=False (f, kh, kw)"
            raise ValueError(f"separable=True: kernel has shape {given.shape}; it must have {wanted}")
        return requested, kernel
    if not (separable or products.worth_it(1, *given.shape)):
        return requested, kernel
    check_weights("kernel", given.dtype.name)
    sums, whole = _sums(requested, image, out, given.dtype)
    found = products.split(given, sums, separable, exact or whole)
    return (requested, kernel) if found is None else (requested._replace(window=given.shape), found)


def _sums(requested: FilterOptions, image: Any, out: Any, weights: np.dtype) -> tuple[str, bool]:
    """The type of the sums of a call, and whether they are of whole numbers and wide enough to be exact. They may be
    where nobody says what the image holds."""
    whole, read = weights.kind in "biu", _read(requested, image)
    sums, arrays = sums_of(requested, read, out, whole), arrays_of(read)
    return sums, sums != "float32" and whole and (arrays is None or is_integer(arrays.dtype(read)))


def _read(requested: FilterOptions, image: Any) -> Any:
    """An image of another library as one that NumPy, CuPy or PyTorch reads; what is no array as it is."""
    if arrays_of(image) is not None or not (hasattr(image, "__dlpack__") and hasattr(image, "__dlpack_device__")):
        return image
    return carried(image, "image" if requested.slice_anchor is None else "volume")


def sums_of(requested: FilterOptions, image: Any, out: Any, whole: bool) -> str:
    """The type of the sums of a call; ``whole``: the weights are integers. The widest where nobody says."""
    image = _read(requested, image)
    arrays = arrays_of(image)
    if arrays is None:
        return "float64"
    dtype, result = arrays.dtype(image), requested.dtype
    if result is None:
        writes = arrays_of(out)
        return filter_sum(dtype, dtype if writes is None else writes.dtype(out), whole)
    return filter_sum(dtype, result, whole)
