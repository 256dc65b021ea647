"""Pictures that Pillow would cut to 8 bits a channel, or cannot open: PNG of 16 bits, TIFF of 16 bits or of floats.

imagecodecs reads and writes the PNG files, tifffile the TIFF files; both come with the extra ``leanconv[pictures]``.
"""

from __future__ import annotations

import importlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

#: How TIFF and BigTIFF files begin, in both byte orders.
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION, _ICC_PROFILE = 274, 34675
_GREY, _RGB = 1, 2
_SEPARATE_PLANES, _PREMULTIPLIED = 2, 1
#: A compression that few builds of Pillow's library for TIFF have.
_WEBP = 50001
#: What TIFF calls samples with a sign.
SIGNED = 2
_SIGNATURE_AND_IHDR = 8 + 25


class Refused(ValueError):
    """A picture that is not taken; the message goes on after the file's name."""


def check_memory(path: Path, needed: int) -> None:
    """Raise MemoryError for more bytes than the machine has, which it may promise, and then end the process."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, which promises no more than it has
        return
    if needed > there:
        raise MemoryError(f"{path} takes {needed} bytes, and this machine has {there}")


def has_tifffile() -> bool:
    try:
        return find_spec("tifffile") is not None
    except ValueError:  # a module without a specification
        return False


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{what} needs {name}: pip install 'leanconv[pictures]'") from error


def read_png(file: BinaryIO, path: Path) -> np.ndarray:
    """The pixels (height, width, channels) of a PNG of 16 bits; what is transparent by its colour gets a channel more.

    Raises ImportError where imagecodecs is missing, and its own errors for a damaged file.
    """
    codecs = _library("imagecodecs", f"{path}: 16 bits in each of several channels")
    file.seek(0)
    pixels: np.ndarray = codecs.png_decode(file.read())
    return pixels


def write_png(path: Path, pixels: np.ndarray, icc_profile: bytes | None) -> None:
    """Write uint16 pixels (height, width, channels). Raises ImportError where imagecodecs is missing."""
    codecs = _library("imagecodecs", "PNG of 16 bits in each of several channels")
    data = codecs.png_encode(np.ascontiguousarray(pixels))
    chunk = b""
    if icc_profile:
        content = b"iCCP" + b"ICC Profile\0\0" + zlib.compress(icc_profile)
        chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    path.write_bytes(data[:_SIGNATURE_AND_IHDR] + chunk + data[_SIGNATURE_AND_IHDR:])


def read_tiff(path: Path, most: int | None) -> tuple[np.ndarray, bool, bytes | None] | None:
    """Upright pixels (height, width) or (height, width, channels), whether the last one is transparency, the profile.

    None for what is left to Pillow: up to 8 bits without a sign, in a compression that it knows, and what tifffile does
    not open. Raises Refused for what cannot be filtered, and for more pixels than ``most``; tifffile's own errors for
    damaged pixels.
    """
    tifffile = _library("tifffile", "TIFF")
    with _silent("tifffile"), ExitStack() as opened:
        # NOTE: by its name, since tifffile takes no file that was opened by its descriptor
        try:
            tiff = opened.enter_context(tifffile.TiffFile(path))
            page, pages = tiff.pages[0], len(tiff.pages)
            bits, width, height = page.bitspersample, page.imagewidth, page.imagelength
        except Exception:
            return None
        if bits <= 8 and int(page.sampleformat) != SIGNED and _pillow_unpacks(int(page.compression)):
            return None
        if pages > 1:
            raise Refused(f"holds {pages} pictures, and only one can be filtered")
        if most is not None and width * height > most:
            raise Refused(f"has {width} x {height} pixels, more than {most}; --max-pixels 0 allows any")
        alpha = _check_page(page)
        check_memory(path, page.nbytes)
        pixels = page.asarray()
        if page.samplesperpixel > 1 and int(page.planarconfig) == _SEPARATE_PLANES:
            pixels = np.moveaxis(pixels, 0, -1)
        pixels = upright(pixels, int(page.tags.valueof(_ORIENTATION, 1)))
        profile = page.tags.valueof(_ICC_PROFILE)
        return pixels, alpha, None if profile is None else bytes(profile)


def _pillow_unpacks(compression: int) -> bool:
    from PIL import TiffImagePlugin

    return compression in TiffImagePlugin.COMPRESSION_INFO and compression != _WEBP


def check_slices(number: int) -> None:
    """Raise Refused for a picture of several slices."""
    if number > 1:
        raise Refused(f"holds {number} slices, and only one can be filtered")


def _check_page(page: Any) -> bool:
    """Whether the picture has transparency. Raises Refused unless it is grey or RGB of whole bytes."""
    check_slices(page.imagedepth)
    extra = tuple(map(int, page.extrasamples))
    channels, bits = page.samplesperpixel, page.bitspersample
    known = (int(page.photometric), channels - len(extra)) in ((_GREY, 1), (_RGB, 3))
    if not known or len(extra) > 1:
        raise Refused(
            f"has {bits} bits in {channels} channels of kind {getattr(page.photometric, 'name', page.photometric)}; "
            "above 8 bits, and in compressions that Pillow has not, only grey and RGB are taken, with one channel of "
            "transparency"
        )
    if bits not in (8, 16, 32, 64) or page.dtype is None:
        raise Refused(f"has {bits} bits in each channel; convert it to 8, 16 or 32 bits")
    if extra == (_PREMULTIPLIED,):
        raise Refused("has colours that are multiplied by their transparency; convert it to separate transparency")
    return bool(extra)


def write_tiff(path: Path, pixels: np.ndarray, alpha: bool, icc_profile: bytes | None) -> None:
    """Write pixels of any real dtype. Raises ImportError where tifffile is missing."""
    tifffile = _library("tifffile", f"TIFF of {pixels.dtype} in {pixels[:1, :1].size} channels")
    colours = (pixels.shape[2] if pixels.ndim == 3 else 1) - alpha
    tifffile.imwrite(
        path,
        np.ascontiguousarray(pixels),
        photometric="rgb" if colours == 3 else "minisblack",
        planarconfig="contig" if pixels.ndim == 3 else None,
        extrasamples=["unassalpha"] if alpha else None,
        iccprofile=icc_profile,
        metadata=None,
        software=False,
    )


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels (height, width, …) as Exif's and TIFF's orientation says that they are to be shown; 1 is as they are."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Without what a library logs about a damaged file: one error says it."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
