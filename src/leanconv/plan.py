"""What is launched where: the GPU, the launches of an algorithm and their arguments. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

#: Compile-time numbers of a kernel, in order: int and bool become ``static constexpr``, str becomes a type alias.
Constants = tuple[tuple[str, int | bool | str], ...]


@dataclass(frozen=True)
class Target:
    """The GPU a plan is made for: its capabilities, its sizes in bytes, and what its speed is predicted from.

    ``arch`` is the name the compiler takes (``sm_90a``).
    """

    arch: str
    multiprocessors: int
    shared_per_block: int = 99 * 1024
    shared_per_multiprocessor: int = 100 * 1024
    registers_per_multiprocessor: int = 65536
    #: that memory moves in a clock cycle; an H200's 4.2 TB/s measured, at 1.98 GHz, are 2100
    bytes_per_cycle: int = 2100

    @cached_property
    def capability(self) -> int:
        """Compute capability, ten times the major number plus the minor one: 90 for ``sm_90a``."""
        return int("".join(filter(str.isdigit, self.arch)))

    @property
    def clusters(self) -> bool:
        """Whether neighbouring blocks can share memory: thread block clusters, from compute capability 9.0 on."""
        return self.capability >= 90

    @property
    def register_pools(self) -> bool:
        """Whether warps can pass registers to others: on the variants of architectures from 9.0 on (``sm_90a``)."""
        return self.clusters and self.arch.endswith("a")

    @property
    def tensor_maps(self) -> bool:
        """Whether bulk copies follow tensor maps, from compute capability 9.0 on."""
        return self.capability >= 90

    @property
    def fma_lanes(self) -> int:
        """Float32 multiply-adds that a multiprocessor starts in a clock cycle."""
        return 64 if self.capability == 80 else 128


@dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of the operand, or the scratch memory, that has this ``role``.

    Operands have the roles of `Problem.operands` (``x``, ``w``, ``bias``, ``y``, ``dy``, ``dx``); ``workspace`` and
    ``prepared`` are a plan's own memory. ``element`` is the C++ type pointed to.
    """

    role: str
    element: str = "float"
    written: bool = False

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


Argument = Pointer | Number


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what to compile and how to start it.

    ``function`` is a device function template over <Problem, Tuning>, in ``header`` below ``kernels/``. The compiled
    symbol is its name without the namespace.
    """

    header: str
    function: str
    problem: Constants
    tuning: Constants
    arguments: tuple[Argument, ...]
    grid: int
    block: int
    shared_bytes: int = 0
    #: blocks that shall fit on a multiprocessor: bounds the registers a thread may take
    min_blocks: int = 1
    #: neighbouring blocks that see each other's shared memory; ``grid`` is a multiple of it
    cluster: int = 1

    @property
    def symbol(self) -> str:
        """Name of the entry point in the cubin."""
        return self.function.rsplit("::", 1)[-1]


@dataclass(frozen=True)
class Plan:
    """The launches that compute a problem, in order, and the scratch memory they share.

    ``prepare`` runs before ``launches``, reads nothing but ``w`` and writes nothing but ``prepared``, which
    ``launches`` only read: done once, it serves every later call with the same filters.
    """

    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    prepare: tuple[Launch, ...] = ()
    prepared_bytes: int = 0

    @property
    def every_launch(self) -> tuple[Launch, ...]:
        """What a call runs that finds nothing prepared."""
        return self.prepare + self.launches

    @property
    def roles(self) -> tuple[str, ...]:
        """What is given at each call, in the order of its first use: pointers by role, numbers by name."""
        each = (a for launch in self.every_launch for a in launch.arguments)
        return tuple(dict.fromkeys(a.name for a in each if isinstance(a, Pointer) or a.value is None))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The operands that it writes."""
        each = (a for launch in self.every_launch for a in launch.arguments)
        written = dict.fromkeys(a.name for a in each if isinstance(a, Pointer) and a.written)
        return tuple(role for role in written if role not in ("workspace", "prepared"))
