"""Ready calls: one class for each place where a call can run.

A ready call holds all that the shapes determine. To run it again is to take the pointers, allocate the output and
launch. `lookup` finds it by the arrays' signatures and the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from leanconv import words
from leanconv.arrays import Arrays, MemoryOrder
from leanconv.arrays.memory import overlaps, share_memory
from leanconv.arrays.operands import Epilogue
from leanconv.call.choose import Candidate
from leanconv.call.resolve import Resolved
from leanconv.call.weights import preparation_of, refuse_null
from leanconv.dtypes import item_bytes
from leanconv.plan import ALIGNMENT, Plan
from leanconv.problem import Problem
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.launch import Device, Executable


class Call(Protocol):
    """A ready call. For filter2d, ``w`` is the kernel and there is no bias."""

    #: of image, sums and result, by which the numbers of a filter are checked
    types: tuple[str, str, str]

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """Run; returns ``out`` or a new array."""


def types_of(problem: Problem) -> tuple[str, str, str]:
    """As `Call.types`; of a layer, which takes no numbers, it is all one type."""
    return (problem.dtype,) * 3 if problem.kind == "conv2d" else (problem.dtype, problem.sums, problem.result)


def roles_of(problem: Problem) -> tuple[str, ...]:
    """The order in which ready calls give values to a plan: x, w, bias and result; the numbers of filters, or scale and
    residual of layers; scratch memory."""
    first, second, *_, written = problem.operands
    beside = ("scale", "add") if is_fused(problem) else ()
    return first.role, second.role, "bias", written.role, *problem.scalars, *beside, "workspace", "prepared"


def is_fused(problem: Problem) -> bool:
    """Whether a layer reads more than a bias beside x and w."""
    return problem.kind == "conv2d" and (problem.scale or problem.add)


def writes_bias(problem: Problem) -> bool:
    """Whether ``bias`` is no operand that is read, but where the gradient of the bias goes: contiguous, and new."""
    return problem.kind == "conv2d" and problem.op == "wgrad" and problem.bias


@dataclass(frozen=True)
class Loaded:
    """What was chosen for a problem on a GPU; its kernels are compiled and loaded on first use."""

    problem: Problem
    choice: Candidate
    plan: Plan
    device: Device
    _made: dict[str, Executable] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def run(self) -> Executable:
        """The whole plan; values in the order of `roles_of`."""
        return self._executable("run", self.plan)

    @property
    def run_prepared(self) -> Executable:
        """The plan without what prepares filters."""
        return self._executable("run_prepared", replace(self.plan, prepare=(), prepared_bytes=0))

    def _executable(self, name: str, plan: Plan) -> Executable:
        # NOTE: functools.cached_property holds one lock for all objects until Python 3.12: calls of different shapes
        # would compile one after the other
        made = self._made.get(name)
        if made is None:
            try:
                made = self._made[name] = self.device.executable(plan, roles_of(self.problem))
            except CudaUnavailableError as error:
                raise CudaUnavailableError(
                    f"{words.format_problem(self.problem)} cannot be compiled: {error}"
                ) from error
        return made

    def prepares(self, resolved: Resolved) -> bool:
        """Whether filters that keep their preparation save anything."""
        return not self.problem.is_empty and (bool(self.plan.prepare) or resolved.operands.copies[1])


def check_overlap(arrays: Arrays, out: Any, inputs: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError where ``out`` cannot be written, or shares memory with an input."""
    itemsize = item_bytes(arrays.dtype(out))
    if not arrays.writeable(out):
        raise ValueError("out is read-only")
    low, high = arrays.extent(out, itemsize)
    start = arrays.pointer(out)
    for name, array in inputs:
        if array is not None:
            item = array.itemsize  # of a kernel any real type
            a, b = arrays.extent(array, item)
            at = arrays.pointer(array)
            near = low < high and a < b and overlaps((start + low, start + high), (at + a, at + b))
            shapes = (start, out.shape, arrays.strides(out)), (at, array.shape, arrays.strides(array))
            if near and share_memory(*shapes, itemsize, item):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


class QuickLaunch(NamedTuple):
    """What a call consists of whose arrays are known to be like those before, on the GPU that is current.

    ``run(stream(), (x, w, bias, y, workspace, prepared), True)``, with addresses, of a ``y`` by ``allocate``. Where
    ``copies``, that of the image is one of a copy in this memory ``order``. What ``scratch`` allocates, if anything, is
    the workspace, and ``prepared_offset`` bytes behind its begin, if that is said, is where filters are prepared.
    """

    copies: bool
    order: MemoryOrder
    device: int
    stream: Callable[[], int]
    allocate: Callable[[], Any]
    run: Executable
    scratch: Callable[[], Any] | None
    prepared_offset: int | None


class GpuCall:
    """On arrays on a GPU: nothing is copied, except inputs that no kernel can read in place."""

    def __init__(self, resolved: Resolved, loaded: Loaded, *, prepares: bool = True) -> None:
        """Arrays of later calls have the same shapes, memory order and device as those of ``resolved``.

        Without ``prepares`` the caller passes packed weights: they are read in place, and they belong to leanconv
        alone, so they cannot overlap out.
        """
        operands, problem, device = resolved.operands, resolved.problem, resolved.device
        arrays = operands.arrays
        assert device is not None
        copy_x, copy_w, copy_bias = resolved.operands.copies
        w = operands.w if prepares or not copy_w else None
        given = (operands.x, w, operands.bias, operands.out)
        self._arrays, self._names = arrays, operands.names
        self._order, self._w_order, self.types = operands.order, operands.w_order, types_of(problem)
        # filters of images are converted to the type of the sums
        self._cast = operands.w_dtype if problem.kind == "filter2d" and copy_w else None
        self._pointer, self.stream = arrays.fast_pointer(), arrays.fast_stream(device)
        self._result = resolved.shape, operands.result, device, operands.out_order
        self._allocate = arrays.allocator(*self._result)
        self._copies = copy_x, copy_w and prepares, copy_bias
        self._copy_any, self._out_direct = any(self._copies), resolved.operands.out_direct
        self._gradients = any(array is not None and arrays.requires_gradient(array) for array in given)
        self._items = tuple(0 if array is None else item_bytes(arrays.dtype(array)) for array in given)
        self._extents = tuple(
            None if array is None else arrays.extent(array, item)
            for array, item in zip(given, self._items, strict=True)
        )
        self._shapes = tuple(((), ()) if array is None else (array.shape, arrays.strides(array)) for array in given)
        workspace, prepared = loaded.plan.workspace_bytes, loaded.plan.prepared_bytes if prepares else 0
        # one allocation for both: workspace first, then the packed weights
        self._prepared_offset = -(-workspace // ALIGNMENT) * ALIGNMENT if prepared else None
        scratch = (self._prepared_offset or workspace) + prepared
        self._scratch = ((-(-scratch // 4),), "float32", device) if scratch else None
        self._allocate_scratch = None if self._scratch is None else arrays.allocator(*self._scratch)
        self._run = None if problem.is_empty else loaded.run if prepares else loaded.run_prepared
        self._bias_gradient = writes_bias(problem)
        #: whether value and delta are given to the plan, of a fused layer the addresses of scale and residual
        self._scalars = bool(problem.scalars) or is_fused(problem)

    def __call__(
        self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0, prepared_at: int = 0
    ) -> Any:
        """As `Call`. ``prepared_at`` is the address of filters that the plan does not prepare itself."""
        if self._gradients:
            for array in (x, w, bias, out):
                if array is not None:
                    self._arrays.refuse_gradient(array)
        pointer = self._pointer
        x_at = pointer(x)
        w_at = pointer(w)
        bias_at = 0 if bias is None else pointer(bias)
        y = out
        if out is not None:
            self._refuse_overlap(pointer(out), ((self._names[0], x_at), (self._names[1], w_at), ("bias", bias_at)))
        if out is None or not self._out_direct:
            y = self._allocate()
        if self._run is not None:
            # NOTE: copies and scratch must stay bound to names until the launch; freed earlier, their memory could
            # be reused. Freed later it is safe, since the allocators follow the stream: what takes the memory next
            # runs behind the launch. In a capture PyTorch takes it from the graph's own pool, which lives as long as
            # the graph; CuPy has no such pool
            if self._copy_any:
                x, w, bias = self._copy(x, w, bias)
                x_at, w_at, bias_at = pointer(x), pointer(w), 0 if bias is None else pointer(bias)
            workspace_at = 0
            if self._allocate_scratch is not None:
                scratch = self._allocate_scratch()
                workspace_at = pointer(scratch)
                if self._prepared_offset is not None:
                    prepared_at = workspace_at + self._prepared_offset
                if not workspace_at:
                    refuse_null(self._arrays)
            y_at = pointer(y)
            if not (x_at and w_at and y_at):
                refuse_null(self._arrays)
            numbers = (value, delta) if self._scalars else ()
            self._run(self.stream(), (x_at, w_at, bias_at, y_at, *numbers, workspace_at, prepared_at))
        else:
            y[...] = 0  # it is empty, or the gradient of filters over no image
            if self._bias_gradient:
                bias[...] = 0
        if out is None or y is out:
            return y
        self._arrays.assign(out, y)
        return out

    def quick(self) -> QuickLaunch | None:
        """What runs this call of a layer on addresses; None where more is to be done than to copy the image, to
        allocate and to launch."""
        copies, *more = self._copies
        if self._run is None or any(more) or self._scalars:
            return None
        allocator = self._arrays.allocator_here
        return QuickLaunch(
            copies, self._order, self._result[2], self.stream, allocator(*self._result), self._run,
            None if self._scratch is None else allocator(*self._scratch), self._prepared_offset,
        )  # fmt: skip

    def _copy(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
        copy_x, copy_w, copy_bias = self._copies
        return (
            self._arrays.copy(x, self._order) if copy_x else x,
            self._arrays.cast(w, self._cast) if self._cast else self._arrays.copy(w, self._w_order) if copy_w else w,
            self._arrays.copy(bias) if copy_bias else bias,
        )

    def _refuse_overlap(self, out_at: int, inputs: Sequence[tuple[str, int]]) -> None:
        low, high = self._extents[3] or (0, 0)
        low, high = low + out_at, high + out_at
        # the fourth of each are those of out
        for (name, at), extent, shape, item in zip(inputs, self._extents, self._shapes, self._items, strict=False):
            near = extent is not None and low < at + extent[1] and at + extent[0] < high and self._run is not None
            if near and share_memory((out_at, *self._shapes[3]), (at, *shape), self._items[3], item):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


class FusedCall(GpuCall):
    """A layer that reads a scale or a residual too; ``bias`` is an `Epilogue`."""

    def __init__(self, resolved: Resolved, loaded: Loaded, *, prepares: bool = True) -> None:
        super().__init__(resolved, loaded, prepares=prepares)
        self._copies_beside = resolved.operands.copies_beside

    def __call__(
        self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0, prepared_at: int = 0
    ) -> Any:
        bias, scale, add = bias
        arrays, (copy_scale, copy_add) = self._arrays, self._copies_beside
        for array in (scale, add):
            if array is not None:
                arrays.refuse_gradient(array)
        if out is not None:
            check_beside_overlap(arrays, out, scale, add)
        # NOTE: copies stay bound to names until the launch, as in `GpuCall`
        scale = arrays.copy(scale) if copy_scale else scale
        add = arrays.copy(add, self._result[3]) if copy_add else add
        scale_at, add_at = (0 if each is None else self._pointer(each) for each in (scale, add))
        return super().__call__(x, w, bias, out, scale_at, add_at, prepared_at)


def check_beside_overlap(arrays: Arrays, out: Any, scale: Any, add: Any) -> None:
    """Raise ValueError where ``out`` shares memory with scale or residual; but it may be the residual itself, of which
    each element is read before it is written."""
    same = add is not None and arrays.pointer(add) == arrays.pointer(out)
    same = same and tuple(arrays.strides(add)) == tuple(arrays.strides(out))
    check_overlap(arrays, out, (("scale", scale), ("add", None if same else add)))


def check_out(arrays: Arrays, names: tuple[str, str], x: Any, w: Any, bias: Any, out: Any) -> None:
    """Raise ValueError where ``out`` cannot be written, or shares memory with what a call reads, but for the residual;
    ``bias`` is an `Epilogue` where there is one."""
    if type(bias) is Epilogue:
        check_beside_overlap(arrays, out, bias.scale, bias.add)
        bias = bias.bias
    check_overlap(arrays, out, ((names[0], x), (names[1], w), ("bias", bias)))


def gpu_call(resolved: Resolved, loaded: Loaded, *, prepares: bool = True) -> GpuCall:
    """The ready call of a problem on arrays of a GPU."""
    return (FusedCall if is_fused(resolved.problem) else GpuCall)(resolved, loaded, prepares=prepares)


class PreparedCall:
    """On arrays of a GPU with filters that keep their preparation: a plan's ``launches`` alone."""

    def __init__(self, resolved: Resolved, loaded: Loaded) -> None:
        assert resolved.device is not None
        self._arrays = resolved.operands.arrays
        self._gradient = self._arrays.requires_gradient(resolved.operands.w)
        self.preparation = preparation_of(
            loaded.device, resolved.device, loaded.plan, resolved.operands.copies[1], resolved.operands.w_order
        )
        self._whole, self._rest = gpu_call(resolved, loaded), gpu_call(resolved, loaded, prepares=False)
        self.types = self._whole.types
        w = resolved.operands.w
        copied = item_bytes(self._arrays.dtype(w)) * math.prod(w.shape) if self.preparation.copy else 0
        #: bytes that filters keep for it
        self.kept_bytes = self.preparation.plan.prepared_bytes + copied

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        if self._gradient:
            self._arrays.refuse_gradient(w.array)
        prepared = w.prepared_by(self.preparation, self._arrays)
        if prepared is None:
            return self._whole(x, w.array, bias, out)
        return self._rest(x, prepared.w, bias, out, prepared_at=prepared.address)

    def quick(self) -> QuickLaunch | None:
        """As `GpuCall.quick`, with filters that `PreparedWeights.kept_for` has."""
        return None if self.preparation.copy else self._rest.quick()


class BiasGradientCall:
    """The gradient of the filters and that of the bias, which is allocated here and written by the call."""

    def __init__(self, call: Call, resolved: Resolved) -> None:
        assert resolved.problem.kind == "conv2d"
        operands = resolved.operands
        self._call, self.types = call, call.types
        self._allocate = operands.arrays.allocator((resolved.problem.k,), operands.result, operands.device)

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        bias = self._allocate()
        return self._call(x, w, bias, out), bias


class UnpreparedCall:
    """With `PreparedWeights` that keep nothing for this call: it runs on their array."""

    def __init__(self, call: Call) -> None:
        self._call, self.types = call, call.types

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        return self._call(x, w.array, bias, out)

    def quick(self) -> QuickLaunch | None:
        """As `GpuCall.quick`, with the address of that array."""
        return self._call.quick() if isinstance(self._call, GpuCall) else None
