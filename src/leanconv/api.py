"""The public functions: check, describe, choose, run.

Each call is described once: a dictionary keyed by the arrays' signatures and the other arguments leads straight to a
ready call the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from leanconv import arguments, calls, registry
from leanconv.problem import ITEM_BYTES, ConvProblem, FilterProblem
from leanconv.runtime.arrays import Arrays, NumpyArrays, TorchArrays, arrays_of, carry, give_back, row_pitched
from leanconv.runtime.env import raw_workspace_limit
from leanconv.runtime.launch import ALIGNMENT, device_index

Array = TypeVar("Array")

_conv_calls: dict[Any, calls.Call] = {}
_filter_calls: dict[Any, calls.Call] = {}
#: more different calls than this in one process, and the look-up starts over
_MAX_CALLS = 8192


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
    shape: tuple[int, ...]
    channels_last: bool = False
    #: which of x, w and bias cannot be read as they lie
    copies: tuple[bool, bool, bool] = (False, False, False)
    out_direct: bool = True
    #: bytes, as given by the caller or the environment; None for neither
    workspace_limit: int | None = None
    names: tuple[str, str] = ("x", "w")


def conv2d(
    x: Array,
    w: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: arguments.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    layout: str | None = None,
    algorithm: str = "auto",
    precision: str = "fp32",
    activation: str | None = None,
    out: Any = None,
    device: str | None = None,
    workspace_limit: int | None = None,
) -> Array:
    """Convolve a batch of images with a bank of filters, as ``torch.nn.functional.conv2d`` does.

    ``y[n,k,p,q] = activation(bias[k] + sum over c,r,s of w[k,c,r,s] * x[n,c, p*stride - top + r*dilation, ...])``

    Args:
        x: float32 array (n, c, h, w) of NumPy, CuPy, PyTorch, or of any library with DLPack. The CPU takes float64 too.
        w: filters (k, c / groups, r, s), of the same library, dtype and device.
        bias: (k,) or None.
        stride: pixels between outputs, for both axes or (vertical, horizontal).
        padding: zeros around the image, in pixels: one number, (vertical, horizontal), (top, bottom, left, right),
            ``"valid"`` (none) or ``"same"`` (output as large as the input; stride 1; an odd pixel goes to the end).
        dilation: pixels between filter taps, like ``stride``.
        groups: c and k are cut into this many parts that do not see each other.
        layout: ``"NHWC"``: x is (n, h, w, c), w (k, r, s, c / groups) and y (n, p, q, k). PyTorch tensors keep their
            logical shapes; for them it is the memory format, by default that of x (channels_last is NHWC).
        algorithm: ``"auto"`` or a name from `algorithms`.
        precision: ``"ieee"``, ``"fp32"``, ``"relaxed"`` or ``"tf32"``; the result is never less precise than this.
        activation: None or ``"relu"``.
        out: array for the result; must not share memory with the inputs.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.
        workspace_limit: bytes of GPU scratch memory that the algorithm may take, from the allocator of x's library.
            None: what LEANCONV_WORKSPACE_LIMIT says, else 0 for ``"auto"``, and as much as it needs for one by name.

    Returns:
        y of shape (n, k, p, q), of x's library, computed on the caller's current stream; ``out`` if given.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names; NoAlgorithmError, a ValueError,
            where nothing fits. CudaUnavailableError: no driver, GPU or compiler.

    PyTorch's CPU tensors go to PyTorch's own convolution. On the GPU no gradient is computed, and a tensor that
    requires one is refused. The first call of a shape compiles; later ones neither allocate anything but the result
    and the workspace nor wait, and may be captured in a CUDA graph (of CuPy's, only without a workspace: CuPy's pool
    keeps none for a graph).

    >>> import numpy as np
    >>> x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    >>> conv2d(x, w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 6.0, 4.0]
    """
    arrays = arrays_of(x)
    call = key = None
    if arrays is not None:
        signature = arrays.signature
        try:
            key = (
                type(x), signature(x), type(w), signature(w),
                None if bias is None else (type(bias), signature(bias)),
                None if out is None else (type(out), signature(out)),
                stride, padding, dilation, groups, layout, algorithm, precision, activation, device,
                raw_workspace_limit() if workspace_limit is None else workspace_limit,
            )  # fmt: skip
            call = _conv_calls.get(key)
        except (TypeError, AttributeError, RuntimeError):
            key = None  # arrays of several libraries, or a list; the slow path sorts it out
    if call is None:
        if any(arrays_of(array) is None for array in (x, w, *(() if bias is None else (bias,)))):
            if out is not None:
                raise TypeError("out is taken for arrays of NumPy, CuPy and PyTorch only")
            result = conv2d(
                *_carried_operands(x, w, bias), stride, padding, dilation, groups,
                layout=layout, algorithm=algorithm, precision=precision, activation=activation, device=device,
                workspace_limit=workspace_limit,
            )  # fmt: skip
            return give_back(result, x)
        described = describe_conv2d(
            x, w, bias, stride, padding, dilation, groups, layout=layout, algorithm=algorithm, precision=precision,
            activation=activation, out=out, device=device, workspace_limit=workspace_limit,
        )  # fmt: skip
        call = _bind(described, x, w, bias, out)
        if key is not None:
            _remember(_conv_calls, key, call)
    return call(x, w, bias, out)


def filter2d(
    image: Array,
    kernel: Any,
    *,
    border: str = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Correlate images with one small kernel, as ``cv2.filter2D`` does; the result is as large as the image.

    ``y[i,j] = delta + sum over u,v of kernel[u,v] * image[i + u - anchor_y, j + v - anchor_x]``

    Args:
        image: array (..., height, width), float32 or int32 (the CPU takes float64 too); leading axes are a batch.
            Rows may lie apart: a crop of a larger image is read in place.
        kernel: array (kh, kw) of the same dtype, up to 32x32 on the GPU. With an image on the GPU it may be a NumPy
            array; a copy on the GPU is then kept for each content, for the first 256 of them.
        border: what lies outside the image ``a b c d``: ``"constant"`` ``v|abcd|v``, ``"replicate"`` ``a|abcd|d``,
            ``"reflect"`` ``ba|abcd|dc``, ``"reflect101"`` ``cb|abcd|cb``, ``"wrap"`` ``cd|abcd|ab``. SciPy's names
            (``nearest``, ``mirror``, ``grid-mirror``, ``grid-wrap``, ``grid-constant``) and OpenCV's
            (``BORDER_REFLECT_101``, ...) are taken too; see `arguments.BORDER_ALIASES`.
        value: the constant border's pixel.
        anchor: (row, column) of the kernel element that lies on the output pixel, by default (kh // 2, kw // 2).
        delta: added to every output pixel.
        out: array for the result; must not share memory with the inputs.
        device: ``"cuda"`` or ``"cuda:1"`` runs NumPy arrays on that GPU and waits for the result.

    Returns:
        Array of the image's shape, dtype and library, computed on the caller's current stream; ``out`` if given.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    The kernel is not flipped; ``kernel[::-1, ::-1]`` makes it a convolution. PyTorch's CPU tensors are filtered by the
    NumPy engine.

    >>> import numpy as np
    >>> filter2d(np.arange(4, dtype=np.float32)[None], np.ones((1, 3), np.float32), border="replicate").tolist()
    [[1.0, 3.0, 6.0, 8.0]]
    """
    arrays = arrays_of(image)
    call = key = None
    if arrays is not None:
        if type(kernel) is np.ndarray:
            kernel = _kernel_beside(image, kernel)
        signature = arrays.signature
        try:
            key = (
                type(image), signature(image), type(kernel), signature(kernel),
                None if out is None else (type(out), signature(out)),
                border, anchor, device,
            )  # fmt: skip
            call = _filter_calls.get(key)
        except (TypeError, AttributeError, RuntimeError):
            key = None
    if call is None:
        if any(arrays_of(array) is None for array in (image, kernel)):
            if out is not None:
                raise TypeError("out is taken for arrays of NumPy, CuPy and PyTorch only")
            result = filter2d(
                _carried(image, "image"), _carried(kernel, "kernel"), border=border, value=value, anchor=anchor,
                delta=delta, device=device,
            )  # fmt: skip
            return give_back(result, image)
        described = describe_filter2d(image, kernel, border=border, anchor=anchor, out=out, device=device)
        call = _bind(described, image, kernel, None, out)
        if key is not None:
            _remember(_filter_calls, key, call)
    # NOTE: 0.0 and False are no int, and a launch packs the numbers of an int32 image as int32
    if type(value) is not int or type(delta) is not int or value or delta:
        assert arrays is not None  # a carried image has returned above
        dtype = arrays.dtype(image)
        value, delta = arguments.scalar("value", value, dtype), arguments.scalar("delta", delta, dtype)
    return call(image, kernel, None, out, value, delta)


def describe_conv2d(
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
    """Check the arguments of a `conv2d` call and say what it computes and where. Raises as `conv2d` does."""
    x, w, bias = _carried_operands(x, w, bias)
    arrays, home = _one_library({"x": x, "w": w, "bias": bias, "out": out})
    if layout is not None:
        arguments.one_of("layout", layout, arguments.LAYOUTS)
    given = {name: arrays.dtype(array) for name, array in (("x", x), ("w", w), ("bias", bias)) if array is not None}
    dtype = arguments.check_dtypes(given)
    x_shape, w_shape = tuple(x.shape), tuple(w.shape)
    keeps_logical_shape = isinstance(arrays, TorchArrays)
    if keeps_logical_shape and layout is None and len(x_shape) == 4:
        layout = "NHWC" if arrays.is_contiguous(x, True) and not arrays.is_contiguous(x) else "NCHW"
    layout = layout or "NCHW"
    if layout == "NHWC" and not keeps_logical_shape and len(x_shape) == len(w_shape) == 4:
        x_shape, w_shape = (tuple(shape[i] for i in (0, 3, 1, 2)) for shape in (x_shape, w_shape))
    problem = arguments.conv_problem(
        x_shape, w_shape, None if bias is None else tuple(bias.shape), stride, padding, dilation, groups,
        dtype=dtype, layout=layout, precision=precision, activation=activation,
    )  # fmt: skip
    shape = (problem.n, problem.k, problem.p, problem.q) if keeps_logical_shape else problem.y_shape
    if out is not None:
        calls.check_out(arrays, out, shape, dtype, home)
    channels_last = keeps_logical_shape and layout == "NHWC"
    return Described(
        arrays=arrays,
        problem=problem,
        device=_place(arrays, home, device),
        home=home,
        algorithm=algorithm,
        workspace_limit=arguments.workspace_limit(workspace_limit),
        shape=shape,
        channels_last=channels_last,
        copies=(
            not _readable(arrays, x, channels_last),
            not _readable(arrays, w, channels_last),
            bias is not None and not _readable(arrays, bias),
        ),
        out_direct=out is None or _readable(arrays, out, channels_last),
    )


def describe_filter2d(
    image: Any, kernel: Any, *, border: Any = "reflect101", anchor: Any = None, out: Any = None, device: Any = None
) -> Described:
    """Check the arguments of a `filter2d` call and say what it computes and where. Raises as `filter2d` does."""
    image, kernel = _carried(image, "image"), _carried(kernel, "kernel")
    kernel = _kernel_beside(image, kernel)
    names = {"image": image, "kernel": kernel}
    arrays, home = _one_library({**names, "out": out})
    dtype = arguments.check_dtypes({name: arrays.dtype(array) for name, array in names.items()})
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


def _one_library(given: dict[str, Any]) -> tuple[Arrays, int | None]:
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


def _readable(arrays: Arrays, array: Any, channels_last: bool = False) -> bool:
    """Whether a kernel can use the array as it lies."""
    return arrays.is_contiguous(array, channels_last) and arrays.misalignment(array) % ALIGNMENT == 0


def _row_pitched(arrays: Arrays, array: Any, dtype: str) -> tuple[int, int] | None:
    """Row pitch and image step where a filter can use the array as it lies, else None."""
    item = ITEM_BYTES[dtype]
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


def _bind(described: Described, x: Any, w: Any, bias: Any, out: Any) -> calls.Call:
    """Choose, compile and load what a described call needs. The arrays stand for all that lie like them."""
    arrays, problem, names = described.arrays, described.problem, described.names
    empty = calls.is_empty(problem)
    if described.device is not None:
        ready = None
        if empty:  # nothing to compile, but what nothing could run is refused all the same
            registry.choose(problem, described.algorithm, registry.ALGORITHMS, described.workspace_limit)
        else:
            ready = calls.ready(problem, described.device, described.algorithm, described.workspace_limit)
        if described.home is None:
            return calls.HostOnGpuCall(problem, ready, described.shape, names)
        return calls.GpuCall(
            arrays, described.device, problem, ready, described.shape, given=(x, w, bias, out), names=names,
            channels_last=described.channels_last, copies=described.copies, out_direct=described.out_direct,
        )  # fmt: skip
    if isinstance(arrays, TorchArrays) and isinstance(problem, ConvProblem):
        calls.check_torch_algorithm(described.algorithm)
        return calls.TorchCpuConv(arrays, problem)
    chosen = registry.choose(problem, described.algorithm, registry.CPU_ALGORITHMS, described.workspace_limit)
    return calls.CpuCall(arrays, problem, None if empty else chosen, described.shape, names)


def _remember(known: dict[Any, calls.Call], key: Any, call: calls.Call) -> None:
    if len(known) >= _MAX_CALLS:
        known.clear()
    known[key] = call


def _carried(array: Any, name: str) -> Any:
    return array if arrays_of(array) is not None else carry(array, name)


def _carried_operands(x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
    return _carried(x, "x"), _carried(w, "w"), None if bias is None else _carried(bias, "bias")


_kernels: dict[Any, Any] = {}
#: NOTE: kept kernels are never dropped, since a captured graph may read them; so their number is bounded
_MAX_KERNELS = 256


def _kernel_beside(image: Any, kernel: Any) -> Any:
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


def forget() -> None:
    """Drop every ready call, so that the next one chooses anew. For tests, and after tuning."""
    _conv_calls.clear()
    _filter_calls.clear()
    calls.forget()
