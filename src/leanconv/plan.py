"""What is launched where: the GPU, the launches of an algorithm and their arguments. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

#: Compile-time numbers of a kernel, in order: int and bool become ``static constexpr``, str becomes a type alias.
Constants = tuple[tuple[str, int | bool | str], ...]


@dataclass(frozen=True)
class Target:
    """The GPU a plan is made for, as far as a plan may depend on it.

    ``arch`` is the name the compiler takes (``sm_90a``); sizes are in bytes.
    """

    arch: str
    multiprocessors: int
    shared_per_block: int = 99 * 1024
    shared_per_multiprocessor: int = 100 * 1024
    registers_per_multiprocessor: int = 65536

    @property
    def register_pools(self) -> bool:
        """Whether warps can pass registers to others: on the variants of architectures from 9.0 on (``sm_90a``)."""
        return self.clusters and self.arch.endswith("a")

    @property
    def clusters(self) -> bool:
        """Whether neighbouring blocks can share memory: thread block clusters, from compute capability 9.0 on."""
        return int("".join(filter(str.isdigit, self.arch))) >= 90


@dataclass(frozen=True)
class Argument:
    """One kernel parameter.

    ``ctype`` is its C++ type. With ``value`` None it is bound by name at each call (``x``, ``w``, ``bias``, ``y``,
    ``workspace``, ``prepared``, ``value``, ``delta``); otherwise it is a number that the plan fixes without compiling
    it in.
    """

    ctype: str
    name: str
    value: int | float | None = None


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
