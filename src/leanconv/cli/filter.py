"""What ``leanconv filter`` does: one filter over a picture, an array, or a folder of them."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType

import numpy as np

from leanconv.cli import command_line, pictures
from leanconv.cpu.filter2d import rounded
from leanconv.images import filters
from leanconv.images.api import filter2d
from leanconv.options import border_name, device_index, filter_numbers
from leanconv.runtime.progress import progress

#: Products of pixels and weights, and pixels, of one step of the bar: a fraction of a second on a CPU.
STEP_PRODUCTS, STEP_PIXELS = 1 << 28, 1 << 20
#: What a file may be at fault for; the others of a folder are filtered all the same.
_OF_ONE_FILE = (ValueError, TypeError, OverflowError, OSError, MemoryError, ImportError)


@dataclass(frozen=True)
class Settings:
    """What is done to every picture: see `filtered`, and `pictures.read` for ``max_pixels``."""

    kernel: np.ndarray
    border: str = "reflect101"
    value: float = 0
    delta: float = 0
    absolute: bool = False
    device: str | None = None
    max_pixels: int | None = None


def settings(
    kernel: str, border: str, value: float, delta: float, absolute: bool, device: str | None, max_pixels: int | None
) -> Settings:
    """What the words of a command line mean. Raises ValueError for words that mean nothing, OSError for a kernel's file
    that cannot be read."""
    if kernel.lower().endswith(".npy"):
        weights = pictures.read_array(Path(kernel))
        if weights.ndim != 2 or weights.dtype.kind not in "biuf":
            raise ValueError(f"{kernel} holds {weights.dtype} of shape {weights.shape}; a kernel is (rows, columns)")
    else:
        weights = filters.from_words(kernel)
    if device == "cpu":
        device = None
    if device is not None:
        device_index(device)
    # NOTE: Python makes no integer of thousands of digits, which are a wrong word
    name = border_name(int(border) if border.isdecimal() and len(border) < 9 else border)
    # of integers too, so that sums of int32 saturate
    return Settings(weights.astype(np.float64), name, value, delta, absolute, device, max_pixels)


def run(sources: Sequence[Path], target: Path, wanted: Settings) -> bool:
    """Filter each file and write it. Returns whether all of them were; of a single file, errors are raised.

    Of several, errors are printed, and the next file follows. KeyboardInterrupt is raised again, after a line that says
    what was written.
    """
    if len(sources) > 1 or sources[0].is_dir():
        return _run_several(_several(sources, target), target, wanted)
    if not sources[0].exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(sources[0]))
    if target.is_dir():
        _refuse_itself(sources[0], target / sources[0].name)
        target /= sources[0].name
    try:
        with _interrupts() as check:
            done = _filter_file(sources[0], target, wanted, check, bar=True)
    except KeyboardInterrupt:
        print(f"interrupted: {target} is not written", file=sys.stderr)
        raise
    print(f"{target}: {'x'.join(map(str, done.pixels.shape))} {done.pixels.dtype}")
    return True


def _run_several(names: dict[Path, Path], target: Path, wanted: Settings) -> bool:
    """`run` with what to read for each file to write."""
    target.mkdir(parents=True, exist_ok=True)
    written = failed = 0
    try:
        with progress(len(names)) as begin, _interrupts() as check:
            for result, source in names.items():
                begin(source.name)
                try:
                    _filter_file(source, result, wanted, check)
                    written += 1
                except _OF_ONE_FILE as error:
                    failed += 1
                    command_line.complain(error, source)
    except BaseException as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
        print(f"{reason}: {written} of {len(names)} files are written to {target}", file=sys.stderr)
        raise
    print(f"{target}: {written} of {len(names)} files are written" if failed else f"{target}: {written} files")
    return not failed


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Gives what raises KeyboardInterrupt if there was a Ctrl-C since: NumPy's reader loses one that comes within it,
    and raises a TypeError in its place, or nothing."""
    seen = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or another program's to handle
        yield check
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _several(sources: Sequence[Path], target: Path) -> dict[Path, Path]:
    """What to read for each file to write. Raises ValueError where two have one name, or a source would be replaced."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is no folder, and what is read may be several files")
    names: dict[Path, Path] = {}
    for source in sources:
        for path in _pictures_in(source) if source.is_dir() else [source]:
            result = target / path.name
            if result in names:
                raise ValueError(f"{names[result]} and {path} would both be written to {result}")
            _refuse_itself(path, result)
            names[result] = path
    # a target may be a symlink, which stays, and the file that it points to is replaced
    read = {os.path.realpath(path): path for path in names.values()}
    written: dict[str, Path] = {}
    for result, source in names.items():
        real = os.path.realpath(result)
        if real in read:
            raise ValueError(f"{read[real]} would be replaced by the result of {source}, as {result} points to it")
        if real in written:
            raise ValueError(f"{written[real]} and {source} would both be written to {real}")
        written[real] = source
    return names


def _pictures_in(folder: Path) -> list[Path]:
    """The files in a folder whose suffix is that of a picture or an array; folders in it and hidden files are not."""
    known = pictures.suffixes()
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in known and not path.name.startswith(".") and not path.is_dir()
    ]
    if not found:
        raise ValueError(f"{folder} holds no file with the suffix of a picture or of an array")
    return found


def _refuse_itself(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"{source} would be replaced by its result; name another folder, or the file itself as OUT")


def _filter_file(
    source: Path, target: Path, wanted: Settings, check: Callable[[], None], bar: bool = False
) -> pictures.Picture:
    pictures.check_target(target)
    try:
        done = filtered(pictures.read(source, wanted.max_pixels), wanted, bar)
        check()
        pictures.write(target, done)
    except _OF_ONE_FILE:
        check()
        raise
    return done


def filtered(picture: pictures.Picture, wanted: Settings, bar: bool = False) -> pictures.Picture:
    """Every channel filtered by `leanconv.filter2d`, and rounded once; dtype and transparency stay.

    ``absolute`` takes absolute values, after which ``delta`` is added. Raises what filter2d raises. On the CPU a long
    image is filtered by strips, with a bar that moves.
    """
    pixels = picture.pixels.astype(picture.pixels.dtype.newbyteorder("="), copy=False)
    result = np.empty_like(pixels)
    colours = slice(None, -1 if picture.alpha else None)
    if picture.alpha:
        result[..., -1] = pixels[..., -1]
    if picture.channels_last:
        images, results = pixels[None, ..., colours], result[None, ..., colours]
    else:
        images, results = (array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:]) for array in (pixels, result))
    parts = list(_parts(images.shape, wanted))
    with progress(len(parts), bar and len(parts) > 1) as begin:
        for image, read, top, rows in parts:
            begin(f"row {rows.start}")
            strip = _filtered(images[image, read], picture.channels_last, wanted)
            results[image, rows] = strip[:, top : top + rows.stop - rows.start]
    return replace(picture, pixels=result)


def _parts(shape: Sequence[int], wanted: Settings) -> Iterator[tuple[slice, slice, int, slice]]:
    """Steps of images (n, height, …): which images, rows to read, which of their results are kept, rows to write.

    Strips give what the whole image does: they overlap by what the kernel reads, and only the first and the last reach
    a border. That of ``wrap`` is at the other end of the image, which is one strip then. A GPU takes images whole.
    """
    count, height, *rest = shape
    kh, kw = wanted.kernel.shape
    row = max(1, math.prod(rest))
    rows = max(4 * kh, STEP_PIXELS // row, STEP_PRODUCTS // (row * max(1, kh * kw)))
    if wanted.device is not None:
        return (yield slice(None), slice(None), 0, slice(0, height))
    strips = 1 if wanted.border == "wrap" else max(1, height // rows)
    images = max(1, rows // max(1, height))
    edges = [height * strip // strips for strip in range(strips + 1)]
    above, below = kh // 2, kh - 1 - kh // 2
    for image in range(0, count, images):
        for first, last in pairwise(edges):
            begin = max(0, first - above)
            yield slice(image, image + images), slice(begin, last + below), first - begin, slice(first, last)


def _filtered(images: np.ndarray, channels_last: bool, wanted: Settings) -> np.ndarray:
    """Images filtered, in their dtype."""
    kind = images.dtype
    dtype, delta = None, wanted.delta
    if wanted.absolute:
        dtype, delta = ("float64" if kind.name in ("int32", "float64") else "float32"), 0
    result: np.ndarray = filter2d(
        images, wanted.kernel, border=wanted.border, value=wanted.value, delta=delta, dtype=dtype,  # type: ignore[arg-type]
        channels_last=channels_last, device=wanted.device,
    )  # fmt: skip
    if not wanted.absolute:
        return result
    _, delta = filter_numbers(wanted.value, wanted.delta, kind.name, result.dtype.name, kind.name)
    with np.errstate(over="ignore", invalid="ignore"):  # infinite, or NaN, as filter2d has it
        return rounded(np.abs(result) + result.dtype.type(delta), kind.name)
