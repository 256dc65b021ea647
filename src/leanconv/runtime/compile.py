"""From a launch to machine code: four generated lines around a kernel header, given to NVRTC. Needs no GPU."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leanconv.plan import Constants, Launch, Pointer
from leanconv.runtime.errors import LeanconvError
from leanconv.runtime.files import read_json

#: Where headers are found: ``<kernels/simt/implicit_gemm.cuh>``, ``<device/index.cuh>``.
INCLUDE = Path(__file__).resolve().parent.parent

#: NVRTC options besides the architecture. No fast-math: float32 means float32, denormals included.
OPTIONS = {"std": "c++17", "ptxas_options": ["-v"]}


_importing = threading.Lock()
_FIGURES = {"symbol": str, "arch": str, "registers": int, "spill_bytes": int, "stack_bytes": int}


@dataclass(frozen=True)
class Compiled:
    """Machine code of one launch for one architecture, with the compiler's own figures (registers a thread, bytes)."""

    cubin: bytes
    symbol: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    #: sentences of the compiler on what it could not do: products that wait for each other, registers not passed on
    advice: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """A hash of the instructions and the constants, whatever the kernel and its parameters are called.

        Of constants all but bank 4: it has an address for each constant of ``Problem`` and ``Tuning``, read or not.
        """
        found = []
        for name, content, size in _sections(self.cubin):
            if name.startswith((".text.", ".nv.shared.")):
                found.append((name.split(".")[1], size, hashlib.sha256(content).hexdigest()))
            elif name.startswith(".nv.constant") and not name.startswith(".nv.constant4"):
                found.append((name.split(".")[2], size, hashlib.sha256(content).hexdigest()))
        return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]

    @property
    def entry(self) -> bytes:
        """As it is kept in files: the cubin, so that cuobjdump reads it, and a last line of JSON with the compiler's
        figures and the cubin's checksum."""
        record = {field: getattr(self, field) for field in _FIGURES}
        record["sha256"] = hashlib.sha256(self.cubin).hexdigest()
        return self.cubin + b"\n" + json.dumps(record).encode()

    @classmethod
    def from_entry(cls, content: bytes) -> Compiled:
        """What `entry` holds. Raises ValueError, TypeError, KeyError or AttributeError for what is none."""
        cubin, _, record = content.rpartition(b"\n")
        figures = read_json(record)
        if figures.pop("sha256") != hashlib.sha256(cubin).hexdigest():
            raise ValueError("its checksum differs")
        if {name: type(figure) for name, figure in figures.items()} != _FIGURES:
            raise ValueError("its figures are others")
        return cls(cubin=cubin, **figures)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Name, content and size of each section of an ELF file; what has a size alone has no content."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    names = sections[of_names][4]
    for name_at, kind, _, _, offset, length in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        yield name, cubin[offset : offset + length] if kind == 1 else b"", length


class CompileError(LeanconvError, RuntimeError):
    """NVRTC refused a kernel. The message holds the compiler's log, the options and the numbered source."""

    def __init__(self, log: str, options: str, source: str) -> None:
        numbered = "\n".join(f"{i:3d}  {line}" for i, line in enumerate(source.splitlines(), 1))
        super().__init__(f"{log.strip()}\n\noptions: {options}\n\nsource:\n{numbered}")
        self._made_of = log, options, source

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str, str]]:
        """So that it comes back whole from a process that compiles for another one."""
        return type(self), self._made_of


def _struct(name: str, constants: Constants) -> str:
    members = []
    for key, value in constants:
        if isinstance(value, bool):
            members.append(f"static constexpr bool {key} = {str(value).lower()};")
        elif isinstance(value, int):
            kind = "int" if -(2**31) <= value < 2**31 else "long long"
            members.append(f"static constexpr {kind} {key} = {value};")
        else:
            members.append(f"using {key} = {value};")
    return f"struct {name} {{ {' '.join(members)} }};"


def source(launch: Launch) -> str:
    """The translation unit of a launch: include, the two structs of constants, one entry point with a plain name."""
    parameters = ", ".join(f"{a.ctype} {a.name}" for a in launch.arguments)
    names = ", ".join(_values(launch))
    cluster = f"__cluster_dims__({launch.cluster}, 1, 1) " if launch.cluster > 1 else ""
    # NOTE: an early launch waits before it reads anything, unless its kernel `waits` by itself: what it reads may not
    # have been written.
    controls = ("wait",) * (launch.early and not launch.waits) + ("launch_dependents",) * launch.opens
    chain = "".join(f'asm volatile("griddepcontrol.{control};" ::: "memory"); ' for control in controls)
    if chain:
        chain = f"\n#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n{chain}\n#endif\n"
    return (
        f"#include <{launch.header}>\n"
        f"{_struct('Problem', launch.problem)}\n"
        f"{_struct('Tuning', launch.tuning)}\n"
        f'extern "C" __global__ void {cluster}__launch_bounds__({launch.block}, {launch.min_blocks}) '
        f"{launch.symbol}({parameters}) {{ {chain}{launch.function}<Problem, Tuning>({names}); }}\n"
    )


def _values(launch: Launch) -> Iterator[str]:
    """What the kernel's function is called with: its parameters, those beside another one together with it."""
    beside = {each.name: each.beside for each in launch.arguments if isinstance(each, Pointer) and each.beside}
    for name in (each.name for each in launch.arguments):
        if name in beside.values():
            parts = [name, *(each if each in beside else "nullptr" for each in ("scale", "add")), "y"]
            yield f"leanconv::Epilogue<Problem>({', '.join(parts)})"
        elif name not in beside:
            yield name


#: In lines of ptxas that no figure replaces.
_ADVICE = r"Potential Performance Loss|setmaxnreg"


def _figure(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    return int(match.group(1)) if match else 0


def compile_source(text: str, symbol: str, arch: str) -> Compiled:
    """Compile one translation unit for ``arch``. Raises CompileError when the compiler refuses it.

    The process' end waits for it, in a daemon thread too: NVRTC crashes where its library ends before its threads.
    """
    if not threading.current_thread().daemon:
        return _compile_source(text, symbol, arch)
    from concurrent.futures import ThreadPoolExecutor

    # threads of a pool end before the process does, and none begins afterwards
    with ThreadPoolExecutor(1) as pool:
        try:
            compiling = pool.submit(_compile_source, text, symbol, arch)
        except RuntimeError:
            raise SystemExit from None  # the process ends, and so does its daemon thread, without a word
        return compiling.result()


def _compile_source(text: str, symbol: str, arch: str) -> Compiled:
    # NOTE: two threads that import cuda.core at the same time see half of it
    with _importing:
        from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = f"--gpu-architecture={arch} --std={OPTIONS['std']} --include-path={INCLUDE}"
    try:
        program = Program(text, "c++", ProgramOptions(arch=arch, include_path=[str(INCLUDE)], **OPTIONS))
        code = program.compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(f"{log.getvalue()}\n{error}", options, text) from error
    report = log.getvalue()
    return Compiled(
        cubin=bytes(code),
        symbol=symbol,
        arch=arch,
        registers=_figure(r"Used (\d+) registers", report),
        spill_bytes=_figure(r"(\d+) bytes spill stores", report),
        stack_bytes=_figure(r"(\d+) bytes stack frame", report),
        advice=tuple(line.strip() for line in report.splitlines() if re.search(_ADVICE, line)),
    )


def cuda_version() -> int:
    """The version of CUDA that NVRTC is of, as the driver writes its own: 13050."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return int(1000 * major + 10 * minor)


def compile_launch(launch: Launch, arch: str) -> Compiled:
    return compile_source(source(launch), launch.symbol, arch)
