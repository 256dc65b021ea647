"""What is launched where: the GPU, the launches of an algorithm and their arguments. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

#: Compile-time numbers of a kernel, in order: int and bool become ``static constexpr``, str becomes a type alias.
Constants = tuple[tuple[str, int | bool | str], ...]


#: Kernels may assume that every array starts at a multiple of this many bytes (one 128-bit load). NOTE: all but the
#: image and the result of a filter, which may be crops of larger ones and start at any element.
ALIGNMENT = 16


@dataclass(frozen=True)
class Target:
    """The GPU a plan is made for: its capabilities, its sizes in bytes, and the figures from which speed is predicted.

    ``arch`` is the name the compiler takes (``sm_90a``).
    """

    arch: str
    multiprocessors: int
    shared_per_block: int = 99 * 1024
    shared_per_multiprocessor: int = 100 * 1024
    registers_per_multiprocessor: int = 65536
    #: that memory moves in a clock cycle; 2100 are those of an H200's copies at 1.98 GHz
    bytes_per_cycle: int = 2100
    #: a GeForce, whose tensor cores sum in float32 at half speed
    consumer: bool = False
    #: the GPU's name, whose tables of tuned problems hold; without one there are none
    model: str = ""

    @cached_property
    def capability(self) -> int:
        """Compute capability, ten times the major number plus the minor one: 90 for ``sm_90a``."""
        return int("".join(filter(str.isdigit, self.arch)))

    @property
    def clusters(self) -> bool:
        """Whether neighbouring blocks can share memory: thread block clusters, from compute capability 9.0 on."""
        return self.capability >= 90

    @property
    def most_in_cluster(self) -> int:
        """Most blocks of a cluster: 8 on every GPU that has them, 16 where a processing cluster is that large."""
        return 16 if self.capability in (90, 100, 103) else 8 if self.clusters else 1

    @property
    def register_pools(self) -> bool:
        """Whether warps can pass registers to others: on the variants of architectures from 9.0 on (``sm_90a``)."""
        return self.clusters and self.arch.endswith("a")

    @property
    def warpgroup_products(self) -> bool:
        """Whether warpgroups multiply matrices asynchronously (wgmma): on ``sm_90a`` alone."""
        return self.register_pools and self.capability == 90

    @property
    def warp_products(self) -> bool:
        """Whether the tensor cores multiply float16 and bfloat16, 16 x 8 x 16, for a warp (mma.sync): from 8.0 on."""
        return self.capability >= 80

    @property
    def rounds_to_tf32(self) -> bool:
        """Whether an instruction rounds float32 to TF32, to the nearest, ties to even: from 9.0 on."""
        return self.capability >= 90

    @property
    def tensor_flops(self) -> int:
        """Dense float16 flops, summed in float32, that the tensor cores of a multiprocessor compute in a clock cycle.

        As documented: consumer cards have half as many as others of their capability.
        """
        flops = {80: 2048, 90: 4096, 100: 8192, 103: 8192}.get(self.capability, 1024)
        return flops // 2 if self.consumer else flops

    @property
    def fma_lanes(self) -> int:
        """Float32 multiply-adds that a multiprocessor starts in a clock cycle."""
        return 64 if self.capability == 80 else 128


@dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of the operand, or the scratch memory, that has this ``role``.

    Operands have the roles of `Problem.operands` (``x``, ``w``, ``bias``, ``y``, ``dy``, ``dx``, ``dw``); ``workspace``
    and ``prepared`` are a plan's own memory. ``element`` is the C++ type pointed to. A pointer ``beside`` another one
    is no argument of the kernel's function by itself: it is handed over with that one, as an ``Epilogue``
    (device/epilogue.cuh).
    """

    role: str
    element: str = "float"
    written: bool = False
    beside: str = ""

    @property
    def name(self) -> str:
        """What the kernel calls it."""
        return self.role

    @property
    def ctype(self) -> str:
        """Its C++ type."""
        return f"{self.element}*" if self.written else f"const {self.element}*"


@dataclass(frozen=True)
class Number:
    """A kernel parameter passed by value: fixed by the plan without being compiled in, like the batch, or, with
    ``value`` None, given by name at each call (``value`` and ``delta`` of filters)."""

    ctype: str
    name: str
    value: int | float | None = None


#: Element types that a tensor map may have, with their bytes; the driver knows them by other names.
MAP_ELEMENTS = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
}  # fmt: skip
#: Corners of an im2col map, smallest and largest, by the map's rank.
MAP_CORNERS = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}


@dataclass(frozen=True)
class TensorMap:
    """One kernel parameter of 128 bytes: how bulk copies between shared memory and the array of ``role`` walk over it.

    Axes are in the order of the driver and of a copy's coordinates: the innermost one first, (c, w, h, n) for NHWC.
    ``strides`` are the bytes from one index to the next of all axes but the innermost, whose elements are neighbours.
    What a copy reaches outside ``shape`` reads as zeros, and is not written.

    A tiled map has a ``box``: the extents that a copy walks over. An im2col map has corners for its axes between the
    innermost (channels) and the outermost (images): pixel positions go from ``lower`` to ``shape - 1 + upper``, in that
    order of axes, w first, and on to the next image; a copy brings ``channels`` of ``pixels`` positions. For a
    convolution with padding p, filter extent s and dilation d, lower = -p and upper = p - (s - 1) * d, and a copy's
    offset is the filter's position times d.

    ``traversal`` is the step along each axis, 1 where it is left out: a box takes only every ``traversal``-th element;
    it is the stride of a convolution. ``swizzle`` is the span in bytes within which a copy permutes units of 16 bytes
    of shared memory, 0 for none. ``promotion`` is how many bytes L2 fetches at once, 0 for what the copy reads.
    ``written`` says that the kernel stores through the map. ``suffix`` distinguishes maps of one role.
    """

    role: str
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0
    traversal: tuple[int, ...] = ()
    swizzle: int = 0
    promotion: int = 0
    written: bool = False
    suffix: str = "map"

    @property
    def name(self) -> str:
        """The parameter's name: ``x_map``."""
        return f"{self.role}_{self.suffix}"

    @property
    def ctype(self) -> str:
        """The parameter's C++ type (ptx/tma.cuh)."""
        return "const __grid_constant__ leanconv::TensorMap"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def element_bytes(self) -> int:
        return MAP_ELEMENTS[self.element]

    @property
    def im2col(self) -> bool:
        """Whether copies walk over pixels instead of a box."""
        return not self.box

    @property
    def steps(self) -> tuple[int, ...]:
        """``traversal``, with the ones that it leaves out."""
        return self.traversal or (1,) * self.rank

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements that a copy puts into shared memory, along each axis, the innermost first; (channels, pixels)."""
        if self.im2col:
            return self.channels, self.pixels
        return tuple(-(-extent // step) for extent, step in zip(self.box, self.steps, strict=True))

    @property
    def copy_bytes(self) -> int:
        """Bytes of shared memory that a copy fills, zeros included: what its barrier has to expect."""
        return prod(self.extents) * self.element_bytes

    def why_not(self) -> list[str]:
        """Sentences, one for each rule of the driver or of this project that the map breaks; empty if valid."""
        if self.element not in MAP_ELEMENTS:
            return [f"element={self.element!r} is not among {', '.join(MAP_ELEMENTS)}"]
        reasons = list(self._why_not_axes())
        reasons = reasons or list(self._why_not_im2col() if self.im2col else self._why_not_tiled())
        reasons = reasons or list(self._why_not_shared())
        if self.promotion not in (0, 64, 128, 256):
            reasons.append(f"promotion={self.promotion} is none of 0, 64, 128 and 256 bytes")
        return reasons

    def _why_not_axes(self) -> Iterator[str]:
        least = 3 if self.im2col else 1
        if not least <= self.rank <= 5:
            mode = "an im2col map" if self.im2col else "a tiled map"
            yield f"shape={self.shape} has {self.rank} axes; {mode} has {least} to 5"
            return
        if len(self.strides) != self.rank - 1:
            yield f"strides={self.strides} are not those of all axes of shape={self.shape} but the innermost"
        if self.traversal and len(self.traversal) != self.rank:
            yield f"traversal={self.traversal} has not one step for each axis of shape={self.shape}"
        if not all(1 <= size <= 2**31 for size in self.shape):
            yield f"shape={self.shape} has an extent that is not within 1 and 2^31"
        if not all(0 < stride < 2**40 and stride % 16 == 0 for stride in self.strides):
            yield f"strides={self.strides} are not all multiples of 16 bytes, positive and below 2^40"
        if not all(1 <= step <= 8 for step in self.traversal):
            yield f"traversal={self.traversal} has a step that is not within 1 and 8"
        if self.steps[0] != 1:
            yield f"traversal={self.traversal}: the machine ignores the step of the innermost axis; it must be 1"

    def _why_not_tiled(self) -> Iterator[str]:
        if len(self.box) != self.rank:
            yield f"box={self.box} has not one extent for each axis of shape={self.shape}"
            return
        if not all(1 <= extent <= 256 for extent in self.box):
            yield f"box={self.box} has an extent that is not within 1 and 256"
        for name in ("lower", "upper", "channels", "pixels"):
            if value := getattr(self, name):
                yield f"{name}={value} is for im2col maps; this one has box={self.box}"

    def _why_not_im2col(self) -> Iterator[str]:
        least, most = MAP_CORNERS[self.rank]
        corners = True
        for name, corner in (("lower", self.lower), ("upper", self.upper)):
            fits = len(corner) == self.rank - 2
            if not fits:
                yield f"{name}={corner} has not one number for each of the {self.rank - 2} axes of pixels"
            elif not all(least <= value <= most for value in corner):
                fits = False
                yield f"{name}={corner} is not within {least} and {most}, for a map of {self.rank} axes"
            corners = corners and fits
        axes = zip(self.shape[1:-1], self.lower, self.upper, strict=False)
        if corners and not all(size + high - low >= 1 for size, low, high in axes):
            yield f"lower={self.lower} and upper={self.upper} leave no pixel of shape={self.shape}"
        if not 1 <= self.channels <= 256:
            yield f"channels={self.channels} is not within 1 and 256"
        if not 1 <= self.pixels <= 1024:
            yield f"pixels={self.pixels} is not within 1 and 1024"
        if self.steps[-1] != 1:
            yield f"traversal={self.traversal}: the step from image to image must be 1"
        if self.written:
            yield "written=True: stores through an im2col map are not wrapped"

    def _why_not_shared(self) -> Iterator[str]:
        row = self.extents[0] * self.element_bytes
        if row % 16:
            yield f"{self.extents[0]} innermost elements of {self.element} are {row} bytes, no multiple of 16"
        if self.swizzle not in (0, 32, 64, 128):
            yield f"swizzle={self.swizzle} is none of 0, 32, 64 and 128 bytes"
        elif self.swizzle and row != self.swizzle:
            # the driver takes narrower rows too, and documents no layout for them
            yield f"swizzle={self.swizzle} needs rows of as many bytes, and the innermost elements have {row}"
        if self.copy_bytes >= 2**20:
            yield f"a copy has {self.copy_bytes} bytes, and a barrier can expect {2**20 - 1}"


Argument = Pointer | Number | TensorMap


def role_of(argument: Argument) -> str | None:
    """What is given for it at each call, by role or name; None for a number that the plan fixes."""
    if isinstance(argument, Number):
        return argument.name if argument.value is None else None
    return argument.role


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what to compile and how to start it.

    ``function`` is a device function template over <Problem, Tuning>, in ``header``: a path below ``kernels/``, or an
    absolute one. The compiled symbol is its name without the namespace.
    """

    header: str
    function: str
    problem: Constants
    tuning: Constants
    arguments: tuple[Argument, ...]
    grid: int
    block: int
    shared_bytes: int = 0
    #: blocks that must fit on a multiprocessor: bounds the registers of a thread
    min_blocks: int = 1
    #: neighbouring blocks that see each other's shared memory; ``grid`` is a multiple of it
    cluster: int = 1
    #: its blocks may be started while the launch before it still runs; they wait for its end before they do anything,
    #: unless the launch ``waits``
    early: bool = False
    #: an early launch that waits by itself, before it needs what the launches before it do (``griddepcontrol_wait``)
    waits: bool = False
    #: lets an early launch behind it start as soon as all its own blocks run
    opens: bool = False

    @property
    def symbol(self) -> str:
        """Name of the entry point in the cubin."""
        return self.function.rsplit("::", 1)[-1]


def in_chain(launches: Iterable[Launch]) -> tuple[Launch, ...]:
    """The launches such that each is started early: saves the time between them.

    Programmatic dependent launch, from compute capability 9.0 and CUDA 12.4 on. The first launch of a call is ordinary.
    """
    chain = tuple(launches)
    last = len(chain) - 1
    return tuple(replace(launch, early=i > 0, opens=i < last) for i, launch in enumerate(chain))


@dataclass(frozen=True)
class Plan:
    """The launches that compute a problem, in order, and the scratch memory they share.

    ``prepare`` runs before ``launches``, reads nothing but ``w`` and writes nothing but ``prepared``, which
    ``launches`` only read: done once, it serves every later call with the same filters. A call that finds nothing
    prepared runs both, or ``unprepared``, where a plan has launches that do both in less time.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    prepare: tuple[Launch, ...] = ()
    prepared_bytes: int = 0
    unprepared: tuple[Launch, ...] = ()

    @property
    def every_launch(self) -> tuple[Launch, ...]:
        """What a call runs that finds nothing prepared."""
        return self.unprepared if self.unprepared and self.prepare else self.prepare + self.launches

    @property
    def all_launches(self) -> tuple[Launch, ...]:
        """What calls run that find nothing prepared, and those that find packed weights."""
        return tuple(dict.fromkeys(self.prepare + self.launches + self.unprepared))

    @property
    def roles(self) -> tuple[str, ...]:
        """What is given at each call, in the order of its first use: pointers by role, numbers by name."""
        each = (a for launch in self.every_launch for a in launch.arguments)
        return tuple(dict.fromkeys(role for a in each if (role := role_of(a)) is not None))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The operands that it writes."""
        each = (a for launch in self.every_launch for a in launch.arguments)
        written = dict.fromkeys(a.role for a in each if not isinstance(a, Number) and a.written)
        return tuple(role for role in written if role not in ("workspace", "prepared"))
