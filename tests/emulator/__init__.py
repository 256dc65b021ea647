"""Runs CUDA kernels on the CPU: the very same ``.cuh`` files, built by g++ under sanitizers.

    from tests.emulator import run_plan
    y = np.full(problem.y_shape, np.nan, np.float32)
    run_plan(plan, {"x": x, "w": w, "bias": bias, "y": y, "n": 2})   # fills y in place

``plan`` is what ``Algorithm.plan`` returns; an argument without a fixed value is taken from ``arrays`` by its name
(an array, a number, or None for a null pointer; a tensor map by its role; ``workspace`` and ``prepared`` are made by
themselves). Bytes outside an array are fenced: touching them raises EmulatorError with the sanitizer's report, as do
a misaligned vector access, integer overflow, cp.async rules broken, threads that part at a barrier or shuffle, arrivals
at a named barrier that do not come out even, mbarriers that are miscounted or waited for in the wrong phase, bulk
copies that are used before a wait has seen them land, products of the tensor cores whose registers or operands are
touched before they have been waited for. A block runs in three thread orders (see runtime.cpp), whose
results must agree to the last bit, so that a missing barrier shows. Shared memory starts as NaN in each block.
The blocks of a cluster are alive at the same time; the other blocks are played one after the other.
``python -m pytest tests/emulator/test_emulator.py`` shows each check at work. ``run_source`` takes a unit as text.
Built units are kept in $XDG_CACHE_HOME/leanconv-emulator (~/.cache), named by everything that went into them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Container, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.plan import Argument, Launch, Number, Plan, Pointer, TensorMap
from leanconv.runtime import compile as compiler

HERE = Path(__file__).resolve().parent
ORDERS = ("ascending", "descending", "shuffled")
# Most units run once or twice: -Og compiles a quarter faster than -O1 and runs a fifth slower.
FLAGS = (
    *(
        "-std=c++17",
        "-Og",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        # What the fences around arrays find as well: half of the time that a kernel runs.
        "-fno-sanitize=null,object-size,vptr,return,returns-nonnull-attribute,nonnull-attribute,pointer-overflow",
        "-fno-omit-frame-pointer",
        # Calls instead of code at each access: an eighth less to compile, and a tenth more of what a kernel runs.
        "--param=asan-instrumentation-with-call-threshold=0",
    ),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-w"),
)
# A unit is a shared object that is linked against nothing: to link a program with the sanitizers takes eight times as
# long, a third of what it takes to compile a kernel.
# The sanitizers' calls, one for each access, go without a stub: an eighth less of what a kernel runs.
TOLD_FLAGS = (*FLAGS, "-fPIC", "-fno-plt", "-fvisibility=hidden")
# What is undefined stops the program and says no more: a sixth less to compile. It is built once more to tell the rest.
UNIT_FLAGS = (*TOLD_FLAGS, "-fsanitize-undefined-trap-on-error")
# The machinery itself is not under test. What it copies for a kernel is looked at by the sanitizer's own memcpy.
RUNTIME_FLAGS = (*(flag for flag in FLAGS if "san" not in flag), "-O2", "-fno-builtin-memcpy")
# Sums of products are vectorised, where rounding may not trap: they take a sixth of the time.
PRODUCTS_FLAGS = ("-O3", "-fno-trapping-math")
SANITIZER = {
    # One report, at once; exit codes apart from the emulator's own 86. Who allocated says nothing. Addresses become
    # lines here: the sanitizers read the debug information of every library first, 0.1 s for each report.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=87:print_legend=0:"
    "malloc_context_size=0:symbolize=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=88:symbolize=0",
}
#: How ``runtime`` ends when the unit cannot be loaded.
NOT_LOADED = 85
TIME_LIMIT_S = 300
KEEP_DAYS = 3

#: Formats of the scalars that a kernel may take, by C++ type.
SCALARS = {
    "int": "i",
    "unsigned": "I",
    "float": "f",
    "double": "d",
    "long long": "q",
    "unsigned long long": "Q",
    "bool": "?",
}


#: Every wrapper of a PTX instruction, for kernels that tests write.
ALL_PTX = "".join(
    f"#include <device/ptx/{path.name}>\n" for path in sorted((HERE / "include/device/ptx").glob("*.cuh"))
)


class EmulatorError(AssertionError):
    """The kernel did something that a GPU would not forgive; the message is the report."""


class UndefinedError(EmulatorError):
    """It has stopped where something is undefined, and a unit built with ``told`` says what."""


class EmulatorBuildError(RuntimeError):
    """g++ refused the unit, or something that it needs is missing; the message says what."""


def cache_dir() -> Path:
    """Where built units are kept, outside the tree."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "leanconv-emulator"


@cache
def _compiler() -> tuple[str, str]:
    path = shutil.which("g++")
    if path is None:
        raise EmulatorBuildError("the emulator needs g++ on the PATH (Debian: apt install g++)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, version


@cache
def cuda_include() -> tuple[Path, ...]:
    """Folders of the CUDA headers in the wheels nvidia-cuda-runtime and nvidia-cuda-crt."""
    try:
        import nvidia
    except ImportError:
        nvidia = None
    roots = [Path(p) for p in nvidia.__path__] if nvidia else []
    found = []
    for name in ("vector_types.h", "crt/host_defines.h"):
        files = [f for root in roots for f in sorted(root.glob(f"*/include/{name}"))]
        if not files:
            raise EmulatorBuildError(f"the emulator needs {name}; pip install nvidia-cuda-runtime nvidia-cuda-crt")
        found.append(files[0].parents[name.count("/")])
    return tuple(dict.fromkeys(found))


@cache
def _prune() -> None:
    """Forget units that nothing has used for some days: every edit of a kernel makes new ones."""
    for entry in cache_dir().glob("*"):
        try:
            if entry.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                entry.unlink()
        except OSError:
            continue


def _digest(*parts: str | bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(struct.pack("<q", len(data)) + data)
    return state.hexdigest()[:32]


def _includes(text: str, folder: Path = HERE) -> tuple[str, ...]:
    """What ``text`` includes, by name; what lies beside it in ``folder``, by its path."""
    found = re.findall(r"^\s*#\s*include (?:<(.+)>|\"(.+)\")", text, re.MULTILINE)
    return tuple(name or str(folder / beside) for name, beside in found)


def _included(text: str, kernels: Path) -> bytes:
    """Every header of the project that ``text`` reaches, so that an edit builds no unit that does not see it."""
    return (_reached_once if kernels in (HERE, compiler.INCLUDE) else _reached)(_includes(text), kernels)


def _reached(names: tuple[str, ...], kernels: Path) -> bytes:
    found: dict[str, bytes] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        file = next((f for folder in (HERE / "include", kernels) if (f := folder / name).exists()), None)
        if file is not None and name not in found:
            found[name] = file.read_bytes()
            waiting += _includes(found[name].decode(), file.parent)
    return b"\0".join(name.encode() + b"\0" + found[name] for name in sorted(found))


#: The project's own headers stay as they are while tests run; copies of them, in other folders, are edited.
_reached_once = cache(_reached)


def _run_compiler(arguments: list[str], unit: str) -> None:
    path, _ = _compiler()
    done = subprocess.run([path, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise EmulatorBuildError(f"{done.stderr.strip()}\n\noptions: {' '.join(arguments)}\n\nsource:\n{unit}")


def _publish(name: str, make: Any) -> Path:
    """The cached file ``name``; made by ``make(path)`` under another name first, so that it appears whole."""
    _prune()
    folder = cache_dir()
    target = folder / name
    if target.exists():
        os.utime(target)
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        make(made)
        os.replace(made, target)
    return target


def _include_flags(kernels: Path) -> list[str]:
    return [f"-I{HERE / 'include'}", f"-I{kernels}", *(f"-isystem{folder}" for folder in cuda_include())]


def runtime() -> Path:
    """The program that plays units, built once."""
    return _runtime(cache_dir())


@cache
def _runtime(folder: Path) -> Path:
    """The one in the cache folder."""
    sources = [HERE / f"{name}.cpp" for name in ("runtime", "intrinsics", "mbarrier", "bulk", "tensor", "wgmma", "mma")]
    texts = [source.read_text() for source in sources]
    key = _digest(*texts, _included("".join(texts), HERE), _compiler()[1], " ".join((*RUNTIME_FLAGS, *PRODUCTS_FLAGS)))

    def make_part(source: Path, path: Path) -> None:
        flags = (*RUNTIME_FLAGS, *(PRODUCTS_FLAGS if source.stem == "mma" else ()), *_include_flags(HERE))
        _run_compiler([*flags, "-c", str(source), "-o", str(path)], str(source))

    def make(path: Path) -> None:
        # two workers that begin together do not compile the same: one begins with the last part
        odd = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
        order = sources[::-1] if odd else sources
        made = [str(_publish(f"{source.stem}-{key}.o", partial(make_part, source))) for source in order]
        _run_compiler(["-fsanitize=address,undefined", "-rdynamic", *made, "-ldl", "-o", str(path)], "")

    return _publish(f"runtime-{key}", make)


def _precompiled(text: str, kernels: Path, flags: Sequence[str]) -> list[str]:
    """Options that put ``text``, some includes, in front of a unit; parsed once, which is most of all parsing."""
    key = _digest(text, _included(text, kernels), _compiler()[1], " ".join(flags))
    # g++ takes this one where it cannot use the compiled one
    header = _publish(f"headers-{key}.h", lambda path: path.write_text(text))

    def make(path: Path) -> None:
        _run_compiler([*flags, *_include_flags(kernels), "-x", "c++-header", str(header), "-o", str(path)], text)

    _publish(f"{header.name}.gch", make)
    return ["-include", str(header)]


def build(
    unit: str, symbol: str, arguments: Sequence[Argument], kernels: Path = compiler.INCLUDE, *, told: bool = False
) -> Path:
    """The unit as a shared object that ``runtime`` plays, built or from the cache. Raises EmulatorBuildError.

    ``told``: where something is undefined, its report says what.
    """
    flags = TOLD_FLAGS if told else UNIT_FLAGS
    calls = ", ".join(f"*static_cast<{a.ctype} *>(arguments[{i}])" for i, a in enumerate(arguments))
    entry = '__attribute__((visibility("default"))) void emulator_call(void** arguments)'
    stub = f'extern "C" {entry} {{ {symbol}({calls}); }}\n'
    text = f'#include <emulator.h>\n#line 1 "unit.cu"\n{unit}\n{stub}'
    key = _digest(text, _included(text, kernels), _compiler()[1], " ".join(flags))

    def make(path: Path) -> None:
        source = path.with_name("unit.cpp")
        source.write_text(text)
        # other folders have few units
        first = "".join(re.findall(r"\A#include <.*>\n", unit)) if kernels == compiler.INCLUDE else ""
        before = _precompiled(f"#include <emulator.h>\n{first}", kernels, flags)
        _run_compiler(
            [*flags, *_include_flags(kernels), *before, "-shared", "-nostdlib", str(source), "-o", str(path)], text
        )

    return _publish(f"{symbol}-{key}.so", make)


def _located(report: str, unit: Path) -> str:
    """The report with functions and lines for the addresses in ``unit``; without addr2line, as it is."""
    place = re.compile(rf"\({re.escape(str(unit))}\+(0x[0-9a-f]+)\)")
    addresses = list(dict.fromkeys(place.findall(report)))
    if not addresses or shutil.which("addr2line") is None:
        return report
    command = ["addr2line", "-aipCf", "-e", str(unit), *addresses]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    blocks = re.split(r"^0x[0-9a-f]+: ", said, flags=re.MULTILINE)[1:]
    if len(blocks) != len(addresses):
        return report
    lines = {a: " ".join(block.split()) for a, block in zip(addresses, blocks, strict=True)}
    return place.sub(lambda found: f"in {lines[found[1]]}", report)


def _writable(argument: Argument) -> bool:
    return isinstance(argument, Pointer) and argument.written


def _described(arguments: Sequence[Argument]) -> list[Argument]:
    """The arrays that the kernel only takes through tensor maps: the runtime gets them behind its arguments."""
    maps = [a for a in arguments if isinstance(a, TensorMap)]
    roles = dict.fromkeys(m.role for m in maps if not any(a.name == m.role for a in arguments))
    written = {m.role for m in maps if m.written}
    return [Pointer(role, "unsigned char", written=role in written) for role in roles]


def _pack_map(spec: TensorMap, array: int) -> bytes:
    """A parameter that is a tensor map (MapSpec of async.h) of the parameter numbered ``array``."""
    if reasons := spec.why_not():
        raise ValueError(f"{spec.name} cannot be made: {'; '.join(reasons)}")
    box = (spec.channels, spec.pixels) if spec.im2col else spec.box
    numbers = (spec.strides, 4), (spec.shape, 5), (box, 5), (spec.lower, 3), (spec.upper, 3), (spec.steps, 5)
    padded = [value for values, count in numbers for value in (*values, *(0,) * (count - len(values)))]
    kind = spec.rank, spec.element_bytes, spec.swizzle, spec.im2col, spec.written
    data = struct.pack("<8sQQ4Q5I5H3h3h5B5B20s", b"a tensor", 0, 0, *padded, *kind, spec.name.encode()[:19])
    return struct.pack("<qqq", 4, len(data), array) + data


def _bind(argument: Argument, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Number) and argument.value is not None:
        return argument.value
    if argument.name not in values:
        raise KeyError(f"the kernel takes {argument.ctype} {argument.name}, which is not among {sorted(values)}")
    return values[argument.name]


def _pack(argument: Argument, value: Any, offset: int, hidden: bool) -> bytes:
    if isinstance(argument, Number):
        data = struct.pack("<" + SCALARS[argument.ctype.removeprefix("const ").strip()], value)
        return struct.pack("<qqq", 0, len(data), 0) + data
    if value is None:
        return struct.pack("<qqq", 3, 0, 0)
    if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
        raise TypeError(f"{argument.name} must be a contiguous NumPy array")
    kind = (2 if _writable(argument) else 1) + 8 * hidden
    return struct.pack("<qqq", kind, value.nbytes, offset) + value.tobytes()


def execute(
    unit: Path,
    arguments: Sequence[Argument],
    values: Mapping[str, Any],
    *,
    grid: int,
    block: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    orders: Sequence[str] = ORDERS,
    offsets: Mapping[str, int] | None = None,
    hidden: Container[str] = (),
) -> None:
    """Play one launch; arrays that the kernel takes as non-const pointers are filled in place.

    An array that is given for a const pointer too is the same memory there. ``offsets`` moves an array that many bytes
    off its 256-byte alignment. The ``hidden`` ones no thread of a cluster may touch before one of its threads has
    waited for the launches before (``griddepcontrol_wait``). Raises EmulatorError; an UndefinedError where something is
    undefined and the unit was not built to tell it.
    """
    passed = [*arguments, *_described(arguments)]
    names = [a.name for a in passed]
    bound = [None if isinstance(a, TensorMap) else _bind(a, values) for a in passed]
    request = struct.pack("<qqqqq", grid, block, cluster, shared_bytes, len(orders))
    request += struct.pack(f"<{len(orders)}q", *(ORDERS.index(o) for o in orders)) + struct.pack("<q", len(bound))
    for a, v in zip(passed, bound, strict=True):
        same = [i for i, b in enumerate(passed) if v is not None and bound[i] is v and _writable(b) and b is not a]
        if isinstance(a, TensorMap):
            request += _pack_map(a, names.index(a.role))
        elif same and not _writable(a):
            request += struct.pack("<qqq", 5, 0, same[0])
        else:
            request += _pack(a, v, (offsets or {}).get(a.name, 0), a.name in hidden)
    try:
        done = subprocess.run(
            [runtime(), unit], input=request, capture_output=True, env={**os.environ, **SANITIZER}, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise EmulatorError(f"{unit.name} did not end within {TIME_LIMIT_S} s") from error
    report = done.stderr.decode(errors="replace").strip()
    if done.returncode == NOT_LOADED:
        raise EmulatorBuildError(f"{unit.name} calls what the emulator does not have:\n{report}")
    if done.returncode:
        kind = UndefinedError if done.returncode == -signal.SIGILL else EmulatorError
        raise kind(f"{unit.name} ended with {done.returncode}:\n{_located(report, unit)}")
    written = [(a, v) for a, v in zip(passed, bound, strict=True) if _writable(a) and v is not None]
    size = sum(v.nbytes for _, v in written)
    results = [done.stdout[i * size : (i + 1) * size] for i in range(len(orders))]
    if len(done.stdout) != size * len(orders):
        raise EmulatorError(f"{unit.name} answered {len(done.stdout)} bytes, not {size * len(orders)}:\n{report}")
    for order, result in zip(orders, results, strict=True):
        if result != results[0]:
            first = next(i for i, (a, b) in enumerate(zip(result, results[0], strict=True)) if a != b)
            raise EmulatorError(
                f"a race: thread orders {orders[0]} and {order} give different bytes, the first at byte {first} of "
                f"{', '.join(a.name for a, _ in written)}"
            )
    position = 0
    for _, value in written:
        value[...] = np.frombuffer(results[0], value.dtype, value.size, position).reshape(value.shape)
        position += value.nbytes


def _play(
    unit: str, symbol: str, arguments: Sequence[Argument], values: Mapping[str, Any], kernels: Path, **how: Any
) -> None:
    try:
        execute(build(unit, symbol, arguments, kernels), arguments, values, **how)
    except UndefinedError:
        execute(build(unit, symbol, arguments, kernels, told=True), arguments, values, **how)
        raise


def run_launch(launch: Launch, values: Mapping[str, Any], *, kernels: Path = compiler.INCLUDE, **how: Any) -> None:
    """Play one launch of a plan (see ``run_plan``)."""
    _play(
        compiler.source(launch),
        launch.symbol,
        launch.arguments,
        values,
        kernels,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        shared_bytes=launch.shared_bytes,
        **how,
    )


def run_plan(
    plan: Plan,
    arrays: Mapping[str, Any],
    *,
    kernels: Path = compiler.INCLUDE,
    orders: Sequence[str] = ORDERS,
    offsets: Mapping[str, int] | None = None,
) -> None:
    """Play the launches of ``plan`` one after the other, those that prepare first; output arrays are filled in place.

    ``arrays`` has the arguments by name; ``kernels`` is the folder of kernel headers. Raises EmulatorError when a
    kernel misbehaves or when its result depends on the thread order, EmulatorBuildError when it does not compile.
    """
    values = dict(arrays)
    for name, nbytes in (("workspace", plan.workspace_bytes), ("prepared", plan.prepared_bytes)):
        values.setdefault(name, np.full(nbytes, 0xFF, np.uint8) if nbytes else None)
    written: set[str] = set()
    for launch in plan.every_launch:
        if not launch.grid:  # nor is it compiled for a GPU
            continue
        hidden = frozenset(written if launch.waits else ())
        run_launch(launch, values, kernels=kernels, orders=orders, offsets=offsets, hidden=hidden)
        written |= {a.name for a in (*launch.arguments, *_described(launch.arguments)) if _writable(a)}


def run_source(
    unit: str,
    symbol: str,
    arguments: Sequence[Argument],
    values: Mapping[str, Any],
    *,
    grid: int = 1,
    block: int = 32,
    cluster: int = 1,
    shared_bytes: int = 0,
    orders: Sequence[str] = ORDERS,
) -> None:
    """Play the kernel ``symbol`` of a unit given as text; for kernels that have no host half."""
    how: dict[str, Any] = {"grid": grid, "block": block, "cluster": cluster, "shared_bytes": shared_bytes}
    _play(unit, symbol, arguments, values, compiler.INCLUDE, orders=orders, **how)
