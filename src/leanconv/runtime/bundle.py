"""Bundles: compiled kernels in one file that is only read, for machines without NVRTC, or without a home to write to.

A bundle is a zip file with entries of the folder of compiled kernels, ``kernels/<key>.cubin``, tables of tuned
problems, ``tables/<gpu>.json``, and ``manifest.json``: the version of leanconv, the compiler and its version of CUDA,
the GPUs and the problems that it is for. LEANCONV_BUNDLE names one, or several as PATH does. One that is not for this
version, GPU or driver is refused, as is a damaged one, with a warning at the first time. What is not in it comes from
the folder of compiled kernels, or from NVRTC.

NOTE: the file stays closed between look-ups: processes that fork would share its position.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from leanconv.runtime import env
from leanconv.runtime.compile import Compiled
from leanconv.runtime.driver import CudaUnavailableError, driver, version_text
from leanconv.runtime.errors import warn_once
from leanconv.runtime.files import open_regular, read_json, whole

#: counts up when the form of a bundle changes
_FORMAT = 1
_MANIFEST, _KERNEL, _TABLE = "manifest.json", "kernels/{}.cubin", "tables/{}"
#: bytes of a zip file's header of a member, before its name; the lengths of name and rest are in the last four
_HEADER, _LENGTHS = 30, struct.Struct("<26xHH")
#: errors of what is no zip file, or a damaged one
_DAMAGED = (
    ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error, struct.error, EOFError,
    OverflowError,
    RuntimeError,  # what zipfile says of an encrypted member; NotImplementedError, of an unknown version, is one
)  # fmt: skip


class Member(NamedTuple):
    """What the directory of a zip file says of a member."""

    #: where it begins in the file, its bytes there and its own
    at: int
    packed: int
    size: int
    compressed: bool
    #: its checksum, CRC-32
    crc: int


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been looked at; its kernels are read one by one."""

    path: Path
    #: of leanconv
    version: str
    #: as `cache.compiler_version` names it, and the version of CUDA that it is of, as the driver writes it: 13050
    compiler: str
    cuda: int
    #: name and architecture of each GPU it is for
    gpus: tuple[tuple[str, str], ...]
    #: in words
    problems: tuple[str, ...]
    members: Mapping[str, Member] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Raises OSError where there is no file, ValueError where it is no bundle or a damaged one."""
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                members = {each.filename: _member(each) for each in archive.infolist()}
                about = read_json(archive.read(_MANIFEST))
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']}, not {_FORMAT}")
            gpus = tuple((str(each["name"]), str(each["arch"])) for each in about["gpus"])
            version, compiler, problems = str(about["leanconv"]), str(about["compiler"]), map(str, about["problems"])
            return cls(path, version, compiler, int(about["cuda"]), gpus, tuple(problems), members)
        except _DAMAGED as error:
            raise ValueError(f"{path} is no bundle of kernels, or a damaged one: {error}") from None

    def __str__(self) -> str:
        gpus = ", ".join(f"{name} ({arch})" for name, arch in self.gpus)
        kernels = f"{len(self.kernels)} kernels of {len(self.problems)} problems" if self.problems else ""
        return f"{kernels or f'{len(self.kernels)} kernels'} for {gpus}"

    @property
    def kernels(self) -> list[str]:
        """Names of what it holds, as of the files in the folder of compiled kernels."""
        return [name for name in self.members if name.startswith("kernels/")]

    def why_not(self, arch: str) -> str:
        """Why its kernels are not for this version of leanconv, this architecture and this driver; empty if they are.

        Where there is no driver nothing can be run, and none is asked.
        """
        if self.version != (this := _version()):
            return f"it was made by leanconv {self.version}, and this is {this}"
        if arch not in (known := [arch for _, arch in self.gpus]):
            return f"it is for {', '.join(f'{n} ({a})' for n, a in self.gpus)}, and this GPU is {arch}" if known else ""
        try:
            has = driver().version
        except CudaUnavailableError:
            return ""
        # within a major version of CUDA a driver takes the machine code of every compiler
        if has // 1000 < self.cuda // 1000:
            return (
                f"its compiler is of CUDA {version_text(self.cuda)}, and the driver supports CUDA {version_text(has)}"
            )
        return ""

    def content(self, name: str) -> bytes:
        """A member's bytes. Raises KeyError where there is none, OSError, and other errors where it is damaged."""
        at, packed, size, compressed, crc = self.members[name]
        with open_regular(self.path) as file:
            file.seek(at)
            header = file.read(_HEADER)
            file.seek(sum(_LENGTHS.unpack(header)), os.SEEK_CUR)
            found = file.read(packed)
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(found, size) if compressed else found
        if zlib.crc32(content) != crc:
            raise ValueError("its checksum differs")
        return content

    def load(self, key: str) -> Compiled | None:
        """A kernel by its key; None where it is absent and, with a warning at the first, where it is damaged."""
        name = _KERNEL.format(key)
        if name not in self.members:
            return None
        try:
            return Compiled.from_entry(self.content(name))
        except (OSError, *_DAMAGED) as error:
            text = f"{name} in the bundle {self.path} cannot be used: {type(error).__name__}: {error}"
            warn_once(f"kernels of {self.path}", text)
            return None


def _member(found: zipfile.ZipInfo) -> Member:
    if found.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{found.filename} is compressed in another way than deflate")
    return Member(found.header_offset, found.compress_size, found.file_size, bool(found.compress_type), found.CRC)


def _version() -> str:
    # NOTE: the package imports this module, and is there before it
    return str(sys.modules["leanconv"].__version__)


def write(
    path: Path, compiler: str, cuda: int, kernels: Mapping[str, Compiled], gpus: Iterable[tuple[str, str]],
    problems: Iterable[str] = (), tables: Mapping[str, str] = {},
) -> Bundle:  # fmt: skip
    """Make a bundle, or add to one; the file appears whole. Gives what it is now.

    Args:
        path: the file.
        compiler, cuda: what made the kernels, as `Bundle` has it.
        kernels: by their keys.
        gpus, problems: that these are for.
        tables: of tuned problems, by the names of their files; each replaces the one that is there.

    Raises ValueError where the file is none, a damaged one, or one of another version or compiler; OSError.
    """
    this = _version()
    members: dict[str, bytes] = {}
    if path.exists():
        old = Bundle.read(path)
        for what, theirs, ours in (("leanconv", old.version, this), ("the compiler", old.compiler, compiler)):
            if theirs != ours:
                raise ValueError(f"{path} is of {what} {theirs}, and this is {ours}: remove it, or name another file")
        for name in sorted(old.members.keys() - {_MANIFEST}):
            try:
                members[name] = old.content(name)
            except _DAMAGED as error:
                raise ValueError(f"{name} in {path} is damaged: {error}; remove {path}, or name another file") from None
        gpus, problems = (*old.gpus, *gpus), (*old.problems, *problems)
    members |= {_KERNEL.format(key): code.entry for key, code in kernels.items()}
    members |= {_TABLE.format(name): text.encode() for name, text in tables.items()}
    about = {
        "format": _FORMAT,
        "leanconv": this,
        "compiler": compiler,
        "cuda": cuda,
        "gpus": [{"name": name, "arch": arch} for name, arch in dict.fromkeys(gpus)],
        "problems": list(dict.fromkeys(problems)),
    }
    with whole(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in ((_MANIFEST, json.dumps(about, indent=1).encode()), *sorted(members.items())):
            # without a date: equal bundles are equal files
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Bundle.read(path)


# Those that this process reads

#: by path: what tells that the file is another one now, and the bundle or what is wrong with it
_known: dict[Path, tuple[Any, Bundle | str]] = {}


def opened(path: Path) -> Bundle | str:
    """A bundle, which is looked at once as long as the file is the same; or what is wrong with it."""
    if str(path).startswith("~"):  # `env.bundles` leaves it so
        return f"{path} is in a home folder that cannot be found"
    try:
        status = os.stat(path)
        sign = status.st_ino, status.st_size, status.st_mtime_ns
        if path not in _known or _known[path][0] != sign:
            _known[path] = sign, Bundle.read(path)
    except ValueError as error:
        _known[path] = sign, str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return _known[path][1]


def examined(arch: str) -> Iterator[tuple[Path, Bundle, str] | tuple[Path, None, str]]:
    """Each bundle that LEANCONV_BUNDLE names, and why it is not used; empty if it is."""
    for path in env.bundles():
        found = opened(path)
        yield (path, None, found) if isinstance(found, str) else (path, found, found.why_not(arch))


def in_use(arch: str) -> Iterator[Bundle]:
    """The bundles that hold for an architecture; a warning names each of the others once."""
    for path, found, why in examined(arch):
        if why:
            warn_once(f"bundle {path}", f"the bundle of kernels {path} is not used: {why}")
        elif found is not None:
            yield found


def described(arch: str) -> str:
    """What bundles there are, and why some are not used, for an error of what they lack."""
    return "; ".join(f"{path}: {why or found}" for path, found, why in examined(arch))


def with_tables() -> Iterator[Path]:
    """The bundles that have tables of tuned problems; these hold for the GPUs that they name."""
    for path in env.bundles():
        found = opened(path)
        if not isinstance(found, str) and any(name.startswith("tables/") for name in found.members):
            yield path


def table(path: Path) -> bytes | None:
    """The table at ``path`` below that of a bundle; None where no bundle has that path.

    Raises FileNotFoundError where the bundle has no such table, OSError or ValueError where it cannot be read.
    """
    if path.parent not in env.bundles():
        return None
    found = opened(path.parent)
    if isinstance(found, str) or _TABLE.format(path.name) not in found.members:
        raise FileNotFoundError(path)
    try:
        return found.content(_TABLE.format(path.name))
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
