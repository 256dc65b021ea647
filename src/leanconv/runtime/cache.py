"""The only disk store: compiled kernels, one file each, named by a hash of all that determines the machine code.

A file is an entry of `compile.Compiled`. Files appear whole: they are written under a temporary name, then renamed, so
any number of processes may race; of those that want the same kernel at once, one compiles it. A file that fails its
checks counts as absent and is written again; so does one that belongs neither to this user nor to root.

Bundles (`bundle`) hold the same entries in files that are only read, and are asked first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leanconv.plan import Launch
from leanconv.runtime import bundle, env
from leanconv.runtime import compile as compiler
from leanconv.runtime.compile import INCLUDE, Compiled, CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.errors import warn_once
from leanconv.runtime.files import is_ours, process_lock, read_bytes, whole

SUFFIX = ".cubin"
#: counts up when the file format changes
_FORMAT = 1
#: What to do where the compiler is not installed.
INSTALL_COMPILER = "pip install 'leanconv[cu13]' (or 'leanconv[cu12]' for a driver below CUDA 13)"
_INCLUDE = re.compile(rb"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)


@cache
def headers(name: str) -> dict[str, bytes]:
    """``name`` and every header below kernels/ that it includes, directly or not, with their text.

    Headers from elsewhere (CUDA's own) come with the compiler, whose version is part of the key.
    """
    found: dict[str, bytes] = {}
    todo = [name]
    while todo:
        header = todo.pop()
        path = INCLUDE / header
        if header in found or not path.is_file():
            continue
        text = found[header] = path.read_bytes()
        included = [match.decode() for match in _INCLUDE.findall(text)]
        # NVRTC looks below kernels/ for <...>, and beside the including file for "..."
        todo += included
        todo += [(Path(header).parent / other).as_posix() for other in included]
    return found


@cache
def _headers(name: str) -> dict[str, str]:
    """The same with their checksums."""
    return {header: hashlib.sha256(text).hexdigest() for header, text in headers(name).items()}


@cache
def compiler_version() -> str:
    """Version of the NVRTC that would compile; raises CudaUnavailableError where there is none.

    Read from the names in site-packages: NVRTC's own query loads 100 MB, so it serves only an NVRTC that did not come
    as a wheel.
    """
    for folder in sys.path:
        try:
            wheels = [name for name in os.listdir(folder or ".") if name.startswith("nvidia_cuda_nvrtc")]
        except OSError:
            continue
        if wheels:
            return " ".join(sorted(wheels))
    try:
        from cuda.bindings import nvrtc

        return "nvrtc {1}.{2}".format(*nvrtc.nvrtcVersion())
    except Exception as error:
        raise _no_compiler(error) from error


def _no_compiler(error: BaseException) -> CudaUnavailableError:
    return CudaUnavailableError(
        f"the CUDA compiler NVRTC, or cuda-core that drives it, is not installed: {INSTALL_COMPILER}. {error}"
    )


def key(launch: Launch, arch: str, compiler_name: str | None = None) -> str:
    """Hash of source, included headers, options, architecture and compiler, by default the one that is installed.

    In memory a kernel has the name of no compiler, "": where NVRTC is missing, bundles may have it.
    """
    made_by = compiler_version() if compiler_name is None else compiler_name
    parts = [_FORMAT, compiler.source(launch), _headers(launch.header), compiler.OPTIONS, arch, made_by]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def directory() -> Path | None:
    """The folder of the kernels, or None when the store is switched off or the user has no home."""
    base = None if env.cache_disabled() else env.cache_dir()
    return None if base is None else base / "kernels"


def load(name: str) -> Compiled | None:
    """The entry called ``name``; None where it is absent and, with a warning at the first time, where it cannot be read
    or trusted.
    """
    folder = directory()
    if folder is None:
        return None
    path = folder / f"{name}{SUFFIX}"
    try:
        # NOTE: its machine code would run with this user's rights, and anybody can put a file into a folder that
        # everybody may write to. A link could stand for another kernel of ours.
        code = Compiled.from_entry(read_bytes(path, trusted=True))
        with suppress(OSError):  # another user's folder, or a read-only one
            # each start of hundreds of processes would write as many times
            if time.time() - path.stat().st_mtime > _USED_S:
                os.utime(path)
        return code
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn_once(str(folder), f"{path} is compiled again, as it cannot be used: {type(error).__name__}: {error}")
        return None


#: An entry that was used so many seconds ago is marked as used again.
_USED_S = 60
#: counts what this process stores; the folder's size is looked at after the first kernel, and then after every so many
_stores = itertools.count()
_SHRINK_EVERY = 64


def store(name: str, compiled: Compiled) -> None:
    """Write an entry; where that is impossible, warn once per folder and go on."""
    folder = directory()
    if folder is None:
        return
    content, limit = compiled.entry, env.cache_limit()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(content) <= limit:
            with whole(folder / f"{name}{SUFFIX}", follow=False) as file:
                file.write_bytes(content)
        if next(_stores) % _SHRINK_EVERY == 0:
            shrink(limit)
    except OSError as error:
        warn_once(
            f"writing {folder}",
            f"compiled kernels cannot be kept in {folder} ({error}); every process compiles them again. "
            "Set LEANCONV_CACHE_DIR to a writable folder.",
        )


#: names in memory of what this process has compiled, and not another one at the same time
made: list[str] = []


def compiled(launch: Launch, arch: str, bundled: bool = True) -> Compiled:
    """Machine code of ``launch``, from a bundle or the folder, or else from NVRTC; not ``bundled``, from no bundle.

    Raises CompileError where NVRTC refuses the source, CudaUnavailableError where NVRTC is not installed.
    """
    for each in bundle.in_use(arch) if bundled else ():
        code = each.load(key(launch, arch, each.compiler))
        if code is not None:
            return code
    try:
        return _from_folder(launch, arch)
    except CudaUnavailableError as error:
        if said := bundle.described(arch):
            raise CudaUnavailableError(f"{launch.symbol} is in no bundle ({said}), and {error}") from error
        raise


def _from_folder(launch: Launch, arch: str) -> Compiled:
    """From the folder, or else from NVRTC."""
    name, folder = key(launch, arch), directory()
    code = load(name)
    if code is not None or folder is None:
        return code or _made(launch, arch, name)
    path = folder / f"{name}{SUFFIX}"
    # of several processes that start at once, as for several GPUs, one compiles it
    with process_lock(folder.parent / "locks", int(name[:15], 16), path.exists) as waited:
        if waited:
            with suppress(OSError):
                # NOTE: a client of a network file system remembers for a while that a file was not there, until it
                # reads the folder
                os.listdir(folder)
            code = load(name)
        return code or _made(launch, arch, name)


def _made(launch: Launch, arch: str, name: str) -> Compiled:
    code = _compile(launch, arch)
    made.append(key(launch, arch, ""))
    store(name, code)
    return code


def _compile(launch: Launch, arch: str) -> Compiled:
    try:
        return compiler.compile_launch(launch, arch)
    except ImportError as error:
        raise _no_compiler(error) from error
    except CompileError as error:
        # cuda-pathfinder's error for a library that is not installed; its class has moved between releases
        if type(error.__cause__).__name__ == "DynamicLibNotFoundError":
            raise _no_compiler(error.__cause__ or error) from error
        raise


#: Names of `store`'s files, finished, and unfinished as `files.whole` names them. NOTE: the user chooses the folder, so
#: nothing else in it is ours to count or remove.
_FINISHED, _UNFINISHED = (re.compile(name) for name in (rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}", r"\.[0-9a-f]{64}\..+"))
#: An unfinished file this old, in seconds, was left by a process that died.
_ABANDONED_S = 3600


class _Entry(NamedTuple):
    """A file of the store: when it was used, its bytes, and whether `load` would open it."""

    used: int
    path: Path
    nbytes: int
    trusted: bool


def _entries() -> list[_Entry]:
    """The store's files, without what other processes are writing just now. Of a link the link itself."""
    base = env.cache_dir()
    entries = []
    with suppress(OSError):  # no folder, or none of ours
        for path in (base / "kernels").iterdir() if base else ():
            finished = _FINISHED.fullmatch(path.name)
            if finished or _UNFINISHED.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISDIR(status.st_mode):
                        continue
                    if finished or time.time() - status.st_mtime > _ABANDONED_S:
                        trusted = stat.S_ISREG(status.st_mode) and is_ours(status)
                        entries.append(_Entry(status.st_mtime_ns, path, status.st_size, trusted))
    return entries


def size() -> tuple[int, int]:
    """How many kernels are stored, and the bytes they take."""
    return _totals(_entries())


def refused() -> int:
    """How many files have the name of a kernel and are not loaded: links, devices, and files of other users."""
    return sum(not each.trusted and _FINISHED.fullmatch(each.path.name) is not None for each in _entries())


def stored() -> dict[str, Compiled]:
    """The stored kernels that can be used, by their keys."""
    paths = [each.path for each in _entries()]
    names = [path.name.removesuffix(SUFFIX) for path in paths if _FINISHED.fullmatch(path.name)]
    return {name: code for name in sorted(names) if (code := load(name)) is not None}


def clear() -> tuple[int, int]:
    """Remove every stored kernel; returns their number and bytes."""
    entries = _entries()
    for each in entries:
        each.path.unlink(missing_ok=True)
    return _totals(entries)


def shrink(limit: int) -> int:
    """If the kernels take more than ``limit`` bytes, remove those not used for longest, down to three quarters of it.

    Returns the bytes removed. A process that has loaded a kernel does not need its file any more.
    """
    entries, removed = _entries(), 0
    _, total = _totals(entries)
    for each in sorted(entries) if total > limit else ():
        if removed >= total - limit * 3 // 4:
            break
        each.path.unlink(missing_ok=True)
        removed += each.nbytes
    return removed


def _totals(entries: list[_Entry]) -> tuple[int, int]:
    """The number of finished kernels that may be loaded, and the bytes of all entries."""
    finished = sum(each.trusted and _FINISHED.fullmatch(each.path.name) is not None for each in entries)
    return finished, sum(each.nbytes for each in entries)
